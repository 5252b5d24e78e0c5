"""Several trackers as one: none of them can stop training, and none slows it unseen."""

import io
import os
import subprocess
import sys
from pathlib import Path

import pytest
from step_reports import report
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from shardwise.track import Callback, StepReport, TensorBoard, all_of


class Broken:
    """Fails at step 2 and when it is closed."""

    def __init__(self) -> None:
        self.steps: list[int] = []

    def record(self, report: StepReport) -> None:
        self.steps.append(report.step)
        if report.step == 2:
            raise OSError("no space left")

    def close(self) -> None:
        raise RuntimeError("close failed too")


class Clock:
    def __init__(self) -> None:
        self.seconds = 0.0

    def __call__(self) -> float:
        return self.seconds


def test_every_tracker_gets_every_report_in_order():
    seen: list[tuple[str, int]] = []
    trackers = [Callback(lambda r, name=name: seen.append((name, r.step))) for name in "ab"]
    both = all_of(*trackers)
    both.record(report(1))
    both.record(report(2))
    both.close()
    assert seen == [("a", 1), ("b", 1), ("a", 2), ("b", 2)]


def test_one_that_raises_is_named_once_and_dropped_and_the_others_go_on():
    broken, seen, stderr = Broken(), [], io.StringIO()
    both = all_of(broken, Callback(lambda r: seen.append(r.step)), stderr=stderr)
    for step in range(1, 5):
        both.record(report(step))
    both.close()
    assert broken.steps == [1, 2]
    assert seen == [1, 2, 3, 4]
    first, second = stderr.getvalue().splitlines()
    assert first.startswith(
        "shardwise: tracker Broken failed after step 2 and is dropped, training goes on: OSError: no space left"
    )
    assert f"{Path(__file__).name}:" in first
    assert second.startswith("shardwise: tracker Broken failed at the end: RuntimeError: close failed too")


def test_a_callback_is_named_by_its_function():
    def my_function(report: StepReport) -> None:
        raise KeyError("lr")

    stderr = io.StringIO()
    all_of(Callback(my_function), stderr=stderr).record(report(1))
    assert "my_function) failed after step 1" in stderr.getvalue()


def test_ctrl_c_in_a_tracker_is_not_held_back():
    def interrupt(report: StepReport) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        all_of(Callback(interrupt)).record(report(1))


def test_one_that_takes_long_is_named_once_and_kept():
    clock, stderr, calls = Clock(), io.StringIO(), []

    def slow(report: StepReport) -> None:
        calls.append(report.step)
        clock.seconds += 0.4

    tracker = all_of(Callback(slow), stderr=stderr, now=clock)
    for step in range(1, 7):
        tracker.record(report(step, seconds=2.0))
    assert calls == [1, 2, 3, 4, 5, 6]
    assert stderr.getvalue().count("\n") == 1
    assert "slow) took 1.2 s of 6.0 s of training" in stderr.getvalue()


def test_one_that_takes_a_small_share_of_long_steps_is_not_named():
    clock, stderr = Clock(), io.StringIO()

    def quick(report: StepReport) -> None:
        clock.seconds += 0.4

    tracker = all_of(Callback(quick), stderr=stderr, now=clock)
    for step in range(1, 20):
        tracker.record(report(step, seconds=30.0))
    assert stderr.getvalue() == ""


def test_tensorboard_reads_back_what_was_recorded_and_a_resumed_run_hides_the_steps_it_repeats(tmp_path: Path):
    first = TensorBoard(tmp_path)
    for step in range(1, 5):
        first.record(report(step, loss=float(step), grad_norm=None, metrics={"accuracy": 0.25}))
    first.close()
    resumed = TensorBoard(tmp_path, resume_step=2)
    resumed.record(report(3, loss=33.0))
    resumed.close()
    events = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    assert [(e.step, e.value) for e in events.Scalars("train/loss")] == [(1, 1.0), (2, 2.0), (3, 33.0)]
    assert [(e.step, e.value) for e in events.Scalars("metrics/accuracy")] == [(1, 0.25), (2, 0.25)]
    assert [e.step for e in events.Scalars("train/grad_norm")] == [3]


def test_without_tensorboard_the_error_holds_the_line_to_type(tmp_path: Path):
    program = (
        "import sys; sys.modules['tensorboard'] = None\n"
        "from shardwise.track import TensorBoard\n"
        "try: TensorBoard(sys.argv[1])\n"
        "except ImportError as error: print(error)\n"
    )
    run = subprocess.run(
        [sys.executable, "-c", program, os.fspath(tmp_path)], capture_output=True, text=True, check=True
    )
    assert 'pip install "shardwise[tensorboard]"' in run.stdout
