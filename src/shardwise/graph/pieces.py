"""Cut a graph: the ops of one stage as modules, one for each of its segments.

    fields of the batch --> prelude --> masks, positions, sizes
                                           |
    values of earlier stages --> segment --> segment --> ... --> values for later stages
                                    \\________ skips ________/

What is replicated is computed once in each stage, by its prelude.
"""

from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, final

from torch import Tensor, fx, nn

from shardwise.graph.draws import seeded
from shardwise.graph.ops import Graph
from shardwise.graph.segments import Chain, span

Resolve = Callable[[str], Any]
"""Gives the tensor of the model with this name, to be owned by the piece that asks."""


@final
@dataclass(frozen=True)
class Piece:
    """One segment, ready to run.

    name:     the modules that it spans, for people
    module:   called with `Draws`, then the values of `inputs` in order; returns a tuple of the values of `outputs`
    inputs:   names of values, or of parameters of the stage (`shared` below)
    writes:   names of the buffers that it updates
    """

    name: str
    module: fx.GraphModule
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    writes: tuple[str, ...]


@final
@dataclass(frozen=True)
class Ports:
    """What one stage needs and gives: known on every rank, without any tensor.

    segments:        op ranges of its segments
    fields:          which tensors of the batch it reads, by place in the signature
    prepared:        replicated values that it computes for itself
    inputs:          values from earlier stages, each with `sources` telling which; `differentiable` are those of them
                     that a gradient goes back to
    outputs:         values that later stages use, or the results of the last stage
    shared:          parameters that several of its segments read: they belong to the stage
    parameters:      that it reads
    buffers:         that it reads; `writes` are those of them that it updates
    """

    segments: tuple[range, ...]
    fields: tuple[int, ...]
    prepared: tuple[str, ...]
    inputs: tuple[str, ...]
    sources: Mapping[str, int]
    differentiable: frozenset[str]
    outputs: tuple[str, ...]
    shared: tuple[str, ...]
    parameters: tuple[str, ...]
    buffers: tuple[str, ...]
    writes: frozenset[str]


@final
@dataclass(frozen=True)
class Pieces:
    """The ops of one stage, ready to run; `prelude` is called with the fields and gives the prepared values."""

    ports: Ports
    prelude: fx.GraphModule
    pieces: tuple[Piece, ...]


@final
@dataclass(frozen=True, slots=True)
class Result:
    """A leaf of what the function returned: the value named so."""

    name: str


def results(graph: Graph) -> tuple[Result | Any, ...]:
    """The leaves of what the function returned, for the last stage to give."""
    return tuple(Result(leaf.name) if isinstance(leaf, fx.Node) else leaf for leaf in graph.outputs)


def cut(chain: Chain, bounds: Sequence[int]) -> tuple[Ports, ...]:
    """The stages that begin at `bounds`, positions in the graph of which the first is 0.

    A position inside a segment splits it.
    """
    edges = sorted({*bounds, *(segment.ops.start for segment in chain.segments), len(chain.graph.ops)})
    ends = [*bounds[1:], len(chain.graph.ops)]
    stages = []
    for first, last in zip(bounds, ends, strict=True):
        inner = [edge for edge in edges if first <= edge <= last]
        stages.append(_ports(chain.graph, tuple(range(a, b) for a, b in pairwise(inner)), bounds))
    return tuple(stages)


def take(graph: Graph, ports: Ports, resolve: Resolve) -> Pieces:
    """The modules of one stage; `resolve` gives the tensors of the model that it is to own, by name."""
    names = {node.name: node for node in graph.capture.module.graph.nodes}
    outputs = {names[name] for name in ports.outputs}
    return Pieces(
        ports=ports,
        prelude=_prelude(graph, ports, [names[name] for name in ports.prepared], resolve),
        pieces=tuple(_piece(graph, ops, outputs, ports.shared, resolve) for ops in ports.segments),
    )


def _ports(graph: Graph, segments: tuple[range, ...], bounds: Sequence[int]) -> Ports:
    start, stop = segments[0].start, segments[-1].stop
    place = graph.place
    own = graph.nodes[start:stop]
    last = stop == len(graph.nodes)
    results = [leaf for leaf in graph.outputs if isinstance(leaf, fx.Node)]
    read = dict.fromkeys(source for node in own for source in node.all_input_nodes)
    if last:
        read |= dict.fromkeys(results)
    inputs = [node for node in read if node in place and place[node] < start]
    prepared = [node for node in read if node not in place and node.op != "get_attr"]
    needed = _cone(prepared)
    tensors = [node.meta["name"] for node in (*read, *needed) if node.op == "get_attr" and "name" in node.meta]
    parameters = tuple(dict.fromkeys(name for op in graph.ops[start:stop] for name in op.parameters))
    buffers = tuple(dict.fromkeys(name for name in tensors if name not in parameters))
    return Ports(
        segments=segments,
        fields=tuple(at for at, node in enumerate(graph.placeholders) if node in needed),
        prepared=tuple(node.name for node in prepared),
        inputs=tuple(node.name for node in inputs),
        sources={node.name: bisect_right(bounds, place[node]) - 1 for node in inputs},
        differentiable=frozenset(node.name for node in inputs if _gets_gradient(node, graph, own, results, last)),
        outputs=tuple(
            node.name for node in own if any(user.op == "output" or place.get(user, -1) >= stop for user in node.users)
        ),
        shared=tuple(_shared(graph, segments)),
        parameters=parameters,
        buffers=buffers,
        writes=frozenset(name for name in buffers if name in graph.written),
    )


