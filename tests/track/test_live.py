"""The line that people watch: on a terminal, in a file, and what it says of the time left."""

import io
import os
import pty
import re
import sys
from pathlib import Path

import pytest
from rich.console import Console
from step_reports import report

from shardwise.track import LiveLine, PlainLines, progress
from shardwise.track.live import duration, facts, seconds_left


class Clock:
    def __init__(self) -> None:
        self.seconds = 0.0

    def __call__(self) -> float:
        return self.seconds


def live_output(width: int, steps: range, clock: Clock, seconds_per_step: float) -> str:
    stream = io.StringIO()
    console = Console(file=stream, force_terminal=True, width=width, color_system=None)
    line = LiveLine(20, console, now=clock)
    for step in steps:
        line.record(report(step))
        clock.seconds += seconds_per_step
    line.close()
    return stream.getvalue()


def test_facts_come_in_the_order_in_which_a_narrow_terminal_may_cut_them():
    assert facts(report(4, metrics={"accuracy": 0.8771}), 11_520) == (
        "loss 0.5000  3,412 samples/s  3 h 12 min left  grad 1.5  1.5 GiB  lr 3.0e-04  accuracy 0.877"
    )


def test_what_is_not_known_is_left_out():
    assert facts(report(4, grad_norm=None, memory_bytes=None), 9) == (
        "loss 0.5000  3,412 samples/s  9 s left  lr 3.0e-04"
    )


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0 s"),
        (59.4, "59 s"),
        (59.6, "1 min 0 s"),
        (725, "12 min 5 s"),
        (3_599.7, "1 h 0 min"),
        (11_520, "3 h 12 min"),
        (187_200, "2 d 4 h"),
    ],
)
def test_a_duration_is_told_in_its_two_largest_units(seconds: float, text: str):
    assert duration(seconds) == text


def test_time_left_follows_the_median_so_one_slow_step_does_not_move_it():
    assert seconds_left([2.0, 2.0, 90.0, 2.0, 2.0], step=40, steps=100) == 120.0
    assert seconds_left([2.0], step=100, steps=100) == 0.0
    assert seconds_left([], step=1, steps=100) is None


def test_the_live_line_is_drawn_over_and_never_wraps():
    output = live_output(width=60, steps=range(1, 4), clock=Clock(), seconds_per_step=1.0)
    text = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", output)
    rows = [row for row in text.replace("\r", "\n").split("\n") if "step" in row]
    assert len(rows) >= 3
    assert all(len(row) <= 60 for row in rows)
    assert "step 3/20" in rows[-1]
    assert "…" in rows[-1]


def test_fast_steps_are_not_all_drawn_but_the_last_one_is():
    output = live_output(width=120, steps=range(1, 21), clock=Clock(), seconds_per_step=0.02)
    drawn = [step for step in range(1, 21) if f"step {step}/20" in output]
    assert len(drawn) <= 6
    assert drawn[-1] == 20


def test_plain_lines_come_every_five_seconds_and_at_both_ends():
    clock, stream = Clock(), io.StringIO()
    lines = PlainLines(100, stream, now=clock)
    for step in range(1, 14):
        lines.record(report(step))
        clock.seconds += 1.0
    lines.close()
    lines.close()
    assert [line.split("  ")[0] for line in stream.getvalue().splitlines()] == [
        "step 1/100",
        "step 6/100",
        "step 11/100",
        "step 13/100",
    ]
    first, *_, last = stream.getvalue().splitlines()
    assert "left" not in first  # it warms up
    assert "44 s left" in last


def test_a_file_gets_plain_lines_and_a_terminal_the_live_one(tmp_path: Path):
    with (tmp_path / "log").open("w") as file:
        assert type(progress(10, file)) is PlainLines
    ours, theirs = pty.openpty()
    with os.fdopen(theirs, "w") as terminal:
        assert type(progress(10, terminal)) is LiveLine
    os.close(ours)


def test_a_run_that_ends_before_its_first_step_leaves_no_line(capsys: pytest.CaptureFixture[str]):
    progress(10, sys.stdout).close()
    assert capsys.readouterr().out == ""
