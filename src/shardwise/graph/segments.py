"""A model is a chain of segments: runs of ops between two narrow places, the only units of decision."""

from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, pairwise
from typing import final

from shardwise.graph.ops import Graph, Op

NEIGHBOURHOOD = 1 / 16  # of all work, to each side, within which a narrow place has no narrower one
NEXT_DOOR = 1 / 512  # of all work: of places of equal width that lie this near, one is enough


@final
@dataclass(frozen=True, slots=True)
class Segment:
    """Consecutive ops.

    ops:         half-open range of places in `Graph.ops`
    name:        the modules from the first to the last, for people
    kind:        equal for segments of equal ops and sizes (a repeated block)
    bytes_in:    that cross its start, of the example batch
    saved_bytes: kept for the backward pass, each storage once, of the example batch
    kept_bytes:  of what it computes itself, kept for the backward pass by any segment, of the example batch
    working_bytes:  that it takes beside those while it runs, without the gradients of parameters
    """

    ops: range
    name: str
    kind: int
    flops_forward: int
    flops_backward: int
    work: int
    bytes_in: int
    saved_bytes: int
    kept_bytes: int
    working_bytes: int
    parameters: tuple[str, ...]
    buffers: tuple[str, ...]

    @property
    def flops(self) -> int:
        return self.flops_forward + self.flops_backward


@final
@dataclass(frozen=True)
class Chain:
    """A graph as segments, with a name for every position where it may be cut."""

    graph: Graph
    segments: tuple[Segment, ...]

    @cached_property
    def cuts(self) -> Mapping[str, int]:
        """Every position where the graph may be cut, by its name, in order."""
        return {name: position for position, name in _names(self.graph)}

    def name(self, position: int) -> str:
        """What a plan calls `position`, such as "before h.11" or "in h.11 after attn"."""
        return next(name for name, place in self.cuts.items() if place == position)


def chain(graph: Graph) -> Chain:
    """Cut `graph` at every narrow place."""
    bounds = [0, *_narrow(graph), len(graph.ops)]
    kinds: dict[object, int] = {}
    segments = [_segment(graph, range(first, last), kinds) for first, last in pairwise(bounds)]
    return Chain(graph, tuple(segments))


def _narrow(graph: Graph) -> list[int]:
    """The positions that are narrowest in their neighbourhood; of equals side by side, the outermost boundary."""
    work = [0, *accumulate(op.work for op in graph.ops)]
    allowed = [k for k in range(1, len(graph.ops)) if graph.widths[k] is not None]

    def near(k: int, share: float) -> list[int]:
        low = bisect_left(work, work[k] - share * work[-1])
        high = bisect_right(work, work[k] + share * work[-1])
        return allowed[bisect_left(allowed, low) : bisect_left(allowed, high)]

    def width(k: int) -> int:
        return graph.widths[k] or 0

    def rank(k: int) -> tuple[int, int, int]:
        return width(k), _depth(graph, k), -k

    return [
        k
        for k in allowed
        if all(width(k) <= width(j) for j in near(k, NEIGHBOURHOOD))
        and all(rank(k) <= rank(j) for j in near(k, NEXT_DOOR))
    ]


def _depth(graph: Graph, position: int) -> int:
    """How deep inside modules a position lies: 0 between two modules at the top."""
    return _shared(graph.ops[position - 1].calls, graph.ops[position].calls)


def _shared(left: Sequence[str], right: Sequence[str]) -> int:
    return next((at for at, (a, b) in enumerate(zip(left, right, strict=False)) if a != b), min(len(left), len(right)))


def _segment(graph: Graph, places: range, kinds: dict[object, int]) -> Segment:
    ops = graph.ops[places.start : places.stop]
    shape = tuple((op.target, op.flops_forward, op.flops_backward, op.bytes_out, len(op.parameters)) for op in ops)
    return segment(graph, places, kinds.setdefault(shape, len(kinds)))


def segment(graph: Graph, places: range, kind: int) -> Segment:
    """These ops as one segment."""
    ops = graph.ops[places.start : places.stop]
    saved: dict[int, int] = {}
    for op in ops:
        saved.update(op.saved)
    bytes_in = graph.widths[places.start] or 0
    return Segment(
        ops=places,
        name=span(ops),
        kind=kind,
        flops_forward=sum(op.flops_forward for op in ops),
        flops_backward=sum(op.flops_backward for op in ops),
        work=sum(op.work for op in ops),
        bytes_in=bytes_in,
        saved_bytes=sum(saved.values()),
        kept_bytes=sum(op.kept_bytes for op in ops),
        # Beside the op that takes most, the gradient of what the segment was given grows.
        working_bytes=max(op.working_bytes for op in ops) + bytes_in,
        parameters=tuple(dict.fromkeys(name for op in ops for name in op.parameters)),
        buffers=tuple(dict.fromkeys(name for op in ops for name in op.buffers)),
    )


def span(ops: Sequence[Op]) -> str:
    """The modules from the first op to the last, for people."""
    first, last = (op.calls[-1] if op.calls else "loss" for op in (ops[0], ops[-1]))
    return first if first == last else f"{first} .. {last}"


def _names(graph: Graph) -> Iterator[tuple[int, str]]:
    taken: dict[str, int] = {}
    for position in range(1, len(graph.ops)):
        name = _name(graph, position)
        taken[name] = taken.get(name, 0) + 1
        if graph.widths[position] is not None:
            yield position, name if taken[name] == 1 else f"{name} #{taken[name]}"


def _name(graph: Graph, position: int) -> str:
    """Prefer the outermost module that begins here; else the one that has just ended; else the op before."""
    before, after = graph.ops[position - 1], graph.ops[position]
    shared = _shared(before.calls, after.calls)
    inside = f"in {after.calls[shared - 1]} " if shared else ""
    if len(after.calls) > shared:
        return f"before {after.calls[shared]}"
    if len(before.calls) > shared:
        return f"{inside}after {before.calls[shared]}"
    return f"{inside}after {before.target}"