def _gets_gradient(
    value: fx.Node, graph: Graph, own: Sequence[fx.Node], results: Sequence[fx.Node], last: bool
) -> bool:
    """Whether a gradient of `value` can come out of the ops in `own`."""
    inside = set(own)
    used = any(user in inside and graph.needs_grad[user] for user in value.users) or (last and value in results)
    return graph.needs_grad[value] and used


def _cone(nodes: Sequence[fx.Node]) -> set[fx.Node]:
    """`nodes` and all that they are computed from."""
    found: set[fx.Node] = set()
    waiting = list(nodes)
    while waiting:
        node = waiting.pop()
        if node not in found:
            found.add(node)
            waiting.extend(node.all_input_nodes)
    return found


def _shared(graph: Graph, segments: Sequence[range]) -> list[str]:
    counts: dict[str, int] = {}
    for ops in segments:
        for name in dict.fromkeys(name for op in graph.ops[ops.start : ops.stop] for name in op.parameters):
            counts[name] = counts.get(name, 0) + 1
    return [name for name, count in counts.items() if count > 1]


def _piece(graph: Graph, ops: range, stage_outputs: set[fx.Node], shared: Sequence[str], resolve: Resolve) -> Piece:
    nodes = graph.nodes[ops.start : ops.stop]
    inside = set(nodes)
    given = dict.fromkeys(source for node in nodes for source in node.all_input_nodes if source not in inside)
    builder = _Builder(resolve)
    draws = builder.graph.placeholder("draws")
    passed = [node for node in given if node.op != "get_attr" or node.meta.get("name") in shared]
    for node in passed:
        builder.input(node)
    for node in given:
        if node not in passed:
            builder.attribute(node)
    for node in nodes:
        _copy_op(builder, node, draws, graph)
    outputs = [
        node
        for node in nodes
        if node in stage_outputs or any(user not in inside and user in graph.place for user in node.users)
    ]
    names = [node.meta["name"] for node in given if node.op == "get_attr" and "name" in node.meta]
    return Piece(
        name=span(graph.ops[ops.start : ops.stop]),
        module=builder.finish(outputs),
        inputs=tuple(node.meta["name"] if node.op == "get_attr" else node.name for node in passed),
        outputs=tuple(node.name for node in outputs),
        writes=tuple(name for name in names if name in graph.written),
    )


def _copy_op(builder: "_Builder", node: fx.Node, draws: fx.Node, graph: Graph) -> None:
    """Copy one op; a random one is seeded first by the number of its draw."""
    count = graph.draws[node.name]
    first = graph.first_draw[node.name]
    if count == 1:
        builder.graph.call_method("at", (draws, first))
    copy = builder.copy(node)
    if count > 1:
        copy.target = seeded(node.target, first)  # type: ignore[arg-type]  # a call_function's target is callable
        copy.args = (draws, *copy.args)


def _prelude(graph: Graph, ports: Ports, wanted: Sequence[fx.Node], resolve: Resolve) -> fx.GraphModule:
    """The replicated ops that `wanted` need, as a module of the fields that they read."""
    needed = _cone(wanted)
    builder = _Builder(resolve)
    for at in ports.fields:
        builder.input(graph.placeholders[at])
    for node in graph.capture.module.graph.nodes:
        if node.op == "get_attr" and node in needed:
            builder.attribute(node)
    for node in graph.replicated:
        if node in needed:
            builder.copy(node)
    return builder.finish(list(wanted))


@final
class _Builder:
    """Copies nodes of one graph into a graph of its own."""

    def __init__(self, resolve: Resolve) -> None:
        self.graph = fx.Graph()
        self._copies: dict[fx.Node, fx.Node] = {}
        self._attributes: dict[str, Any] = {}
        self._resolve = resolve

    def input(self, node: fx.Node) -> None:
        self._copies[node] = self.graph.placeholder(node.name)

    def attribute(self, node: fx.Node) -> None:
        name = str(node.meta.get("name") or node.target)
        value = node.meta["value"] if "value" in node.meta else self._resolve(name)
        self._attributes[name] = value
        self._copies[node] = self.graph.get_attr(name)

    def copy(self, node: fx.Node) -> fx.Node:
        self._copies[node] = self.graph.node_copy(node, self._copies.__getitem__)
        return self._copies[node]

    def finish(self, outputs: Sequence[fx.Node]) -> fx.GraphModule:
        self.graph.output(tuple(self._copies[node] for node in outputs))
        root = nn.Module()
        for name, value in self._attributes.items():
            _assign(root, name, value)
        return fx.GraphModule(root, self.graph)


def _assign(root: nn.Module, name: str, value: Any) -> None:
    *path, leaf = name.split(".")
    for part in path:
        if not hasattr(root, part):
            root.add_module(part, nn.Module())
        root = getattr(root, part)
    if isinstance(value, Tensor) and not isinstance(value, nn.Parameter):
        root.register_buffer(leaf, value)
    else:
        setattr(root, leaf, value)
