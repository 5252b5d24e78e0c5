"""Why a rank failed: the record it leaves behind, and which of several failures was the first cause.

    time 12.000   rank 1 raises ValueError, writes its record and ends
    time 12.004   rank 0 raises "Connection closed by peer" in a collective, writes its record and ends

The launcher reads all records and puts the first cause first.
"""

import json
import os
import re
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TypeAlias


@dataclass(frozen=True, slots=True, kw_only=True)
class UserLine:
    """A line of the user's own code."""

    file: str
    line: int
    function: str
    source: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Raised:
    """A rank ended with an exception.

    time_seconds:  since the epoch, on the clock of the rank's machine
    exception:     the name of its type, with the module unless that is `builtins`
    user_line:     where the user's code stood when it happened; None where no frame is the user's
    """

    rank: int
    host: str
    time_seconds: float
    exception: str
    message: str
    traceback: str
    user_line: UserLine | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Died:
    """A rank ended without saying why.

    time_seconds:  since the epoch, when the launcher saw it
    exit_code:     as of `subprocess`: negative is the number of the signal that ended it
    oom_kills:     how many processes the kernel ended for want of memory during the run; None where it does not say
    """

    rank: int
    host: str
    time_seconds: float
    exit_code: int
    oom_kills: int | None


Failure: TypeAlias = Raised | Died


def first_cause_first(failures: Iterable[Failure]) -> tuple[Failure, ...]:
    """In order of time, those that only tell of a lost peer behind all others."""
    return tuple(sorted(failures, key=lambda failure: (tells_of_lost_peer(failure), failure.time_seconds)))


def tells_of_lost_peer(failure: Failure) -> bool:
    """Whether the failure is what a rank sees when another one is gone: a broken connection, a collective timed out."""
    if isinstance(failure, Died):
        return False
    return failure.exception in _LOST_PEER_TYPES and _LOST_PEER_WORDS.search(failure.message) is not None


_LOST_PEER_TYPES = {
    "RuntimeError",
    "torch.distributed.DistBackendError",
    "torch.distributed.DistNetworkError",
    "torch.distributed.DistStoreError",
    "ConnectionResetError",
    "ConnectionAbortedError",
    "BrokenPipeError",
    "TimeoutError",
}
_LOST_PEER_WORDS = re.compile(
    r"gloo|nccl|connection (was likely )?(closed|reset|refused|aborted)|broken pipe|failed to recv|time(d )? ?out",
    re.IGNORECASE,
)


def write_record(raised: Raised, path: Path) -> None:
    """Put the record at `path` whole: a reader finds all of it or nothing."""
    unfinished = path.with_suffix(".unfinished")
    unfinished.write_text(json.dumps(asdict(raised)))
    os.replace(unfinished, path)


def read_record(path: Path) -> Raised | None:
    """What `write_record` left at `path`; None where there is nothing."""
    try:
        fields = json.loads(path.read_text())
    except FileNotFoundError:
        return None
    user_line = fields.pop("user_line")
    return Raised(**fields, user_line=UserLine(**user_line) if user_line else None)
