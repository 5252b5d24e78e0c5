"""The interface of cost: the same for estimates from data sheets and for measured times."""

from typing import Protocol

from shardwise.cluster import Device, Link
from shardwise.graph import Segment


class CostModel(Protocol):
    """Seconds of what a step consists of."""

    def forward_seconds(self, segment: Segment, device: Device, scale: float) -> float:
        """scale: samples of the micro-batch by samples of the example that the segment was read from"""
        ...

    def backward_seconds(self, segment: Segment, device: Device, scale: float) -> float:
        """Without the forward pass that recomputation adds."""
        ...

    def transfer_seconds(self, size_bytes: int, link: Link) -> float:
        """One message."""
        ...

    def reduction_seconds(self, size_bytes: int, ranks: int, link: Link) -> float:
        """The sum of `size_bytes` over `ranks`, left on each of them."""
        ...

    def update_seconds(self, size_bytes: int, device: Device) -> float:
        """The optimizer's step on parameters of so many bytes."""
        ...
