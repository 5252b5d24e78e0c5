"""One device, and the wire between two of them."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import final

from shardwise.job import Precision

GIB = 2**30


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """What one device can send to one other, in one direction, while no one else sends."""

    bytes_per_second: float
    latency_seconds: float


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """What the planner knows of a device.

    flops_per_second:  dense peak by the precision of the job
    bytes_per_second:  of its own memory
    link:              to a device in the same node
    """

    name: str
    memory_bytes: int
    flops_per_second: Mapping[Precision, float]
    bytes_per_second: float
    link: Link
