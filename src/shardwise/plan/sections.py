"""A graph cut at given positions: for each stage its segments, and what it takes from which other stage."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import final

from shardwise.graph import Chain, Ports, Segment, cut, segment, shapes
from shardwise.schedule import Links


@final
@dataclass(frozen=True)
class Section:
    """The part of the graph that one stage runs; all numbers are of the example batch.

    begins:       the cut before it, by name; "" for the first
    ends:         the last module in it
    again:        places of the segments that take less memory when they keep their input and run again
    bytes_from:   activations that it takes from earlier stages, by stage
    saved:        bytes kept for the backward pass by every segment; `saved_by_others`: by those not in `again`
    """

    begins: str
    ends: str
    ports: Ports
    segments: tuple[Segment, ...]
    again: tuple[int, ...]
    bytes_from: Mapping[int, int]
    saved: int
    saved_by_others: int

    @property
    def flops(self) -> int:
        return sum(segment.flops for segment in self.segments)

    @property
    def bytes_in(self) -> int:
        return sum(self.bytes_from.values())


def cut_into_sections(chain: Chain, bounds: Sequence[int]) -> tuple[Section, ...]:
    """The sections that begin at `bounds`, of which the first is 0."""
    ports = cut(chain, bounds)
    sizes = _value_bytes(chain, sorted({name for port in ports for name in port.inputs}))
    known = {segment.ops: segment for segment in chain.segments}
    names = {position: name for name, position in chain.cuts.items()}
    sections = []
    for begin, port in zip(bounds, ports, strict=True):
        segments = tuple(known.get(ops) or segment(chain.graph, ops, kind=-1) for ops in port.segments)
        again = tuple(at for at, segment in enumerate(segments) if segment.saved_bytes > segment.bytes_in)
        others = [ops for at, ops in enumerate(port.segments) if at not in again]
        sections.append(
            Section(
                begins=names[begin] if begin else "",
                ends=_last_module(chain, port),
                ports=port,
                segments=segments,
                again=again,
                bytes_from=_bytes_from(port, sizes),
                saved=_saved_bytes(chain, port.segments),
                saved_by_others=_saved_bytes(chain, others),
            )
        )
    return tuple(sections)


def bytes_sent(sections: Sequence[Section], source: int) -> int:
    """Bytes of activations that stage `source` gives to later stages."""
    return sum(section.bytes_from.get(source, 0) for section in sections)


def links_between(sections: Sequence[Section]) -> Links:
    """Which stages depend on each other, as the schedule needs it."""
    ports = [section.ports for section in sections]
    activations = {(source, target) for target, port in enumerate(ports) for source in port.sources.values()}
    gradients = {(target, port.sources[name]) for target, port in enumerate(ports) for name in port.differentiable}
    batch = {stage for stage, port in enumerate(ports) if stage and port.fields}
    return Links(activations=frozenset(activations), gradients=frozenset(gradients), batch=frozenset(batch))


def _value_bytes(chain: Chain, names: Sequence[str]) -> dict[str, int]:
    found = shapes(chain.graph, names)(chain.graph.capture.signature.sizes)
    return {name: prod(shape) * dtype.itemsize for name, (shape, dtype) in found.items()}


def _bytes_from(port: Ports, sizes: Mapping[str, int]) -> dict[int, int]:
    found: dict[int, int] = {}
    for name, source in port.sources.items():
        found[source] = found.get(source, 0) + sizes[name]
    return found


def _last_module(chain: Chain, port: Ports) -> str:
    ops = chain.graph.ops[port.segments[0].start : port.segments[-1].stop]
    return next((op.calls[-1] for op in reversed(ops) if op.calls), "loss")


def _saved_bytes(chain: Chain, ranges: Sequence[range]) -> int:
    """Each storage once."""
    saved: dict[int, int] = {}
    for ops in ranges:
        for op in chain.graph.ops[ops.start : ops.stop]:
            saved.update(op.saved)
    return sum(saved.values())
