"""Watch the ranks until all have ended or one has failed, then end those that are left.

rank 0   ██████████████████X connection closed by peer   :           :
rank 1   █████████████████X ValueError                   :           :
rank 2   ████████████████████████████████████████████████▒▒▒▒▒▒▒▒▒▒▒▒X
                          └─ is there a cause behind it? ┘SIGTERM     SIGKILL, to all that any rank started
"""

import os
import signal
import socket
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from shardwise.launch.failure import Died, Failure, first_cause_first, read_record, tells_of_lost_peer
from shardwise.launch.process import RankProcess, exit_code, kill_group, reap, signal_rank

Requests: TypeAlias = Sequence[signal.Signals]
"""Signals that asked the launcher to end, the first one first; it grows while we watch."""

Steps: TypeAlias = Sequence[tuple[signal.Signals, float]]
"""Signals to end a rank with, one after the other, each with the seconds it is given to work."""

AFTER_FAILURE: Steps = ((signal.SIGTERM, 5.0),)
AFTER_REQUEST: Mapping[signal.Signals, Steps] = {
    signal.SIGINT: ((signal.SIGINT, 10.0), (signal.SIGTERM, 2.0)),  # a rank inside a collective does not notice SIGINT
    signal.SIGTERM: ((signal.SIGTERM, 10.0),),
    signal.SIGHUP: ((signal.SIGTERM, 10.0),),
}

_LOOK_SECONDS = 0.05
_SETTLE_SECONDS = 0.3  # ranks that fail at the same moment are seen one after the other
_CAUSE_SECONDS = 3.0  # a lost peer is noticed at once, but the peer may take a while to end: a core dump, exit handlers


@dataclass(frozen=True, slots=True, kw_only=True)
class Watched:
    """What became of the ranks until we had seen enough.

    failures:  of the ranks that failed by themselves, the first cause first
    finished:  ranks that ended well
    request:   the signal that asked the launcher to end, if one did
    """

    failures: tuple[Failure, ...]
    finished: frozenset[int]
    request: signal.Signals | None


def watch(ranks: Sequence[RankProcess], requests: Requests, oom_kills: Callable[[], int | None]) -> Watched:
    """Return when all ranks have ended, when one has failed and the cause is known, or when a request has come in."""
    failures: dict[int, Failure] = {}
    failed_at = float("inf")
    while True:
        finished = frozenset(rank.rank for rank in ranks if _look(rank, failures, oom_kills) == 0)
        if failures:
            failed_at = min(failed_at, time.monotonic())
        over = len(finished | failures.keys()) == len(ranks)
        if over or requests or time.monotonic() - failed_at >= _patience_seconds(failures.values()):
            request = requests[0] if requests else None
            return Watched(failures=first_cause_first(failures.values()), finished=finished, request=request)
        time.sleep(_LOOK_SECONDS)


def end_all(ranks: Sequence[RankProcess], steps: Steps, hurried: Callable[[], bool]) -> tuple[int, ...]:
    """End the ranks by `steps`, or without further steps once `hurried()`; then kill what is left, as `kill_all`.

    returns:  as `kill_all`
    """
    for number, grace_seconds in steps:
        for rank in _running(ranks):
            signal_rank(rank, number)
        deadline = time.monotonic() + grace_seconds
        while _running(ranks) and time.monotonic() < deadline and not hurried():
            time.sleep(_LOOK_SECONDS)
    return kill_all(ranks)


def kill_all(ranks: Sequence[RankProcess]) -> tuple[int, ...]:
    """Kill the ranks and whatever they started.

    returns:  numbers of the processes that are still there, because the kernel does not let go of them
    """
    for rank in ranks:
        kill_group(rank)
    return reap_all(ranks)


def reap_all(ranks: Sequence[RankProcess]) -> tuple[int, ...]:
    """Take ranks that have ended off the process table; returns as `kill_all`."""
    return tuple(rank.process.pid for rank in ranks if not reap(rank))


def _running(ranks: Sequence[RankProcess]) -> list[RankProcess]:
    return [rank for rank in ranks if exit_code(rank) is None]


def _look(rank: RankProcess, failures: dict[int, Failure], oom_kills: Callable[[], int | None]) -> int | None:
    """The exit code of `rank`, if it has one; its failure, if it is news, goes into `failures`.

    A record counts although the process is still there: it may hang on its way out.
    """
    code = exit_code(rank)
    if rank.rank not in failures:
        if (raised := read_record(rank.record)) is not None:
            failures[rank.rank] = raised
        elif code not in (None, os.EX_OK):
            failures[rank.rank] = Died(
                rank=rank.rank,
                host=socket.gethostname(),
                time_seconds=time.time(),
                exit_code=code,
                oom_kills=oom_kills(),
            )
    return code


def _patience_seconds(failures: Iterable[Failure]) -> float:
    """How long to wait for other failures after these, before the ranks that are left are ended."""
    return _CAUSE_SECONDS if all(tells_of_lost_peer(failure) for failure in failures) else _SETTLE_SECONDS
