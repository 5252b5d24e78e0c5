"""Who wants to know: the interface, a user's function behind it, and several trackers as one."""

import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol, TextIO, final

from shardwise.track.report import StepReport

# A tracker that takes more than this share of training, once it has taken this long, is worth a line.
_NOTICEABLE_SHARE = 0.05
_NOTICEABLE_SECONDS = 1.0


class Tracker(Protocol):
    """Takes one report per step, in order of step, then is closed once."""

    def record(self, report: StepReport) -> None: ...

    def close(self) -> None: ...


@final
@dataclass(frozen=True, slots=True)
class Callback:
    """Calls `function(report)` after each step."""

    function: Callable[[StepReport], object]

    def record(self, report: StepReport) -> None:
        self.function(report)

    def close(self) -> None:
        """Nothing is held."""


def all_of(*trackers: Tracker, stderr: TextIO | None = None, now: Callable[[], float] = time.monotonic) -> Tracker:
    """All `trackers` as one that never raises.

    One that raises is closed and dropped, and named once on `stderr` (None: sys.stderr) with its error and the line
    that raised. One that takes over 5% of the time of training is named there once, and kept.
    """
    return _AllOf([_Guarded(tracker, stderr, now) for tracker in trackers])


@final
class _AllOf:
    def __init__(self, trackers: list["_Guarded"]) -> None:
        self._trackers = trackers

    def record(self, report: StepReport) -> None:
        for tracker in self._trackers:
            tracker.record(report)

    def close(self) -> None:
        for tracker in self._trackers:
            tracker.close()


@final
class _Guarded:
    """One tracker, watched: its errors and its time."""

    def __init__(self, tracker: Tracker, stderr: TextIO | None, now: Callable[[], float]) -> None:
        self._tracker: Tracker | None = tracker
        self._name = _name(tracker)
        self._stderr, self._now = stderr, now
        self._own_seconds = self._all_seconds = 0.0
        self._slowness_told = False

    def record(self, report: StepReport) -> None:
        tracker = self._tracker
        if tracker is None:
            return
        start = self._now()
        try:
            tracker.record(report)
        except Exception as error:
            self._drop(tracker, f"after step {report.step}", error)
            return
        self._own_seconds += self._now() - start
        self._all_seconds += report.seconds
        self._tell_slowness()

    def close(self) -> None:
        tracker, self._tracker = self._tracker, None
        if tracker is None:
            return
        try:
            tracker.close()
        except Exception as error:
            self._tell(f"{self._name} failed at the end: {_describe(error)}")

    def _drop(self, tracker: Tracker, when: str, error: Exception) -> None:
        self._tell(f"{self._name} failed {when} and is dropped, training goes on: {_describe(error)}")
        self.close()

    def _tell_slowness(self) -> None:
        slow = self._own_seconds > max(_NOTICEABLE_SECONDS, _NOTICEABLE_SHARE * self._all_seconds)
        if slow and not self._slowness_told:
            self._slowness_told = True
            self._tell(
                f"{self._name} took {self._own_seconds:.1f} s of {self._all_seconds:.1f} s of training; "
                "let it do its work in a thread, or on fewer steps"
            )

    def _tell(self, text: str) -> None:
        print(f"shardwise: tracker {text}", file=self._stderr or sys.stderr, flush=True)


def _name(tracker: Tracker) -> str:
    if isinstance(tracker, Callback):
        return f"Callback({getattr(tracker.function, '__qualname__', repr(tracker.function))})"
    return type(tracker).__name__


def _describe(error: Exception) -> str:
    frames = traceback.extract_tb(error.__traceback__)
    where = f" ({frames[-1].filename}:{frames[-1].lineno})" if frames else ""
    return f"{type(error).__name__}: {error}{where}"
