"""Cost of devices that are not there, from their data sheets."""

from dataclasses import dataclass
from typing import final

from shardwise.cluster import Device, Link
from shardwise.graph import Segment
from shardwise.graph.ops import BYTE_IN_FLOPS
from shardwise.job import Precision

FLOPS_REACHED = 0.5  # of the peak, in large matrix products; published training runs reach 0.4 to 0.6 of a step
BYTES_REACHED = 0.8  # of the peak, of memory and wires
TRIPS = 2  # each value is written once and read once; its gradient, too
UPDATE_TRIPS = 7  # of a parameter in AdamW


@final
@dataclass(frozen=True, slots=True)
class Analytic:
    """FLOPs by peak and bytes by bandwidth, one after the other: ops of one stream do not overlap.

        seconds = scale * (F / (0.5 P) + 2 B / (0.8 W))

    F: FLOPs, B: bytes written, P: peak of the device in this precision, W: bandwidth of its memory
    """

    precision: Precision

    def forward_seconds(self, segment: Segment, device: Device, scale: float) -> float:
        return scale * self._seconds(segment.flops_forward, _bytes_written(segment), device)

    def backward_seconds(self, segment: Segment, device: Device, scale: float) -> float:
        return scale * self._seconds(segment.flops_backward, 2 * _bytes_written(segment), device)

    def transfer_seconds(self, size_bytes: int, link: Link) -> float:
        return link.latency_seconds + size_bytes / (BYTES_REACHED * link.bytes_per_second)

    def reduction_seconds(self, size_bytes: int, ranks: int, link: Link) -> float:
        """A ring: 2 (n - 1) messages of a share 1/n each.

        Source: Patarasuk and Yuan, Bandwidth optimal all-reduce algorithms, J. Parallel Distrib. Comput. 69, 2009.
        """
        messages = 2 * (ranks - 1)
        return messages * self.transfer_seconds(-(-size_bytes // ranks), link)

    def update_seconds(self, size_bytes: int, device: Device) -> float:
        """Reads and writes a parameter and two values of state as large, and reads the gradient."""
        return UPDATE_TRIPS * size_bytes / (BYTES_REACHED * device.bytes_per_second)

    def _seconds(self, flops: int, bytes_written: int, device: Device) -> float:
        compute = flops / (FLOPS_REACHED * device.flops_per_second[self.precision])
        return compute + TRIPS * bytes_written / (BYTES_REACHED * device.bytes_per_second)


def _bytes_written(segment: Segment) -> int:
    return (segment.work - segment.flops) // BYTE_IN_FLOPS
