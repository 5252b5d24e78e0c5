"""Carry tensors between the ranks of a pipeline over torch.distributed."""

from collections.abc import Callable, Mapping, Sequence
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
        # NCCL takes one group after the other; gloo knows no groups, and starts each message at once.
        self.queues = dist.get_backend(group) != "gloo"

    def start(
        self,
        exchange: Exchange,
        outgoing: Mapping[Transfer, Sequence[Tensor]],
        incoming: Mapping[Transfer, Sequence[Tensor]],
    ) -> "TorchPending":
        messages: list[_Message] = []
        for transfer in exchange.sends:
            peer = self._rank_of[transfer.target]
            messages += [(transfer, dist.isend, _bytes(t), peer) for t in outgoing[transfer] if t.numel()]
        for transfer in exchange.receives:
            peer = self._rank_of[transfer.source]
            messages += [(transfer, dist.irecv, _bytes(t), peer) for t in incoming[transfer] if t.numel()]
        works: dict[Transfer, list[dist.Work]] = {}
        for (transfer, *_), work in zip(messages, self._start(messages), strict=True):
            works.setdefault(transfer, []).append(work)
        return TorchPending(works)

    def _start(self, messages: Sequence["_Message"]) -> Sequence[dist.Work]:
        """The work that each message is part of."""
        if not messages:
            return []
        if not self.queues:
            return [_started(start(tensor, peer, self._group)) for _, start, tensor, peer in messages]
        ops = [dist.P2POp(start, tensor, peer, self._group) for _, start, tensor, peer in messages]
        works = dist.batch_isend_irecv(ops)
        return works if len(works) == len(ops) else works * len(ops)  # one work, for the whole group


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


_Message = tuple[Transfer, Callable[..., dist.Work | None], Tensor, int]


def _started(work: dist.Work | None) -> dist.Work:
    assert work is not None, "only a rank that is not of the group starts nothing"
    return work


def _bytes(tensor: Tensor) -> Tensor:
    """The memory of a contiguous tensor as bytes: what every backend can carry, whatever the type."""
    return tensor.reshape(-1).view(torch.uint8)
