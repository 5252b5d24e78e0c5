"""One process without a process group: saved, found, loaded, and every damage named."""

import json
import re
import resource
import warnings
from pathlib import Path

import pytest
import torch
from torch import Tensor

from shardwise.checkpoint import latest, load, load_part, open_checkpoint, open_latest, save
from shardwise.checkpoint.checksums import checksum
from shardwise.errors import CheckpointError

META = {"position": [3, 17], "plan": "p1", "best": 0.125, "note": None}


def state_of(step: int) -> dict[str, Tensor]:
    return {
        "model/w": torch.full((3, 5), float(step)),
        "model/empty": torch.empty(0, 4),
        "optimizer/w/step": torch.tensor(float(step)),
        "buffers/count": torch.tensor([step], dtype=torch.int64),
    }


def blank() -> dict[str, Tensor]:
    return {name: torch.zeros_like(value) for name, value in state_of(1).items()}


def saved_steps(run: Path) -> list[str]:
    return sorted(path.name for path in (run / "checkpoints").iterdir())


def flip_a_byte(file: Path, at: int) -> None:
    content = bytearray(file.read_bytes())
    content[at] ^= 1
    file.write_bytes(content)


def same(left: dict[str, Tensor], right: dict[str, Tensor]) -> bool:
    return left.keys() == right.keys() and all(torch.equal(left[name], right[name]) for name in left)


def test_what_was_saved_comes_back_in_place_with_its_meta(tmp_path: Path):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        path = save(tmp_path, 42, state_of(42), META)
        checkpoint = open_latest(tmp_path)
        assert checkpoint is not None
        target = blank()
        meta = load(checkpoint, target)
    assert path == tmp_path / "checkpoints" / "step-00000042" == latest(tmp_path) == checkpoint.path
    assert (checkpoint.step, dict(meta), checkpoint.skipped) == (42, META, ())
    assert same(target, state_of(42))


def test_parameters_that_require_gradients_and_views_are_filled_in_place(tmp_path: Path):
    save(tmp_path, 1, {"model/w": torch.arange(6.0).reshape(2, 3).T, "model/v": torch.arange(9.0)[3:5]}, {})
    weight, base = torch.nn.Parameter(torch.zeros(3, 2)), torch.zeros(4)
    load(open_checkpoint(tmp_path / "checkpoints/step-00000001"), {"model/w": weight, "model/v": base[1:3]})
    assert torch.equal(weight.detach(), torch.arange(6.0).reshape(2, 3).T)
    assert base.tolist() == [0, 3, 4, 0]


@pytest.mark.parametrize(
    "dtype", [torch.bfloat16, torch.float16, torch.float64, torch.int8, torch.bool, torch.complex64]
)
def test_values_of_every_type_come_back_bit_for_bit(tmp_path: Path, dtype: torch.dtype):
    value = (torch.randn(7, 3) * 3).to(dtype)
    save(tmp_path, 1, {"model/x": value}, {})
    target = {"model/x": torch.zeros_like(value)}
    load(open_checkpoint(tmp_path / "checkpoints/step-00000001"), target)
    assert torch.equal(target["model/x"], value)


def test_nothing_saved_yet_is_none_and_no_error(tmp_path: Path):
    assert latest(tmp_path / "new") is None
    assert open_latest(tmp_path / "new") is None


def test_the_newest_three_stay_unless_told_otherwise(tmp_path: Path):
    for step in range(5):
        save(tmp_path / "three", step, state_of(step), META)
        save(tmp_path / "all", step, state_of(step), META, keep=None)
        save(tmp_path / "one", step, state_of(step), META, keep=1)
    assert saved_steps(tmp_path / "three") == ["step-00000002", "step-00000003", "step-00000004"]
    assert len(saved_steps(tmp_path / "all")) == 5
    assert saved_steps(tmp_path / "one") == ["step-00000004"]


def test_a_checkpoint_that_is_not_whole_is_neither_counted_nor_deleted(tmp_path: Path):
    for step in (1, 2, 3):
        save(tmp_path, step, state_of(step), META)
    (tmp_path / "checkpoints/step-00000001/meta.json").unlink()
    save(tmp_path, 4, state_of(4), META, keep=2)
    assert saved_steps(tmp_path) == ["step-00000001", "step-00000003", "step-00000004"]


def test_a_save_that_did_not_end_is_passed_over_and_removed_by_the_next(tmp_path: Path):
    save(tmp_path, 1, state_of(1), META)
    for name in (".saving-step-00000002-beef", ".removing-step-00000000-beef"):
        (tmp_path / "checkpoints" / name).mkdir()
        (tmp_path / "checkpoints" / name / "__0_0.distcp").write_bytes(b"half")
    assert latest(tmp_path) == tmp_path / "checkpoints/step-00000001"
    save(tmp_path, 2, state_of(2), META)
    assert saved_steps(tmp_path) == ["step-00000001", "step-00000002"]


