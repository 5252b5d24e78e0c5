"""A cluster: devices in rank order, grouped by node."""

from dataclasses import dataclass
from typing import final

from shardwise.cluster.device import Device, Link


@final
@dataclass(frozen=True, slots=True)
class Group:
    """Equal nodes of equal devices."""

    nodes: int
    devices_per_node: int
    device: Device


@final
@dataclass(frozen=True, slots=True)
class Cluster:
    """Machines that are there, or that a plan is made for.

    text:     how `parse_cluster` would read it
    groups:   ranks are given out in this order, node by node
    network:  between two devices of different nodes, all devices of a node sending at once
    """

    text: str
    groups: tuple[Group, ...]
    network: Link

    @property
    def devices(self) -> tuple[Device, ...]:
        """The device of each rank."""
        return tuple(group.device for group in self.groups for _ in range(group.nodes * group.devices_per_node))

    @property
    def nodes(self) -> tuple[int, ...]:
        """The node of each rank, counted over the whole cluster."""
        sizes = [group.devices_per_node for group in self.groups for _ in range(group.nodes)]
        return tuple(node for node, size in enumerate(sizes) for _ in range(size))

    def link(self, ranks: range | tuple[int, ...]) -> Link:
        """The slowest wire between any two of `ranks`."""
        nodes, devices = self.nodes, self.devices
        if len({nodes[rank] for rank in ranks}) > 1:
            return self.network
        return min((devices[rank].link for rank in ranks), key=lambda link: link.bytes_per_second)
