"""One way to run a job on a mesh, and what each of its stages would hold and send."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import final

from shardwise.cost import StageBytes
from shardwise.graph import Chain, Ports, Segment, cut, shapes
from shardwise.job import Precision
from shardwise.plan.mesh import Mesh
from shardwise.plan.plan import ScheduleName, ShardMode
from shardwise.plan.sketch import Sketch

HALF_PRECISION_CAST = 2  # a parameter of 4 bytes has a copy of 2 in each micro-batch in flight


@final
@dataclass(frozen=True, kw_only=True)
class Layout:
    """Everything about a plan that memory and time depend on.

    bounds:   where the stages begin in the graph; (0,) for one stage
    samples:  of the largest micro-batch
    """

    mesh: Mesh
    bounds: tuple[int, ...]
    schedule: ScheduleName
    micro_batches: int
    samples: int
    shard_mode: ShardMode
    recompute: bool

    def rank_of(self, stage: int) -> int:
        return stage % self.mesh.pipeline

    @property
    def splits_the_batch(self) -> bool:
        return self.mesh.data_ranks * self.micro_batches > 1


def stage_bytes(layout: Layout, sketch: Sketch, precision: Precision) -> list[StageBytes]:
    if not isinstance(sketch.graph, Chain):
        return [_held(sketch, list(sketch.tensors), largest=0, activations=0, working=0, sent=0)]
    chain, scale = sketch.graph, layout.samples / sketch.samples
    ports = cut(chain, layout.bounds)
    sent = bytes_sent(chain, ports)
    read = {name for port in ports for name in (*port.parameters, *port.buffers)}
    stages = []
    for number, port in enumerate(ports):
        names = [*port.parameters, *port.buffers]
        if number == 0:
            names += [name for name in sketch.tensors if name not in read]
        inputs = sum(size for (_, target), size in sent.items() if target == number)
        segments = [segment_of(chain, ops) for ops in port.segments]
        largest = max(sum(sketch.tensors[name] for name in segment.parameters) for segment in segments)
        casts = 0 if precision == "fp32" else sum(sketch.gradients.get(name, 0) for name in port.parameters)
        again = recomputed(segments) if layout.recompute else ()
        kept = sum(segments[at].bytes_in for at in again) + inputs
        kept += _saved_bytes(chain, [ops for at, ops in enumerate(port.segments) if at not in again])
        working = max((segments[at].saved_bytes for at in again), default=0)
        stages.append(
            _held(
                sketch,
                names,
                largest=largest,
                activations=round(scale * kept) + casts // HALF_PRECISION_CAST,
                working=round(scale * working),
                sent=round(scale * sum(size for (source, _), size in sent.items() if source == number)),
            )
        )
    return stages


def _held(
    sketch: Sketch, names: Sequence[str], *, largest: int, activations: int, working: int, sent: int
) -> StageBytes:
    return StageBytes(
        parameters=sum(sketch.tensors[name] for name in names),
        gradients=sum(sketch.gradients.get(name, 0) for name in names),
        optimizer=sum(sketch.optimizer.bytes_of.get(name, 0) for name in names),
        largest=largest,
        activations=activations,
        working=working,
        sent=sent,
    )


def _saved_bytes(chain: Chain, ranges: Sequence[range]) -> int:
    saved: dict[int, int] = {}
    for ops in ranges:
        for op in chain.graph.ops[ops.start : ops.stop]:
            saved.update(op.saved)
    return sum(saved.values())


def _value_bytes(chain: Chain, names: Sequence[str]) -> dict[str, int]:
    found = shapes(chain.graph, names)(chain.graph.capture.signature.sizes)
    return {name: prod(shape) * dtype.itemsize for name, (shape, dtype) in found.items()}


def recomputed(segments: Sequence[Segment]) -> tuple[int, ...]:
    """Which segments take less memory when they keep their input and run again."""
    return tuple(at for at, segment in enumerate(segments) if segment.saved_bytes > segment.bytes_in)


def bytes_sent(chain: Chain, ports: Sequence[Ports]) -> dict[tuple[int, int], int]:
    """Bytes of activations of the example batch that go from one stage to another."""
    names = sorted({name for port in ports for name in port.inputs})
    sizes = _value_bytes(chain, names)
    sent: dict[tuple[int, int], int] = {}
    for target, port in enumerate(ports):
        for name in port.inputs:
            link = (port.sources[name], target)
            sent[link] = sent.get(link, 0) + sizes[name]
    return sent


def segment_of(chain: Chain, ops: range) -> Segment:
    """The segment of these ops; a part of one where a plan cuts inside."""
    for segment in chain.segments:
        if segment.ops == ops:
            return segment
    own = chain.graph.ops[ops.start : ops.stop]
    return Segment(
        ops=ops,
        name=own[0].name,
        kind=-1,
        flops_forward=sum(op.flops_forward for op in own),
        flops_backward=sum(op.flops_backward for op in own),
        work=sum(op.work for op in own),
        bytes_in=chain.graph.widths[ops.start] or 0,
        saved_bytes=_saved_bytes(chain, [ops]),
        parameters=tuple(dict.fromkeys(name for op in own for name in op.parameters)),
    )
