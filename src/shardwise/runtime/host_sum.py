"""Sums over ranks of one machine, through memory that they share.

Over sockets the kernel copies every number four times, and CPU ranks lose that time to compute. GPUs of one machine
need none of this, for NCCL shares memory by itself.
"""

import mmap
import os
from collections.abc import Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any, final

import torch
from torch import Tensor
from torch import distributed as dist

LEAST_BYTES = 2**20  # below, the two barriers cost more than a message
ALIGNMENT = 64  # bytes: of a line of the cache
PIECE = 2**16  # numbers that are summed and handed out at once, while they are in the cache
TOKEN_BYTES = 16


@final
class HostSum:
    """Tensors of each rank, which the other ranks see, too.

    own:  this rank's, to be filled and read between sums
    """

    def __init__(self, tensors: Sequence[Sequence[Tensor]], group: dist.ProcessGroup) -> None:
        """tensors:  by rank in the group, and then in one order on all ranks"""
        rank, self._group = dist.get_rank(group), group
        self.own = tensors[rank]
        own_first = [*tensors[rank:], *tensors[:rank]]
        parts = [[tensor.tensor_split(len(tensors))[rank].split(PIECE) for tensor in each] for each in own_first]
        self._pieces = [piece for same in zip(*parts, strict=True) for piece in zip(*same, strict=True)]

    def sum(self) -> None:
        """Give the tensors of all ranks the sum over ranks; each rank sums its part, and hands it out."""
        dist.barrier(self._group)
        for mine, *others in self._pieces:
            for other in others:
                mine += other
            for other in others:
                other.copy_(mine)
        dist.barrier(self._group)


def host_sum(like: Sequence[tuple[int, torch.dtype]], group: dist.ProcessGroup) -> HostSum | None:
    """Tensors of these lengths and types on the CPU; None where ranks are on several machines, or cannot share.

    Every rank of `group` calls it.
    """
    sizes = [length * dtype.itemsize for length, dtype in like]
    if sum(sizes) < LEAST_BYTES:
        return None
    ends = list(accumulate(_aligned(size) for size in sizes))
    blocks = _share(ALIGNMENT + ends[-1], group)
    if blocks is None:
        return None
    starts = [ALIGNMENT, *(ALIGNMENT + end for end in ends[:-1])]
    return HostSum(
        [
            [
                block[start : start + size].view(dtype)
                for start, size, (_, dtype) in zip(starts, sizes, like, strict=True)
            ]
            for block in blocks
        ],
        group,
    )


def _aligned(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT


def _share(size: int, group: dist.ProcessGroup) -> Sequence[Tensor] | None:
    """A block of bytes of each rank, all of them mapped here. It has no name, so that nothing is left of it.

    A rank that cannot share still takes part in both messages: the others wait for them.
    """
    token = os.urandom(TOKEN_BYTES)
    file = _new_file(size, token)
    try:
        offers: list[Any] = [None] * dist.get_world_size(group)
        offer = ("", "", b"") if file is None else (_processes(), f"/proc/{os.getpid()}/fd/{file}", token)
        dist.all_gather_object(offers, offer, group)
        blocks = _mapped(offers, size)
        everywhere = torch.tensor(blocks is not None, dtype=torch.int32)
        dist.all_reduce(everywhere, dist.ReduceOp.MIN, group)
    finally:
        if file is not None:
            os.close(file)
    return blocks if everywhere else None


def _new_file(size: int, token: bytes) -> int | None:
    try:
        file = os.memfd_create("shardwise gradients")
    except (OSError, AttributeError):  # of Linux only, and not in every build of Python for it
        return None
    try:
        os.posix_fallocate(file, 0, size)  # where memory is short, this fails, and not a write later on
        os.pwrite(file, token, 0)
    except OSError:
        os.close(file)
        return None
    return file


def _processes() -> str:
    """Names the machine as it runs now, and the processes that this one can see on it; "" where that cannot be told."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text() + os.readlink("/proc/self/ns/pid")
    except OSError:
        return ""


def _mapped(offers: Sequence[tuple[str, str, bytes]], size: int) -> Sequence[Tensor] | None:
    here = _processes()
    if not here or any(processes != here for processes, _, _ in offers):
        return None
    try:
        return [_block(path, token, size) for _, path, token in offers]
    except (OSError, ValueError):  # of another user, say, or too many files
        return None


def _block(path: str, token: bytes, size: int) -> Tensor:
    """raises:  OSError or ValueError where it cannot be mapped, or is not the file of `token`"""
    file = os.open(path, os.O_RDWR)
    try:
        if os.pread(file, TOKEN_BYTES, 0) != token:
            raise ValueError(f"{path} is of another process")
        return torch.frombuffer(mmap.mmap(file, size), dtype=torch.uint8)
    finally:
        os.close(file)