def test_a_step_may_be_saved_again(tmp_path: Path):
    save(tmp_path, 7, state_of(7), META)
    save(tmp_path, 7, {"model/w": torch.tensor([1.5])}, {})
    target = {"model/w": torch.zeros(1)}
    load(open_checkpoint(tmp_path / "checkpoints/step-00000007"), target)
    assert target["model/w"].item() == 1.5
    assert saved_steps(tmp_path) == ["step-00000007"]


def test_killed_between_the_two_renames_of_a_step_saved_again_the_old_one_still_counts(tmp_path: Path):
    path = save(tmp_path, 7, state_of(7), META)
    path.rename(path.with_suffix(".old"))
    checkpoint = open_latest(tmp_path)
    assert checkpoint is not None
    assert (checkpoint.step, checkpoint.path) == (7, path.with_suffix(".old"))
    save(tmp_path, 8, state_of(8), META)
    assert saved_steps(tmp_path) == ["step-00000007", "step-00000008"]


def test_killed_just_after_them_the_new_one_counts_and_the_old_one_goes(tmp_path: Path):
    path = save(tmp_path, 7, state_of(7), META)
    path.rename(path.with_suffix(".old"))
    save(tmp_path / "other", 7, {"model/w": torch.ones(1)}, {}).rename(path)
    assert latest(tmp_path) == path
    save(tmp_path, 8, state_of(8), META)
    assert saved_steps(tmp_path) == ["step-00000007", "step-00000008"]
    assert list(open_checkpoint(path).entries) == ["model/w"]


def test_a_run_that_went_back_sets_its_later_checkpoints_aside_and_says_so(tmp_path: Path):
    for step in (1, 2, 3):
        save(tmp_path, step, state_of(step), META)
    with pytest.warns(UserWarning, match="step 2 is saved after step-00000003 was: the run went back"):
        save(tmp_path, 2, state_of(2), META)
    assert latest(tmp_path) == tmp_path / "checkpoints/step-00000002"
    assert [re.sub("(abandoned-.*)-.*", r"\1", name) for name in saved_steps(tmp_path)] == [
        "abandoned-step-00000003",
        "step-00000001",
        "step-00000002",
    ]


