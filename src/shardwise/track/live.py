"""Show the run while it runs: a line that is drawn over on a terminal, plain lines now and then elsewhere.

step 1,234/10,000 ━━━━━━━━━━━━ loss 2.3456  3,412 samples/s  3 h 12 min left  grad 1.02  12.3 GiB  lr 3.0e-04
"""

import sys
import time
from collections import deque
from collections.abc import Callable, Sequence
from statistics import median
from typing import TextIO, final

from rich.console import Console
from rich.live import Live
from rich.text import Text

from shardwise.track.report import StepReport
from shardwise.track.tracker import Tracker

_STEPS_REMEMBERED = 51  # the median of so many outlives a save or an evaluation in between
_SECONDS_BETWEEN_DRAWINGS = 0.1
_SECONDS_BETWEEN_LINES = 5.0
_BAR_WIDTH = 12


def progress(steps: int, stream: TextIO | None = None) -> Tracker:
    """A `LiveLine` where `stream` (None: sys.stdout) is a terminal, else `PlainLines`; the run ends at `steps`."""
    stream = stream or sys.stdout
    return LiveLine(steps, Console(file=stream)) if stream.isatty() else PlainLines(steps, stream)


@final
class _Pace:
    """Seconds a step. The first step warms up, and tells nothing of the others."""

    def __init__(self) -> None:
        self._recent: deque[float] = deque(maxlen=_STEPS_REMEMBERED)
        self._warm = False

    def record(self, seconds: float) -> None:
        if self._warm:
            self._recent.append(seconds)
        self._warm = True

    def left(self, step: int, steps: int) -> float | None:
        return seconds_left(self._recent, step, steps)


@final
class LiveLine:
    """Draws the last report over the one before; what the program prints meanwhile stays above it."""

    def __init__(self, steps: int, console: Console, now: Callable[[], float] = time.monotonic) -> None:
        self._steps, self._now = steps, now
        self._pace = _Pace()
        self._drawn_at = float("-inf")
        self._last: StepReport | None = None
        self._live = Live(console=console, auto_refresh=False)

    def record(self, report: StepReport) -> None:
        self._pace.record(report.seconds)
        self._last = report
        if not self._live.is_started:
            self._live.start()
        if self._now() - self._drawn_at >= _SECONDS_BETWEEN_DRAWINGS:
            self._draw(report)

    def close(self) -> None:
        if self._last is not None:
            self._draw(self._last)
        self._live.stop()

    def _draw(self, report: StepReport) -> None:
        self._drawn_at = self._now()
        self._live.update(_row(report, self._steps, self._pace.left(report.step, self._steps)), refresh=True)


@final
class PlainLines:
    """Prints a line every five seconds, and for the first and the last step."""

    def __init__(self, steps: int, stream: TextIO, now: Callable[[], float] = time.monotonic) -> None:
        self._steps, self._stream, self._now = steps, stream, now
        self._pace = _Pace()
        self._printed_at = float("-inf")
        self._unprinted: StepReport | None = None

    def record(self, report: StepReport) -> None:
        self._pace.record(report.seconds)
        self._unprinted = report
        if self._now() - self._printed_at >= _SECONDS_BETWEEN_LINES or report.step == self._steps:
            self._print(report)

    def close(self) -> None:
        if self._unprinted is not None:
            self._print(self._unprinted)

    def _print(self, report: StepReport) -> None:
        self._printed_at, self._unprinted = self._now(), None
        left = self._pace.left(report.step, self._steps)
        print(f"{count(report, self._steps)}  {facts(report, left)}", file=self._stream, flush=True)


def seconds_left(recent: Sequence[float], step: int, steps: int) -> float | None:
    """Steps still to do times the median of the `recent` seconds per step: one slow step moves it little."""
    if step >= steps:
        return 0.0
    return (steps - step) * median(recent) if recent else None


def count(report: StepReport, steps: int) -> str:
    """Where the run is: "step 1,234/10,000"."""
    return f"step {report.step:,}/{steps:,}"


def facts(report: StepReport, left_seconds: float | None) -> str:
    """The rest of the line, what matters most first, since a narrow terminal cuts it; what is not known is left out."""
    parts = [f"loss {report.loss:.4f}", f"{_short(report.samples_per_second)} samples/s"]
    if left_seconds is not None:
        parts.append(f"{duration(left_seconds)} left")
    if report.grad_norm is not None:
        parts.append(f"grad {_short(report.grad_norm)}")
    if report.memory_bytes is not None:
        parts.append(f"{report.memory_bytes / 2**30:.1f} GiB")
    parts.append(f"lr {report.learning_rate:.1e}")
    return "  ".join([*parts, *(f"{name} {_short(value)}" for name, value in report.metrics.items())])


def duration(seconds: float) -> str:
    """A time for people, in its two largest units: "45 s", "12 min 5 s", "3 h 12 min", "2 d 4 h"."""
    whole = round(seconds)
    for unit, size, next_unit, next_size in (("d", 86_400, "h", 3_600), ("h", 3_600, "min", 60), ("min", 60, "s", 1)):
        if whole >= size:
            return f"{whole // size} {unit} {whole % size // next_size} {next_unit}"
    return f"{whole} s"


def _short(value: float) -> str:
    """Three digits, or all before the point where there are more: "0.0123", "45.6", "3,412"."""
    return f"{value:,.0f}" if 1_000 <= abs(value) < 1e9 else f"{value:.3g}"


def _row(report: StepReport, steps: int, left_seconds: float | None) -> Text:
    """Cut at the right where the terminal is narrow, so it is always one line."""
    done = min(_BAR_WIDTH * report.step // steps, _BAR_WIDTH)
    bar = (("━" * done, "green"), ("━" * (_BAR_WIDTH - done), "bright_black"))
    step, rest = (count(report, steps), "bold"), facts(report, left_seconds)
    return Text.assemble(step, " ", *bar, " ", rest, no_wrap=True, overflow="ellipsis")
