"""Several ranks: parts and shards are saved by some and loaded by others; an error is the same on all."""

import os
import resource
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint_world import on_ranks
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

from shardwise.checkpoint import (
    latest,
    load,
    open_checkpoint,
    open_latest,
    save,
)
from shardwise.errors import CheckpointError

WEIGHT = torch.arange(35.0).reshape(7, 5)  # 7 rows over 2 ranks: shards of 4 and 3
BIAS = torch.tensor([0.5])  # 1 row over 2 ranks: the second shard is empty


def whole() -> dict[str, Tensor]:
    return {"model/0.weight": WEIGHT, "model/0.bias": BIAS, "model/1.weight": WEIGHT + 100, "model/shared": BIAS + 1}


def as_stages(rank: int, values: dict[str, Tensor]) -> dict[str, Tensor]:
    """Two pipeline stages: rank 0 holds layer 0, rank 1 layer 1, both hold what is shared."""
    return {name: value for name, value in values.items() if name == "model/shared" or name[6] == str(rank)}


def as_shards(rank: int, values: dict[str, Tensor]) -> dict[str, Tensor]:
    mesh = init_device_mesh("cpu", (2,))
    return {name: distribute_tensor(value, mesh, [Shard(0)]) for name, value in values.items()}


def as_replicas(rank: int, values: dict[str, Tensor]) -> dict[str, Tensor]:
    return values


LAYOUTS = {"stages": as_stages, "shards": as_shards, "replicas": as_replicas}
Layout = Callable[[int, dict[str, Tensor]], dict[str, Tensor]]


def full(state: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: value.full_tensor() if isinstance(value, DTensor) else value for name, value in state.items()}


def clones(state: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in state.items()}


def save_as(rank: int, run: Path, layout: Layout) -> None:
    save(run, 3, layout(rank, clones(whole())), {"of": rank})


def load_as(rank: int, run: Path, layout: Layout) -> tuple[dict[str, Tensor], Any]:
    checkpoint = open_latest(run)
    assert checkpoint is not None
    state = layout(rank, {name: torch.zeros_like(value) for name, value in whole().items()})
    meta = load(checkpoint, state)
    return {name: value.clone() for name, value in full(state).items()}, meta["of"]


@pytest.mark.parametrize("saved", LAYOUTS)
def test_two_ranks_save_and_one_process_loads(tmp_path: Path, saved: str):
    assert on_ranks(2, tmp_path, save_as, tmp_path, LAYOUTS[saved]) == [None, None]
    state, of = load_as(0, tmp_path, as_replicas)
    assert of == 0  # the first rank's meta
    assert all(torch.equal(state[name], value) for name, value in whole().items())


@pytest.mark.parametrize("loaded", LAYOUTS)
def test_one_process_saves_and_two_ranks_load(tmp_path: Path, loaded: str):
    save_as(0, tmp_path, as_replicas)
    for rank, (state, _) in enumerate(on_ranks(2, tmp_path, load_as, tmp_path, LAYOUTS[loaded])):
        expected = as_stages(rank, whole()) if loaded == "stages" else whole()
        assert state.keys() == expected.keys()
        assert all(torch.equal(state[name], value) for name, value in expected.items())


@pytest.mark.parametrize(("saved", "loaded"), [("stages", "shards"), ("shards", "stages")])
def test_stages_become_shards_and_shards_become_stages(tmp_path: Path, saved: str, loaded: str):
    on_ranks(2, tmp_path, save_as, tmp_path, LAYOUTS[saved])
    for rank, (state, _) in enumerate(on_ranks(2, tmp_path, load_as, tmp_path, LAYOUTS[loaded])):
        expected = as_stages(rank, whole()) if loaded == "stages" else whole()
        assert all(torch.equal(state[name], value) for name, value in expected.items())


def test_what_replicas_hold_is_written_once(tmp_path: Path):
    value = {"model/w": torch.randn(100_000)}
    on_ranks(2, tmp_path, save_value, tmp_path, value)
    files = list((tmp_path / "checkpoints/step-00000001").glob("*.distcp"))
    assert sum(file.stat().st_size for file in files) < 1.1 * 400_000


def save_value(rank: int, run: Path, value: dict[str, Tensor]) -> None:
    save(run, 1, value, {})


def same_error(results: list[Any]) -> str:
    assert [type(result) for result in results] == [CheckpointError] * len(results)
    texts = {str(result) for result in results}
    assert len(texts) == 1
    return texts.pop()


def test_a_name_with_two_meanings_is_refused_on_both_ranks(tmp_path: Path):
    text = same_error(on_ranks(2, tmp_path, save_two_meanings, tmp_path))
    assert "'model/w' is float32 of shape (2,) (tensor) on rank 0 and float32 of shape (3,) (tensor) on rank 1" in text
    assert latest(tmp_path) is None


def save_two_meanings(rank: int, run: Path) -> None:
    save(run, 1, {"model/w": torch.zeros(2 + rank)}, {})


