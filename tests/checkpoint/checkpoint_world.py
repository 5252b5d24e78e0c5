"""Run a function on several ranks that talk over gloo, each a process of its own, forked from a warm server."""

import multiprocessing
import pickle
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

processes = multiprocessing.get_context("forkserver")
processes.set_forkserver_preload(["shardwise.checkpoint", "torch.distributed.fsdp", "pytest"])


def on_ranks(ranks: int, folder: Path, action: Callable[..., Any], *arguments: Any) -> list[Any]:
    """What `action(rank, *arguments)` returned on each rank, or the exception that it raised there.

    EOFError stands for a rank that died, TimeoutError for one that hangs.
    """
    store = folder / f"store-{len(list(folder.glob('store-*')))}"
    pipes, started = [], []
    for rank in range(ranks):
        ours, theirs = processes.Pipe()
        process = processes.Process(target=_run, args=(theirs, rank, ranks, store, action, arguments))
        process.start()
        theirs.close()
        pipes.append(ours)
        started.append(process)
    results = [_receive(pipe) for pipe in pipes]
    for process in started:
        process.kill()  # they wait, or are dead, or hang
        process.join()
    return results


def _receive(pipe: Connection) -> Any:
    if not pipe.poll(60):
        return TimeoutError("this rank hangs")
    try:
        return pickle.loads(pipe.recv_bytes())
    except EOFError as error:
        return error


def _run(pipe: Connection, rank: int, ranks: int, store: Path, action: Callable[..., Any], arguments: Any) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", store=dist.FileStore(str(store), ranks), rank=rank, world_size=ranks, timeout=timedelta(seconds=50)
    )
    dist.barrier()  # a rank that dies in its action must not fail another that is still connecting
    try:
        result = action(rank, *arguments)
    except Exception as error:
        result = error
    pipe.send_bytes(pickle.dumps(result))  # by value: a tensor sent as it is would share memory that ends with us
    pipe.recv_bytes()  # until all ranks have answered: one that leaves early would fail the others
