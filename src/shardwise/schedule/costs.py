"""How long the actions of a schedule take."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import inf
from typing import Protocol, final

from shardwise.schedule.actions import Transfer, TransferKind


class Costs(Protocol):
    """Seconds of each action, for one micro-batch. Loading takes none: the loader works ahead."""

    def forward_seconds(self, stage: int) -> float: ...

    def backward_seconds(self, stage: int) -> float: ...

    def reduce_seconds(self, stage: int) -> float: ...

    def transfer_seconds(self, transfer: Transfer) -> float: ...


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class StageCosts:
    """Costs from seconds per stage and bytes per link, where all links are alike.

    forwards, backwards:  seconds of one micro-batch, per stage
    reductions:           seconds to sum the gradients over the replicas, per stage; () where there is one replica
    link_bytes:           (kind, source, target) -> bytes of one transfer; what is missing takes only the latency
    """

    forwards: tuple[float, ...]
    backwards: tuple[float, ...]
    reductions: tuple[float, ...] = ()
    link_bytes: Mapping[tuple[TransferKind, int, int], int] = field(default_factory=dict)
    latency_seconds: float = 0.0
    bytes_per_second: float = inf

    def forward_seconds(self, stage: int) -> float:
        return self.forwards[stage]

    def backward_seconds(self, stage: int) -> float:
        return self.backwards[stage]

    def reduce_seconds(self, stage: int) -> float:
        return self.reductions[stage] if self.reductions else 0.0

    def transfer_seconds(self, transfer: Transfer) -> float:
        size = self.link_bytes.get((transfer.kind, transfer.source, transfer.target), 0)
        return self.latency_seconds + size / self.bytes_per_second


def unit_costs(stages: int) -> StageCosts:
    """A forward takes one second, a backward two, communication none."""
    return StageCosts(forwards=(1.0,) * stages, backwards=(2.0,) * stages)
