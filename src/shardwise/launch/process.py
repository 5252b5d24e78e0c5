"""One rank as a process of its own session: started, looked at, signalled, reaped.

A session of its own leaves Ctrl-C in the terminal to the launcher, which then decides, and gathers all that the rank
starts (DataLoader workers) in one process group, which can be ended as a whole.
"""

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

_GONE_SECONDS = 10.0  # a killed process that is still there after this is stuck in the kernel


@dataclass(frozen=True, slots=True, kw_only=True)
class RankProcess:
    """A started rank.

    log:        what it prints (rank 0 prints to the terminal instead), and the traceback of its failure
    log_start:  size of the log before this run, in bytes: a run that goes on in its folder appends
    record:     where the record of its failure will be
    """

    rank: int
    process: subprocess.Popen[bytes]
    log: Path
    log_start: int
    record: Path


def start_rank(
    rank: int, script: Path, arguments: Sequence[str], environment: Mapping[str, str], logs: Path
) -> RankProcess:
    """Start `script` as `rank`; rank 0 shares the terminal of this process, so that it may draw live lines on it."""
    log, record = logs / f"rank-{rank}.log", logs / f"rank-{rank}.failure.json"
    record.unlink(missing_ok=True)
    bootstrap = [sys.executable, "-P", "-m", "shardwise.launch.worker"]
    command = [*bootstrap, str(os.getpid()), str(log.resolve()), str(record.resolve()), str(script), *arguments]
    with log.open("ab") as output, _interrupts_blocked():
        process = subprocess.Popen(
            command,
            env=environment,
            stdin=None if rank == 0 else subprocess.DEVNULL,
            stdout=None if rank == 0 else output,
            stderr=None if rank == 0 else subprocess.STDOUT,
            start_new_session=True,
        )
        return RankProcess(rank=rank, process=process, log=log, log_start=output.tell(), record=record)


def exit_code(rank: RankProcess) -> int | None:
    """As of `subprocess`: None while it runs, negative for a signal.

    Leaves the dead process unreaped, so that its number, which is that of its group, is not given to another meanwhile.
    """
    ended = os.waitid(os.P_PID, rank.process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    if ended is None:
        return None
    return ended.si_status if ended.si_code == os.CLD_EXITED else -ended.si_status


def signal_rank(rank: RankProcess, number: signal.Signals) -> None:
    """Send a signal to the rank alone: what it started is its own to end."""
    os.kill(rank.process.pid, number)


def kill_group(rank: RankProcess) -> None:
    """Kill the rank, if it is still there, and all that it started; nothing once it is reaped."""
    if rank.process.returncode is None:
        os.killpg(rank.process.pid, signal.SIGKILL)


def reap(rank: RankProcess) -> bool:
    """Take a killed rank off the process table; False where the kernel does not let go of it."""
    try:
        rank.process.wait(_GONE_SECONDS)
    except subprocess.TimeoutExpired:
        return False
    return True


@contextlib.contextmanager
def _interrupts_blocked() -> Iterator[None]:
    """A process started in here begins with SIGINT blocked; one that comes in here is delivered afterwards."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
