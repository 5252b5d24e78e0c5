"""metrics.jsonl: whole lines, cut where a resumed run goes on."""

import io
import json
import math
from pathlib import Path

import pytest
from step_reports import report

from shardwise.track import JsonLines, JsonStream


def steps_in(file: Path) -> list[int]:
    return [json.loads(line)["step"] for line in file.read_text().splitlines()]


def write(run: Path, steps: range, resume_step: int = 0) -> None:
    tracker = JsonLines(run, resume_step=resume_step)
    for step in steps:
        tracker.record(report(step))
    tracker.close()


def test_a_record_holds_every_field_and_can_be_read_before_close(tmp_path: Path):
    tracker = JsonLines(tmp_path / "run")
    tracker.record(report(4, metrics={"accuracy": 0.5}, memory_bytes=None))
    assert json.loads((tmp_path / "run/metrics.jsonl").read_text()) == {
        "step": 4,
        "loss": 0.5,
        "grad_norm": 1.5,
        "samples_per_second": 3412.4,
        "learning_rate": 3e-4,
        "seconds": 0.5,
        "memory_bytes": None,
        "metrics": {"accuracy": 0.5},
    }
    tracker.close()


def test_a_resumed_run_goes_on_behind_its_step_and_the_rest_is_set_aside(tmp_path: Path):
    write(tmp_path, range(1, 8))
    write(tmp_path, range(5, 7), resume_step=4)
    assert steps_in(tmp_path / "metrics.jsonl") == [1, 2, 3, 4, 5, 6]
    assert steps_in(tmp_path / "metrics.abandoned.jsonl") == [5, 6, 7]


def test_resuming_behind_the_last_record_cuts_nothing(tmp_path: Path):
    write(tmp_path, range(1, 4))
    write(tmp_path, range(4, 6), resume_step=3)
    assert steps_in(tmp_path / "metrics.jsonl") == [1, 2, 3, 4, 5]
    assert not (tmp_path / "metrics.abandoned.jsonl").exists()


@pytest.mark.parametrize("characters", [1, 20, 100])
def test_a_line_that_a_kill_cut_off_is_removed(tmp_path: Path, characters: int):
    write(tmp_path, range(1, 4))
    file = tmp_path / "metrics.jsonl"
    file.write_bytes(file.read_bytes()[:-characters])
    write(tmp_path, range(3, 4), resume_step=2)
    assert steps_in(file) == [1, 2, 3]


def test_a_line_that_is_no_record_is_named_and_nothing_is_cut(tmp_path: Path):
    write(tmp_path, range(1, 4))
    file = tmp_path / "metrics.jsonl"
    lines = file.read_text().splitlines()
    file.write_text("\n".join([lines[0], "oops", lines[2], ""]))
    before = file.read_bytes()
    with pytest.raises(ValueError, match=r"metrics\.jsonl, line 2 is no record of a step"):
        JsonLines(tmp_path, resume_step=3)
    assert file.read_bytes() == before


def test_a_stream_gets_one_strict_json_object_per_step_even_where_the_loss_is_not_finite():
    stream = io.StringIO()
    tracker = JsonStream(stream)
    tracker.record(report(1, loss=math.nan, metrics={"worst": math.inf, "best": -math.inf}))
    tracker.record(report(2))
    tracker.close()
    first, second = (json.loads(line, parse_constant=pytest.fail) for line in stream.getvalue().splitlines())
    assert (first["loss"], first["metrics"]) == ("NaN", {"worst": "Infinity", "best": "-Infinity"})
    assert (second["step"], second["loss"]) == (2, 1.0)
    assert not stream.closed
