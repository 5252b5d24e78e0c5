"""What came of a launch, and how it is told: the first cause first, on one screen."""

import signal
from dataclasses import dataclass
from pathlib import Path

from shardwise.launch.failure import Died, Failure, Raised, tells_of_lost_peer

_TRACEBACK_HEAD, _TRACEBACK_TAIL = 3, 22  # lines
_PEERS_SHOWN = 4
_PEER_WIDTH = 100  # characters


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """How a launch ended.

    exit_code:   for the shell: 0, 1 where a rank failed, 128 and the signal's number where one ended us (Ctrl-C: 130)
    failures:    of the ranks that failed by themselves, the first cause first
    finished:    ranks that ended well
    last_lines:  what the first rank that failed printed at last; empty for rank 0, which printed on the terminal
    logs:        folder of what the other ranks printed: `rank-N.log`
    stuck:       numbers of processes that the kernel does not let go of, even killed
    """

    exit_code: int
    world_size: int
    failures: tuple[Failure, ...]
    finished: frozenset[int]
    last_lines: tuple[str, ...]
    logs: Path
    stuck: tuple[int, ...]


def describe(outcome: Outcome) -> str:
    """The outcome for the terminal; empty where all went well."""
    if outcome.exit_code == 0:
        return ""
    parts = [_cause(outcome), _traceback(outcome), _last_lines(outcome), _others(outcome)]
    return "\n\n".join(part for part in parts if part)


def _cause(outcome: Outcome) -> str:
    if not outcome.failures:
        return f"ended by {signal.Signals(outcome.exit_code - 128).name}"
    first = outcome.failures[0]
    head = f"rank {first.rank} of {outcome.world_size} on {first.host} failed: {_what(first)}"
    if isinstance(first, Raised) and first.user_line is not None:
        line = first.user_line
        head += f"\n  {line.file}:{line.line} in {line.function}\n    {line.source}"
    return head


def _what(failure: Failure) -> str:
    if isinstance(failure, Raised):
        message = failure.message.strip().partition("\n")[0]
        return f"{failure.exception}: {message}" if message else failure.exception
    if failure.exit_code > 0:
        return f"exit code {failure.exit_code} without an exception (sys.exit or os._exit)"
    name = signal.Signals(-failure.exit_code).name
    return f"killed by {name} ({_why_killed(failure)})"


def _why_killed(died: Died) -> str:
    if -died.exit_code in (signal.SIGSEGV, signal.SIGBUS, signal.SIGFPE, signal.SIGILL, signal.SIGABRT):
        return "a crash in native code; the stack is in its output"
    if -died.exit_code != signal.SIGKILL:
        return "sent from outside"
    match died.oom_kills:
        case None:
            return "kill -9, or out of memory?"
        case 0:
            return "kill -9: the kernel counted no process that ran out of memory"
        case kills:
            return f"out of memory, most likely: the kernel ended {kills} process(es) for it during this run"


def _traceback(outcome: Outcome) -> str:
    if not outcome.failures or not isinstance(outcome.failures[0], Raised):
        return ""
    lines = outcome.failures[0].traceback.rstrip().splitlines()
    left_out = len(lines) - _TRACEBACK_HEAD - _TRACEBACK_TAIL
    if left_out > 1:
        where = outcome.logs / f"rank-{outcome.failures[0].rank}.log"
        lines[_TRACEBACK_HEAD:-_TRACEBACK_TAIL] = [f"  ... {left_out} lines left out; they are in {where}"]
    return "\n".join(lines)


def _last_lines(outcome: Outcome) -> str:
    if not outcome.last_lines:
        return ""
    return "\n".join(["its last output:", *(f"  {line}" for line in outcome.last_lines)])


def _others(outcome: Outcome) -> str:
    others = outcome.failures[1:]
    lines = [f"rank {other.rank} failed after it: {_shortened(_what(other))}" for other in others[:_PEERS_SHOWN]]
    if len(others) > _PEERS_SHOWN:
        lines.append(f"and {len(others) - _PEERS_SHOWN} ranks more")
    if outcome.failures and tells_of_lost_peer(outcome.failures[0]) and outcome.finished:
        ranks = ", ".join(str(rank) for rank in sorted(outcome.finished))
        lines.append(f"exit code 0 before it: rank {ranks}; a rank that leaves early breaks what the others wait for")
    if outcome.stuck:
        lines.append(f"still there although killed, stuck in the kernel: process {', '.join(map(str, outcome.stuck))}")
    lines.append(f"logs: {outcome.logs}")
    return "\n".join(lines)


def _shortened(text: str) -> str:
    return text if len(text) <= _PEER_WIDTH else f"{text[: _PEER_WIDTH - 1]}…"