@pytest.mark.parametrize("name", ["__0_0.distcp", "meta.json", ".metadata", "SHA256SUMS"])
def test_a_flipped_byte_anywhere_is_found_and_its_file_named(tmp_path: Path, name: str):
    path = save(tmp_path, 1, state_of(1), META)
    original = (path / name).read_bytes()
    for at in {0, len(original) // 3, len(original) // 2, len(original) - 1}:
        flip_a_byte(path / name, at)
        with pytest.raises(CheckpointError, match=re.escape(name)):
            open_checkpoint(path)
        (path / name).write_bytes(original)
    assert open_checkpoint(path).step == 1


@pytest.mark.parametrize("name", ["__0_0.distcp", "meta.json", ".metadata", "SHA256SUMS"])
def test_a_missing_file_is_named_and_the_checkpoint_is_not_the_latest(tmp_path: Path, name: str):
    save(tmp_path, 1, state_of(1), META)
    path = save(tmp_path, 2, state_of(2), META)
    (path / name).unlink()
    with pytest.raises(CheckpointError, match=f"{re.escape(name)} is missing"):
        open_checkpoint(path)
    assert latest(tmp_path) == tmp_path / "checkpoints/step-00000001"


def test_a_lost_line_of_the_sums_leaves_a_file_that_is_not_listed(tmp_path: Path):
    path = save(tmp_path, 1, state_of(1), META)
    sums = (path / "SHA256SUMS").read_text().splitlines(keepends=True)
    (path / "SHA256SUMS").write_text("".join(sums[1:]))
    with pytest.raises(CheckpointError, match=r"\.metadata is not in SHA256SUMS"):
        open_checkpoint(path)


def test_a_damaged_latest_gives_way_to_the_one_before_and_says_why(tmp_path: Path):
    for step in (1, 2, 3):
        save(tmp_path, step, state_of(step), META)
    home = tmp_path / "checkpoints"
    flip_a_byte(home / "step-00000003/__0_0.distcp", 100)
    (home / "step-00000002/SHA256SUMS").unlink()
    with pytest.warns(UserWarning, match="went back to step-00000001"):
        checkpoint = open_latest(tmp_path)
    assert checkpoint is not None
    assert checkpoint.step == 1
    three, two = checkpoint.skipped
    assert "step-00000003 is damaged: __0_0.distcp is not what was saved" in three
    assert "step-00000002/SHA256SUMS is missing" in two


def test_a_run_whose_checkpoints_are_all_damaged_does_not_start_over_in_silence(tmp_path: Path):
    path = save(tmp_path, 1, state_of(1), META)
    flip_a_byte(path / "meta.json", 30)
    with pytest.raises(CheckpointError, match=r"no checkpoint in .* is undamaged.*meta\.json.*from step 0"):
        open_latest(tmp_path)


def test_names_shapes_and_types_that_differ_are_all_named_and_nothing_is_touched(tmp_path: Path):
    checkpoint = open_checkpoint(save(tmp_path, 1, state_of(1), META))
    target = blank() | {"model/w": torch.zeros(5, 3), "buffers/counts": torch.zeros(1)}
    target["optimizer/w/step"] = torch.zeros((), dtype=torch.float64)
    with pytest.raises(CheckpointError) as raised:
        load(checkpoint, target)
    text = str(raised.value)
    assert "'model/w' is float32 of shape (3, 5) there and float32 of shape (5, 3) here" in text
    assert "'optimizer/w/step' is float32 of shape () there and float64 of shape () here" in text
    assert "'buffers/counts' is not in it (but 'buffers/count' is)" in text
    assert not any(value.any() for value in target.values())


def test_what_nobody_asks_for_is_an_error_of_load_and_not_of_load_part(tmp_path: Path):
    checkpoint = open_checkpoint(save(tmp_path, 1, state_of(1), META))
    model = {"model/w": torch.zeros(3, 5)}
    with pytest.raises(CheckpointError, match=r"no rank asked for: buffers/count, optimizer/w/step; .* use load_part"):
        load(checkpoint, model)
    assert dict(load_part(checkpoint, model)) == META
    assert torch.equal(model["model/w"], state_of(1)["model/w"])


def test_a_tensor_on_meta_is_not_replaced_behind_the_callers_back(tmp_path: Path):
    checkpoint = open_checkpoint(save(tmp_path, 1, {"model/w": torch.ones(2)}, {}))
    with pytest.raises(CheckpointError, match=r"'model/w' is on the meta device.*to_empty"):
        load(checkpoint, {"model/w": torch.zeros(2, device="meta")})


@pytest.mark.parametrize(
    ("step", "state", "meta", "words"),
    [
        (-1, {}, {}, "steps count from 0"),
        (1, {"model/w": 3.0}, {}, "'model/w' cannot be saved: it is float"),
        (1, {"model/w": torch.zeros(2, device="meta")}, {}, "on the meta device"),
        (1, {"model/w": torch.eye(2).to_sparse()}, {}, r"value\.to_dense"),
        (1, {}, {"position": (1, 2)}, "use lists for tuples"),
        (1, {}, {"rng": torch.zeros(1)}, "put tensors into state"),
    ],
)
def test_what_cannot_be_saved_is_refused_before_anything_is_written(tmp_path: Path, step, state, meta, words):
    with pytest.raises(CheckpointError, match=words):
        save(tmp_path, step, state, meta)
    assert list(tmp_path.iterdir()) == []


def test_keep_zero_is_a_slip(tmp_path: Path):
    with pytest.raises(ValueError, match="keep is 0"):
        save(tmp_path, 1, state_of(1), META, keep=0)


def test_a_newer_format_is_refused_with_both_numbers(tmp_path: Path):
    path = save(tmp_path, 1, state_of(1), META)
    record = json.loads((path / "meta.json").read_text())
    old_sum = checksum(path / "meta.json")
    (path / "meta.json").write_text(json.dumps(record | {"format": 2}))
    (path / "SHA256SUMS").write_text((path / "SHA256SUMS").read_text().replace(old_sum, checksum(path / "meta.json")))
    with pytest.raises(CheckpointError, match="has format 2, and this shardwise reads 1"):
        open_checkpoint(path)


def test_a_full_disk_is_named_and_leaves_the_whole_one(tmp_path: Path):
    save(tmp_path, 1, state_of(1), META)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1_000_000, hard))  # a write beyond it fails as on a full disk
    try:
        with pytest.raises(CheckpointError, match="File too large"):
            save(tmp_path, 2, {"model/w": torch.zeros(1_000_000)}, META)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert latest(tmp_path) == tmp_path / "checkpoints/step-00000001"
    save(tmp_path, 2, state_of(2), META)
    assert saved_steps(tmp_path) == ["step-00000001", "step-00000002"]
