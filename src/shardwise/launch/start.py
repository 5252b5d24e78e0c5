"""Start a script once for each device of this machine, and see it through to the end.

The ranks find each other by the variables of torchrun; rank 0 holds the store. The processes are ours, not those of
torch's elastic agent: that ends all ranks at the first exit code it sees, so that a rank that lost its peer can hide
the one that failed; it leaves behind what a dead rank had started; and it spends two seconds on the import of torch.
"""

import contextlib
import os
import signal
import socket
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

from shardwise.errors import LaunchError
from shardwise.launch.devices import devices_here
from shardwise.launch.failure import Failure, Raised
from shardwise.launch.oom import oom_kills, oom_kills_since
from shardwise.launch.outcome import Outcome
from shardwise.launch.process import RankProcess, start_rank
from shardwise.launch.watch import (
    AFTER_FAILURE,
    AFTER_REQUEST,
    Requests,
    Watched,
    end_all,
    kill_all,
    reap_all,
    watch,
)
from shardwise.world import joined

_LAST_LINES = 10
_LAST_BYTES = 16_384


def start_script(
    script: Path,
    arguments: Sequence[str] = (),
    *,
    run_folder: Path,
    devices: int | None = None,
    environment: Mapping[str, str] = os.environ,
) -> Outcome:
    """Run `python SCRIPT ARGUMENTS` on each of `devices` and return when all have ended. For the main thread only.

    Rank 0 prints on this terminal, the others to `run_folder/logs/rank-N.log`, appending to what is there. When a rank
    fails, or on SIGINT, SIGTERM or SIGHUP, all ranks are ended with whatever they started; a second signal kills them.

    devices:      one process each; None takes all CUDA devices of this machine, or where there is none its physical
                  cores, at most 8
    environment:  what the ranks inherit; OMP_NUM_THREADS is 1 and output unbuffered unless it says otherwise

    raises:  LaunchError before anything is started, where the script cannot run or a launcher has started us already
    """
    _check_not_joined(environment, script)
    _check_script(script)
    world_size = devices_here() if devices is None else devices
    if world_size < 1:
        raise ValueError(f"devices is {devices}; give at least 1, or None for all of this machine")
    logs = run_folder / "logs"
    logs.mkdir(parents=True, exist_ok=True)
    environments = _rank_environments(environment, world_size)
    return _see_through(lambda rank: start_rank(rank, script, arguments, environments[rank], logs), world_size, logs)


def _check_not_joined(environment: Mapping[str, str], script: Path) -> None:
    world = joined(environment)
    if world is not None:
        raise LaunchError(
            f"this process is rank {world.rank} of {world.world_size} already ({world.told_by} is set), and a rank "
            f"launches no ranks; run the script itself under that launcher, and it joins: python {script}"
        )


def _check_script(script: Path) -> None:
    """Find in this process, at once, what would else fail in every rank."""
    try:
        compile(script.read_bytes(), str(script), "exec", dont_inherit=True)
    except OSError as error:
        raise LaunchError(
            f"cannot read the script {script}: {error.strerror}; give the path of a Python file"
        ) from error
    except SyntaxError as error:
        source = f": {error.text.strip()}" if error.text else ""
        raise LaunchError(
            f"nothing was started, because {script}:{error.lineno} is not Python ({error.msg}){source}"
        ) from error
    except ValueError as error:  # bytes that are no text
        raise LaunchError(f"nothing was started, because {script} is not Python ({error})") from error


def _rank_environments(environment: Mapping[str, str], world_size: int) -> list[dict[str, str]]:
    shared = {
        "OMP_NUM_THREADS": "1",
        "PYTHONUNBUFFERED": "1",  # else a killed rank takes its last words along
        **environment,
        "WORLD_SIZE": str(world_size),
        "LOCAL_WORLD_SIZE": str(world_size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(_free_port()),
    }
    return [{**shared, "RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(world_size)]


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _see_through(start: Callable[[int], RankProcess], world_size: int, logs: Path) -> Outcome:
    """Start the ranks and return when they are gone, whatever happens here."""
    before = oom_kills()
    ranks: list[RankProcess] = []
    with _requests_noted() as requests:
        try:
            for rank in range(world_size):
                ranks.append(start(rank))
            watched = watch(ranks, requests, oom_kills=lambda: oom_kills_since(before))
            stuck = _end(ranks, watched, requests)
        except BaseException:
            kill_all(ranks)
            raise
    return _outcome(watched, ranks, logs, stuck)


@contextlib.contextmanager
def _requests_noted() -> Iterator[Requests]:
    """Note signals that ask us to end, instead of ending; those ignored before (nohup) stay ignored."""
    noted: list[signal.Signals] = []
    asking = [number for number in AFTER_REQUEST if signal.getsignal(number) is not signal.SIG_IGN]
    before = {number: signal.signal(number, lambda got, _: noted.append(signal.Signals(got))) for number in asking}
    try:
        yield noted
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _end(ranks: Sequence[RankProcess], watched: Watched, requests: Requests) -> tuple[int, ...]:
    if watched.request is not None:
        return end_all(ranks, AFTER_REQUEST[watched.request], hurried=lambda: len(requests) > 1)
    if watched.failures:
        return end_all(ranks, AFTER_FAILURE, hurried=lambda: len(requests) > 0)
    return reap_all(ranks)


def _outcome(watched: Watched, ranks: Sequence[RankProcess], logs: Path, stuck: tuple[int, ...]) -> Outcome:
    exit_code = 128 + watched.request if watched.request is not None else 1 if watched.failures else 0
    return Outcome(
        exit_code=exit_code,
        world_size=len(ranks),
        failures=watched.failures,
        finished=watched.finished,
        last_lines=_last_lines(ranks[watched.failures[0].rank], watched.failures[0]) if watched.failures else (),
        logs=logs,
        stuck=stuck,
    )


def _last_lines(rank: RankProcess, failure: Failure) -> tuple[str, ...]:
    """What the rank printed at last in this run, without the traceback, which is told by itself."""
    with rank.log.open("rb") as log:
        log.seek(max(rank.log_start, log.seek(0, os.SEEK_END) - _LAST_BYTES))
        text = log.read().decode(errors="replace")
    if isinstance(failure, Raised):
        text = text.replace(failure.traceback, "")
    return tuple(text.splitlines()[-_LAST_LINES:])
