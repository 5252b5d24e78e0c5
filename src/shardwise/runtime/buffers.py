"""Buffers that each replica updates for itself, such as the statistics of BatchNorm: the first replica's count."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor
from torch import distributed as dist

from shardwise.runtime.mesh import Mesh, rank_of
from shardwise.runtime.program import Program


@contextmanager
def first_buffers(program: Program, mesh: Mesh) -> Iterator[None]:
    """Lend every data rank the buffers of the first: those that a checkpoint keeps. Every rank enters."""
    if mesh.data is None:
        yield
        return
    own = {name: buffer.clone() for name, buffer in program.buffers.items()}
    source = rank_of(mesh.plan, mesh.place.pipeline, 0, 0)
    with torch.no_grad():
        for buffer in program.buffers.values():
            _broadcast(buffer, source, mesh.data)
    try:
        yield
    finally:
        with torch.no_grad():
            for name, buffer in program.buffers.items():
                buffer.copy_(own[name])


def _broadcast(tensor: Tensor, source: int, group: dist.ProcessGroup) -> None:
    """As bytes, since not every backend carries every type."""
    flat = tensor.contiguous().reshape(-1).view(torch.uint8)
    if flat.numel():
        dist.broadcast(flat, source, group)
        tensor.copy_(flat.view(tensor.dtype).view(tensor.shape))
