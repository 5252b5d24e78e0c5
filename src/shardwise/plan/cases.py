"""Every way to use the devices, as cases for the search."""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import ceil
from typing import final

from shardwise.cluster import Cluster, Device
from shardwise.cost import CostModel
from shardwise.graph import Chain, Segment
from shardwise.job import Precision
from shardwise.plan.case import Case
from shardwise.plan.fit import Recompute, Sharding
from shardwise.plan.loads import Load, Loads, Shared
from shardwise.plan.mesh import Mesh
from shardwise.plan.plan import ScheduleName, ShardMode
from shardwise.plan.sketch import Sketch

USABLE = 0.92  # of a device's memory: the rest goes to its context, to communication, and to gaps between blocks
CAST_SHARE = 2  # of a parameter of 4 bytes, each micro-batch in flight keeps a copy of 2 in half precision
FINE_SIZES = 8  # micro-batches of 1 to 8 samples are all looked at, and then every COARSE times as many
COARSE = 1.25


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Arrangement:
    """One way to use a mesh, before it is said where to cut."""

    mesh: Mesh
    schedule: ScheduleName
    stages_per_rank: int
    micro_batches: int
    shard_mode: ShardMode
    recompute: Recompute


def micro_batch_counts(samples: int) -> list[int]:
    """Counts to look at for a data rank of so many samples: for small sizes each, for large ones every quarter more."""
    sizes, size = set(range(1, min(FINE_SIZES, samples) + 1)), float(FINE_SIZES)
    while size < samples:
        size *= COARSE
        sizes.add(min(samples, round(size)))
    return sorted({ceil(samples / size) for size in sizes})


@final
class CaseMaker:
    """Makes the cases of one job on one cluster; what many of them share is worked out once."""

    def __init__(self, chain: Chain, sketch: Sketch, precision: Precision, cluster: Cluster, cost: CostModel) -> None:
        self._segments = chain.segments
        self._sketch = sketch
        self._precision = precision
        self._cluster = cluster
        self._cost = cost
        self._devices = cluster.devices
        self._loads: dict[tuple[int, float, int], Loads] = {}
        self._readers = _readers(chain.segments, sketch)

    def case(self, arrangement: Arrangement, batch_size: int) -> Case:
        mesh, cost = arrangement.mesh, self._cost
        slowest = [self._slowest(mesh, rank) for rank in range(mesh.pipeline)]
        mean = batch_size / mesh.data_ranks / arrangement.micro_batches
        largest = ceil(ceil(batch_size / mesh.data_ranks) / arrangement.micro_batches)
        wire = self._cluster.link(range(0, len(self._devices), mesh.data_ranks))
        peers = self._cluster.link(range(mesh.data_ranks))
        shards = self._cluster.link(range(mesh.shards))
        return Case(
            schedule=arrangement.schedule,
            stages_per_rank=arrangement.stages_per_rank,
            micro_batches=arrangement.micro_batches,
            loads=tuple(self._loads_of(device, mean, largest) for device in slowest),
            rooms=tuple(self._room(mesh, rank) for rank in range(mesh.pipeline)),
            sharding=Sharding(mesh.shards, arrangement.shard_mode),
            recompute=arrangement.recompute,
            transfer=lambda size: cost.transfer_seconds(size, wire),
            gather=lambda size: cost.reduction_seconds(size, mesh.shards, shards) / 2,
            reduce=lambda size: cost.reduction_seconds(size, mesh.data_ranks, peers),
            update=lambda size: cost.update_seconds(size, slowest[0]),
            overlaps=False,
        )

    def _own(self, mesh: Mesh, rank: int) -> Sequence[Device]:
        return self._devices[rank * mesh.data_ranks : (rank + 1) * mesh.data_ranks]

    def _slowest(self, mesh: Mesh, rank: int) -> Device:
        return min(self._own(mesh, rank), key=lambda device: device.flops_per_second[self._precision])

    def _room(self, mesh: Mesh, rank: int) -> int:
        return int(USABLE * min(device.memory_bytes for device in self._own(mesh, rank)))

    def _loads_of(self, device: Device, mean: float, largest: int) -> Loads:
        key = (id(device), mean, largest)
        if key not in self._loads:
            loads = [self._load(at, segment, device, mean, largest) for at, segment in enumerate(self._segments)]
            self._loads[key] = Loads(loads, self._readers.shared)
        return self._loads[key]

    def _load(self, at: int, segment: Segment, device: Device, mean: float, largest: int) -> Load:
        """mean, largest: samples of a micro-batch; time depends on all of them, memory on the largest."""
        sketch, scale = self._sketch, largest / self._sketch.samples
        alone = self._readers.alone[at]
        casts = sum(sketch.tensors[name] for name in segment.parameters) // CAST_SHARE
        return Load(
            forward_seconds=self._cost.forward_seconds(segment, device, mean / sketch.samples),
            backward_seconds=self._cost.backward_seconds(segment, device, mean / sketch.samples),
            parameters=sum(sketch.tensors[name] for name in alone),
            gradients=sum(sketch.gradients.get(name, 0) for name in alone),
            optimizer=sum(sketch.optimizer.bytes_of.get(name, 0) for name in alone),
            enters=round(scale * segment.bytes_in),
            made=round(scale * segment.kept_bytes) + (0 if self._precision == "fp32" else casts),
            working=round(scale * segment.working_bytes)
            + max((sketch.gradients.get(name, 0) for name in segment.parameters), default=0),
        )


@final
@dataclass(frozen=True, slots=True)
class _Readers:
    """alone: by segment, the names that it alone reads; shared: what several read."""

    alone: tuple[tuple[str, ...], ...]
    shared: tuple[Shared, ...]


def _readers(segments: Sequence[Segment], sketch: Sketch) -> _Readers:
    """What no segment reads is kept by the first one."""
    names = [dict.fromkeys((*segment.parameters, *segment.buffers)) for segment in segments]
    count = Counter(name for own in names for name in own)
    unread = [name for name in sketch.tensors if name not in count]
    alone = [tuple(name for name in own if count[name] == 1 and name in sketch.tensors) for own in names]
    alone[0] = (*alone[0], *unread)
    shared = tuple(
        Shared(
            readers=tuple(at for at, own in enumerate(names) if name in own),
            parameters=sketch.tensors[name],
            gradients=sketch.gradients.get(name, 0),
            optimizer=sketch.optimizer.bytes_of.get(name, 0),
        )
        for name, times in count.items()
        if times > 1 and name in sketch.tensors
    )
    return _Readers(tuple(alone), shared)


def arrangements(mesh: Mesh, batch_size: int, segments: int) -> Iterator[Arrangement]:
    """Simplest first."""
    samples = batch_size // mesh.data_ranks
    modes: tuple[ShardMode, ...] = ("gathered", "regathered") if mesh.shards > 1 else ("gathered",)
    for stages_per_rank in (1, 2, 3, 4) if mesh.pipeline > 1 else (1,):
        if mesh.pipeline * stages_per_rank > segments:
            return
        for mode in modes:
            for micro_batches in micro_batch_counts(samples):
                yield Arrangement(
                    mesh=mesh,
                    schedule="1f1b" if stages_per_rank == 1 else "interleaved-1f1b",
                    stages_per_rank=stages_per_rank,
                    micro_batches=micro_batches,
                    shard_mode=mode,
                    recompute="as needed" if mesh.pipeline > 1 else "all or none",
                )
