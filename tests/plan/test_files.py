import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from plan_jobs import PLAN, changed

from shardwise.errors import PlanError
from shardwise.plan import Alternative, Plan, load, save


@pytest.mark.parametrize(
    "plan",
    [
        PLAN,
        changed(alternatives=(Alternative(name="4 replicas", reason="short by 4.2 GiB"),), step_seconds=None),
        changed(recompute=True, shard_mode="regathered", weighting="rewritten", notes=("größer",)),
    ],
)
def test_a_plan_comes_back_from_its_file(tmp_path, plan):
    save(plan, tmp_path / "plan.json")
    assert load(tmp_path / "plan.json") == plan


def test_a_file_is_readable_and_stable(tmp_path):
    save(PLAN, tmp_path / "plan.json")
    text = (tmp_path / "plan.json").read_text()
    assert text.startswith('{\n  "version": 1,\n  "cluster": "4x cpu",\n  "devices": 4,\n  "replicas": 2,\n')
    save(load(tmp_path / "plan.json"), tmp_path / "again.json")
    assert (tmp_path / "again.json").read_text() == text


def edited(folder: Path, edit: Callable[[dict[str, Any]], Any]) -> Path:
    save(PLAN, folder / "plan.json")
    content = json.loads((folder / "plan.json").read_text())
    edit(content)
    (folder / "plan.json").write_text(json.dumps(content))
    return folder / "plan.json"


def fault(path: Path) -> str:
    with pytest.raises(PlanError) as error:
        load(path)
    assert str(error.value).startswith(str(path))
    return str(error.value)


@pytest.mark.parametrize(
    ("field", "value", "words"),
    [
        ("cluster", 4, "cluster is 4: Input should be a valid string"),
        ("devices", "4", 'devices is "4": Input should be a valid integer'),
        ("devices", 5, "the plan is for 5 devices, but 2 pipeline ranks x 2 replicas x 1 shards are 4"),
        ("replicas", 0, "replicas is 0; a plan has one or more"),
        ("shards", -1, "shards is -1; a plan has one or more"),
        ("stages", [], "the plan has no stages"),
        ("stages", "all", 'stages is "all"'),
        ("schedule", "2f2b", "schedule is \"2f2b\": Input should be 'gpipe', '1f1b' or 'interleaved-1f1b'"),
        ("schedule", "interleaved-1f1b", "interleaving has two or more stages a rank"),
        ("micro_batches", 0, "micro_batches is 0"),
        ("micro_batches", 9, "batch_size 16 is smaller than 2 data ranks x 9 micro-batches = 18"),
        ("micro_batches", 1.5, "micro_batches is 1.5"),
        ("shard_mode", "both", "shard_mode is \"both\": Input should be 'gathered' or 'regathered'"),
        ("recompute", "yes", 'recompute is "yes": Input should be a valid boolean'),
        ("precision", "fp8", "precision is \"fp8\": Input should be 'fp32', 'bf16' or 'fp16'"),
        ("batch_size", None, "batch_size is null: Input should be a valid integer"),
        ("weighting", "refused", 'weighting is "refused"'),
        ("sample_weight", 0.0, "sample_weight is 0.0; it is a number above zero"),
        ("fingerprint", None, "fingerprint is null"),
        ("notes", "one", 'notes is "one"'),
        ("alternatives", [{"name": "x"}], "alternatives[0].reason is missing"),
        ("step_seconds", "soon", 'step_seconds is "soon"'),
        ("version", 2, "has version 2, and this shardwise reads version 1; make the plan again"),
        ("replica", 2, "replica is no field of it; did you mean replicas?"),
        ("xyz", 1, "xyz is no field of it; remove it"),
    ],
)
def test_a_broken_field_is_named_with_what_belongs_there(tmp_path, field, value, words):
    assert words in fault(edited(tmp_path, lambda content: content.update({field: value})))


@pytest.mark.parametrize(
    ("field", "value", "words"),
    [
        ("begins", None, "stages[1].begins is null"),
        ("begins", "", "stage 1 begins ''"),
        ("ends", 3, "stages[1].ends is 3"),
        ("rank", 5, "put stage s on rank s % 6"),
        ("recompute", [-1], "stage 1 has a number below zero, -1"),
        ("flops", -2, "stage 1 has a number below zero, -2"),
        ("memory_bytes", "much", 'stages[1].memory_bytes is "much"'),
        ("bytes_sent", True, "stages[1].bytes_sent is true"),
        ("memory", 3, "stages[1].memory is no field of it; did you mean memory_bytes?"),
    ],
)
def test_a_broken_field_of_a_stage_is_named_with_its_stage(tmp_path, field, value, words):
    assert words in fault(edited(tmp_path, lambda content: content["stages"][1].update({field: value})))


REQUIRED = [
    "cluster", "devices", "replicas", "stages", "schedule", "micro_batches", "precision", "batch_size", "weighting",
    "fingerprint",
]  # fmt: skip


@pytest.mark.parametrize("field", REQUIRED)
def test_a_missing_field_is_named(tmp_path, field):
    assert f"{field} is missing" in fault(edited(tmp_path, lambda content: content.pop(field)))


def test_all_faults_of_a_file_are_told_at_once(tmp_path):
    message = fault(edited(tmp_path, lambda content: content.update(devices="4", precision="fp8")))
    assert "devices is" in message
    assert "precision is" in message


@pytest.mark.parametrize(
    ("text", "words"), [("{", "it is not JSON"), ("[]", "it holds a list"), ("", "it is not JSON")]
)
def test_a_file_that_holds_no_object_is_no_plan(tmp_path, text, words):
    (tmp_path / "plan.json").write_text(text)
    assert words in fault(tmp_path / "plan.json")


def test_every_field_of_a_plan_is_in_its_file(tmp_path):
    save(PLAN, tmp_path / "plan.json")
    assert list(json.loads((tmp_path / "plan.json").read_text())) == ["version", *Plan.__dataclass_fields__]
