"""Ranks that live as long as the tests do: processes that wait for tasks, and talk over gloo while they run one.

An empty launch of two ranks takes seconds, most of them imports. These start once, forked from a server that has
imported what they need, and take one task after another; each task has a process group of its own.
"""

import multiprocessing
import pickle
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any, TypeAlias, final

import torch
from torch import distributed as dist

LONGEST_TASK_SECONDS = 180.0  # a task of 5 s on a busy machine took 61: this ends hangs, it does not judge speed
GRACE_SECONDS = 3.0  # for the other ranks to fail too, once one has

_processes = multiprocessing.get_context("forkserver")
_processes.set_forkserver_preload(
    [
        "shardwise.session.build",
        "torch.distributed.fsdp",
        "transformers.models.segformer.modeling_segformer",
        "transformers.models.t5.modeling_t5",
    ]
)


class TaskError(Exception):
    """A task failed on some rank, first on the one that the message names; all ranks were started anew."""


@final
@dataclass(frozen=True, slots=True)
class _Done:
    result: Any


@final
@dataclass(frozen=True, slots=True)
class _Failed:
    story: str


_Answer: TypeAlias = _Done | _Failed


@final
@dataclass(frozen=True)
class _Worker:
    process: ForkServerProcess
    link: Connection


@final
class Pool:
    """Up to `most` ranks, started when a task first needs them and ended by `close`."""

    def __init__(self, most: int = 4) -> None:
        self._most = most
        self._workers: list[_Worker] = []
        self._folder = tempfile.TemporaryDirectory(prefix="ranks-")
        self._tasks = 0

    def run(
        self, ranks: int, task: Callable[..., Any], *arguments: Any, seconds: float = LONGEST_TASK_SECONDS
    ) -> list[Any]:
        """What `task(*arguments)` returned on each of `ranks` ranks, which share a process group unless it is alone.

        task:  a function that can be imported by its name

        raises:  TaskError where a rank raised, died, or was not done after so many `seconds`
        """
        if not 1 <= ranks <= self._most:
            raise ValueError(f"{ranks} ranks were asked of a pool of {self._most}; ask for 1 to {self._most}")
        while len(self._workers) < ranks:
            self._workers.append(_start(len(self._workers)))
        self._tasks += 1
        store = Path(self._folder.name) / f"task-{self._tasks}"
        message = pickle.dumps((task, arguments, ranks, store))
        team = self._workers[:ranks]
        for worker in team:
            worker.link.send_bytes(message)
        try:
            answers = _collect(team, time.monotonic() + seconds)
        except BaseException:
            self._end()
            raise
        return answers

    def close(self) -> None:
        self._end()
        self._folder.cleanup()

    def _end(self) -> None:
        for worker in self._workers:
            worker.process.kill()
            worker.process.join()
            worker.link.close()
        self._workers.clear()


@contextmanager
def started_pool() -> Iterator[Pool]:
    pool = Pool()
    try:
        yield pool
    finally:
        pool.close()


def _start(rank: int) -> _Worker:
    ours, theirs = _processes.Pipe()
    process = _processes.Process(target=_serve, args=(rank, theirs), daemon=True)
    process.start()
    theirs.close()
    return _Worker(process, ours)


def _collect(team: Sequence[_Worker], deadline: float) -> list[Any]:
    """The result of each rank; or the story of the first that failed, told once the others had time to fail too."""
    answers: dict[int, _Answer] = {}
    first = ""
    while len(answers) < len(team):
        missing = {worker.link: rank for rank, worker in enumerate(team) if rank not in answers}
        came = wait(list(missing), max(0.0, deadline - time.monotonic()))
        if not came:
            waited = f"ranks {sorted(missing.values())} were not done in time, and were ended"
            raise TaskError(f"{first}\n{waited}" if first else waited)
        for link in came:
            rank = missing[link]
            answers[rank] = answer = _received(link)
            if isinstance(answer, _Failed) and not first:
                first = f"rank {rank} {answer.story}"
                deadline = min(deadline, time.monotonic() + GRACE_SECONDS)
    if first:
        raise TaskError(first)
    return [answer.result for _, answer in sorted(answers.items()) if isinstance(answer, _Done)]


def _received(link: Connection) -> _Answer:
    try:
        answer: _Answer = pickle.loads(link.recv_bytes())
    except (EOFError, ConnectionError):
        return _Failed("died without a word")
    return answer


def _serve(rank: int, link: Connection) -> None:
    """What a rank does all its life."""
    torch.set_num_threads(1)
    while True:
        try:
            message = link.recv_bytes()
        except EOFError:
            return
        task, arguments, ranks, store = pickle.loads(message)
        with _group(rank, ranks, store):
            # By value: a tensor that is sent as it is would share memory that ends with this process. And before
            # the group ends, so that who failed first is heard first.
            link.send_bytes(pickle.dumps(_answer(task, arguments)))


def _answer(task: Callable[..., Any], arguments: Sequence[Any]) -> _Answer:
    try:
        result = task(*arguments)
        if dist.is_initialized():
            dist.barrier()
    except Exception:
        return _Failed(f"raised\n{traceback.format_exc()}")
    return _Done(result)


@contextmanager
def _group(rank: int, ranks: int, store: Path) -> Iterator[None]:
    if ranks == 1:
        yield
        return
    dist.init_process_group(
        "gloo",
        store=dist.FileStore(str(store), ranks),
        rank=rank,
        world_size=ranks,
        timeout=timedelta(seconds=LONGEST_TASK_SECONDS),
    )
    try:
        yield
    finally:
        dist.destroy_process_group()
