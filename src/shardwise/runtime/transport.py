"""Carry tensors between the ranks of a pipeline over torch.distributed."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor
from torch import distributed as dist

from shardwise.schedule.actions import Exchange, Transfer


@final
class TorchTransport:
    """`schedule.Transport` over a process group.

    ranks:      the global ranks of the pipeline, in order
    placement:  the pipeline rank of each stage
    """

    def __init__(self, group: dist.ProcessGroup, ranks: Sequence[int], placement: Sequence[int]) -> None:
        self._group = group
        self._rank_of = [ranks[place] for place in placement]

    def start(
        self,
        exchange: Exchange,
        outgoing: Mapping[Transfer, Sequence[Tensor]],
        incoming: Mapping[Transfer, Sequence[Tensor]],
    ) -> "TorchPending":
        ops, owners = [], []
        for transfer in exchange.sends:
            for tensor in outgoing[transfer]:
                ops.append(dist.P2POp(dist.isend, _bytes(tensor), self._rank_of[transfer.target], self._group))
                owners.append(transfer)
        for transfer in exchange.receives:
            for tensor in incoming[transfer]:
                ops.append(dist.P2POp(dist.irecv, _bytes(tensor), self._rank_of[transfer.source], self._group))
                owners.append(transfer)
        kept = [(op, owner) for op, owner in zip(ops, owners, strict=True) if op.tensor.numel()]
        works = dist.batch_isend_irecv([op for op, _ in kept]) if kept else []
        # NCCL gives one work for the whole group, gloo one for each op.
        each = len(works) == len(kept)
        by_transfer: dict[Transfer, list[dist.Work]] = {}
        for place, (_, owner) in enumerate(kept):
            by_transfer.setdefault(owner, []).append(works[place if each else 0])
        return TorchPending(by_transfer)


@final
@dataclass(frozen=True, slots=True)
class TorchPending:
    """An exchange under way."""

    works: Mapping[Transfer, Sequence[dist.Work]]

    def wait(self, transfer: Transfer) -> None:
        for work in self.works.get(transfer, ()):
            work.wait()

    def done(self) -> bool:
        return all(work.is_completed() for works in self.works.values() for work in works)


def _bytes(tensor: Tensor) -> Tensor:
    """The memory of a contiguous tensor as bytes: what every backend can carry, whatever the type."""
    return tensor.reshape(-1).view(torch.uint8)
