"""Join the process group that a launcher made, or run alone."""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from functools import cache
from itertools import count
from typing import final

import torch
from torch import distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, Store
from torch.distributed.rendezvous import rendezvous

from shardwise.session.allocator import keep_freed_memory
from shardwise.world import JoinedWorld, joined

TIMEOUT = timedelta(minutes=30)  # a rank may compile, load or save this long while the others wait
_SESSIONS = count()  # every rank joins as often, and the addresses of the last session are not those of this one


@final
@dataclass(frozen=True, slots=True)
class Membership:
    """This process among the ranks of a run.

    made:  whether this program made the process group, and so ends it
    """

    rank: int
    world_size: int
    device: torch.device
    made: bool


def join(environment: Mapping[str, str] = os.environ) -> Membership:
    """Join the world that the environment tells of; a process group that is there already is used as it is."""
    if dist.is_initialized():
        local = int(environment.get("LOCAL_RANK", dist.get_rank()))
        return Membership(dist.get_rank(), dist.get_world_size(), _device(local), made=False)
    world = joined(environment)
    if world is None:
        return Membership(0, 1, _device(0), made=False)
    device = _device(world.local_rank)
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo",
        store=PrefixStore(f"session {next(_SESSIONS)}", _store(world)),
        rank=world.rank,
        world_size=world.world_size,
        timeout=TIMEOUT,
    )
    return Membership(world.rank, world.world_size, device, made=True)


@cache
def _store(world: JoinedWorld) -> Store:
    """Where ranks leave their addresses, one for all sessions of a program: rank 0 may be early or late for each."""
    url = f"tcp://{world.master_address}:{world.master_port}"
    store: Store = next(rendezvous(url, world.rank, world.world_size, timeout=TIMEOUT))[0]
    return store


def _device(local_rank: int) -> torch.device:
    """The device of a rank, made ready: its CUDA device where there are enough, else the CPU."""
    if local_rank < torch.cuda.device_count():
        torch.cuda.set_device(local_rank)
        return torch.device("cuda", local_rank)
    keep_freed_memory()
    return torch.device("cpu")