def test_one_rank_that_cannot_write_is_named_on_both_and_the_last_whole_one_stays(tmp_path: Path):
    on_ranks(2, tmp_path, save_as, tmp_path, as_stages)
    text = same_error(on_ranks(2, tmp_path, save_beyond_a_limit_on_rank_1, tmp_path))
    assert text.startswith("rank 1: OSError: [Errno 27] File too large")
    assert latest(tmp_path) == tmp_path / "checkpoints/step-00000003"


def save_beyond_a_limit_on_rank_1(rank: int, run: Path) -> None:
    if rank == 1:
        resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))
    save(run, 4, {f"model/{rank}": torch.zeros(100_000)}, {})


def test_folders_that_are_not_shared_are_found_before_anything_is_published(tmp_path: Path):
    for rank in range(2):
        (tmp_path / f"machine-{rank}" / "checkpoints").mkdir(parents=True)
    text = same_error(on_ranks(2, tmp_path, save_to_own_folder, tmp_path))
    assert "__1_0.distcp" in text
    assert "do not share this folder" in text
    assert latest(tmp_path / "machine-0") is None


def save_to_own_folder(rank: int, run: Path) -> None:
    save(run / f"machine-{rank}", 1, {f"model/{rank}": torch.ones(2)}, {})


def test_ranks_at_different_steps_are_told_so(tmp_path: Path):
    text = same_error(on_ranks(2, tmp_path, save_own_step, tmp_path))
    assert "the ranks save different steps: [5, 6]" in text


def save_own_step(rank: int, run: Path) -> None:
    save(run, 5 + rank, {}, {})


def test_a_partial_dtensor_is_refused_on_both_ranks(tmp_path: Path):
    assert "'model/w' cannot be saved: it is a DTensor with a Partial" in same_error(
        on_ranks(2, tmp_path, save_partial, tmp_path)
    )


def save_partial(rank: int, run: Path) -> None:
    mesh = init_device_mesh("cpu", (2,))
    save(run, 1, {"model/w": DTensor.from_local(torch.ones(2), mesh, [Partial()])}, {})


def test_a_wrong_name_on_one_rank_is_the_error_of_both(tmp_path: Path):
    save_as(0, tmp_path, as_replicas)
    text = same_error(on_ranks(2, tmp_path, load_wrong_name_on_rank_1, tmp_path))
    assert text.startswith("rank 1:")
    assert "'model/1.wait' is not in it (but 'model/1.weight' is)" in text


def load_wrong_name_on_rank_1(rank: int, run: Path) -> None:
    state = as_stages(rank, clones(whole()))
    if rank == 1:
        state["model/1.wait"] = state.pop("model/1.weight")
    load(open_checkpoint(run / "checkpoints/step-00000003"), state)


def test_what_neither_rank_asks_for_is_named(tmp_path: Path):
    save_as(0, tmp_path, as_replicas)
    assert "no rank asked for: model/1.weight" in same_error(on_ranks(2, tmp_path, load_without_layer_1, tmp_path))


def load_without_layer_1(rank: int, run: Path) -> None:
    state = as_stages(rank, clones(whole()))
    state.pop("model/1.weight", None)
    load(open_checkpoint(run / "checkpoints/step-00000003"), state)


@pytest.mark.parametrize("file", ["__0_0.distcp", "__1_0.distcp", "meta.json"])
def test_damage_that_one_rank_reads_is_the_error_of_both(tmp_path: Path, file: str):
    on_ranks(2, tmp_path, save_as, tmp_path, as_stages)
    path = tmp_path / "checkpoints/step-00000003" / file
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 16
    path.write_bytes(content)
    text = same_error(on_ranks(2, tmp_path, load_as, tmp_path, as_stages))
    assert f"{file} is not what was saved" in text
    assert os.fspath(path.parent) in text


def test_replicas_of_shards_are_written_once_and_read_by_all(tmp_path: Path):
    assert on_ranks(4, tmp_path, save_on_a_grid, tmp_path) == [None] * 4
    state, _ = load_as(0, tmp_path, as_replicas)
    assert all(torch.equal(state[name], value) for name, value in whole().items())


def save_on_a_grid(rank: int, run: Path) -> None:
    mesh = init_device_mesh("cpu", (2, 2))
    placements = [Replicate(), Shard(0)]
    save(run, 3, {name: distribute_tensor(v, mesh, placements) for name, v in whole().items()}, {"of": rank})


def test_a_rank_that_dies_in_a_save_fails_the_other_and_the_last_whole_one_stays(tmp_path: Path):
    on_ranks(2, tmp_path, save_as, tmp_path, as_stages)
    survivor, dead = on_ranks(2, tmp_path, die_in_a_save_on_rank_1, tmp_path)
    assert isinstance(survivor, RuntimeError)  # of the process group: it lost its peer
    assert isinstance(dead, EOFError)
    assert latest(tmp_path) == tmp_path / "checkpoints/step-00000003"


def die_in_a_save_on_rank_1(rank: int, run: Path) -> None:
    class Deadly(dict[str, Tensor]):
        """Dies where save first looks at the tensors, while the other rank waits."""

        def items(self) -> Any:
            os.kill(os.getpid(), signal.SIGKILL)

    save(run, 4, Deadly() if rank == 1 else {"model/w": torch.ones(2)}, {})
