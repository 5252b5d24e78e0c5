"""The captured graph as a list of ops in the order of execution, with what each costs and where it may be cut."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import Any, final

import torch
from torch import Tensor, fx, nn

from shardwise.graph.capture import Capture
from shardwise.graph.fingerprint import fingerprint
from shardwise.graph.meter import Reading, measure
from shardwise.graph.regions import inner_ops

REPLICATED_SHARE = 0.01  # of all FLOPs: a value of the batch that costs more is computed once and sent

BYTE_IN_FLOPS = 8  # memory-bound ops are not free: devices do tens of FLOPs in the time of a byte


@final
@dataclass(frozen=True, slots=True)
class Op:
    """One op that belongs to one stage.

    calls:       the modules whose call it is part of, outermost first, by path; a second call of one is "path@1"
    parameters, buffers:  that it reads, by name; those that only masks and positions need are left out
    saved:       bytes kept for the backward pass, by storage (equal keys are one storage)
    kept_bytes:  of what it computes, kept for the backward pass by any op; what the batch alone gives counts with the
                 first op that keeps it
    working_bytes:  that it takes while it runs, forward or backward, without the gradients of parameters
    """

    name: str
    target: str
    calls: tuple[str, ...]
    parameters: tuple[str, ...]
    buffers: tuple[str, ...]
    flops_forward: int
    flops_backward: int
    saved: Mapping[int, int]
    kept_bytes: int
    working_bytes: int
    bytes_out: int
    draws: int

    @property
    def work(self) -> int:
        """What balances stages where nothing was timed: FLOPs, and a byte written counts as BYTE_IN_FLOPS."""
        return self.flops_forward + self.flops_backward + BYTE_IN_FLOPS * self.bytes_out


@final
@dataclass(frozen=True, slots=True)
class Parameter:
    """A parameter of the model as the planner sees it."""

    name: str
    shape: tuple[int, ...]
    bytes: int
    trainable: bool


@final
@dataclass(frozen=True)
class Graph:
    """What a job computes for one micro-batch.

    A *position* k lies between op k - 1 and op k. Values of the batch that are cheap and need no parameter (masks,
    positions, sizes) are not ops: every stage that uses one computes it.

    nodes:        of the ops, in order
    replicated:   nodes that each stage computes for itself
    widths:       bytes that cross each position 0..len(ops) of the example batch; None where no cut may be
    parameters:   that the graph reads; a tied one once
    unused:       trainable parameters of the model that the graph does not read
    draws:        how many random draws each op makes, by its name
    first_draw:   the number of its first draw, counted over the whole graph
    written:      names of the buffers that the graph updates
    needs_grad:   per node, whether a gradient flows back through it
    fingerprint:  equal for equal graphs, whatever the device
    """

    capture: Capture
    nodes: tuple[fx.Node, ...]
    ops: tuple[Op, ...]
    replicated: tuple[fx.Node, ...]
    widths: tuple[int | None, ...]
    parameters: tuple[Parameter, ...]
    unused: tuple[str, ...]
    draws: Mapping[str, int]
    first_draw: Mapping[str, int]
    written: frozenset[str]
    needs_grad: Mapping[fx.Node, bool]
    fingerprint: str

    @cached_property
    def place(self) -> Mapping[fx.Node, int]:
        """Where each op's node stands in `nodes`."""
        return {node: at for at, node in enumerate(self.nodes)}

    @property
    def placeholders(self) -> tuple[fx.Node, ...]:
        return tuple(node for node in self.capture.module.graph.nodes if node.op == "placeholder")

    @property
    def outputs(self) -> tuple[Any, ...]:
        """Nodes or plain values: the leaves of what the function returned."""
        output = next(node for node in self.capture.module.graph.nodes if node.op == "output")
        return tuple(output.args[0])

    @property
    def flops(self) -> int:
        return sum(op.flops_forward + op.flops_backward for op in self.ops)

    @property
    def work(self) -> int:
        return sum(op.work for op in self.ops)


def read_graph(capture: Capture, model: nn.Module, inputs: Sequence[Tensor]) -> Graph:
    """Measure a capture: `inputs` are the tensors of the example batch, of which only sizes and types are used."""
    module = capture.module

    def tensor_of(node: fx.Node) -> Any:
        return node.meta["tensor"] if "tensor" in node.meta else node.meta["value"]

    readings = measure(module, inputs, tensor_of)
    if _copy_written_inputs(module, readings):
        readings = measure(module, inputs, tensor_of)
    calls = [node for node in module.graph.nodes if node.op == "call_function"]
    replicated = _replicated(calls, readings)
    nodes = tuple(node for node in calls if node not in replicated)
    kept = _kept(nodes, readings)
    ops = tuple(_op(module, node, readings[node], kept[node]) for node in nodes)
    draws, first_draw = 0, {}
    for node in nodes:
        first_draw[node.name] = draws
        draws += readings[node].draws
    read = {node.meta["name"] for node in module.graph.nodes if node.op == "get_attr" and "name" in node.meta}
    parameters = dict(model.named_parameters())
    return Graph(
        capture=capture,
        nodes=nodes,
        ops=ops,
        replicated=tuple(node for node in calls if node in replicated),
        widths=tuple(_widths(nodes, readings)),
        parameters=tuple(_parameter(name, value) for name, value in parameters.items() if name in read),
        unused=tuple(name for name, value in parameters.items() if name not in read and value.requires_grad),
        draws={node.name: readings[node].draws for node in nodes},
        first_draw=first_draw,
        written=frozenset(_written_buffers(module, readings)),
        needs_grad={node: reading.needs_grad for node, reading in readings.items()},
        fingerprint=fingerprint(module),
    )


def _parameter(name: str, value: nn.Parameter) -> Parameter:
    return Parameter(name, tuple(value.shape), value.numel() * value.element_size(), value.requires_grad)


def _copy_written_inputs(module: fx.GraphModule, readings: Mapping[fx.Node, Reading]) -> bool:
    """Let ops that write to the batch (`labels[mask] = -100`) write to a copy: the batch has other readers."""
    written = {place for reading in readings.values() for place in reading.writes}
    changed = False
    placeholders = [node for node in module.graph.nodes if node.op == "placeholder"]
    for node in placeholders:
        if written.isdisjoint(readings[node].outputs):
            continue
        with module.graph.inserting_after(placeholders[-1]):
            copy = module.graph.call_function(torch.ops.aten.clone.default, (node,))
        copy.meta["val"] = node.meta["val"]
        node.replace_all_uses_with(copy, lambda user, copy=copy: user is not copy)
        changed = True
    return changed


def _replicated(calls: Sequence[fx.Node], readings: Mapping[fx.Node, Reading]) -> set[fx.Node]:
    """Ops on the batch alone: no parameter behind them, nothing random, nothing written, little work."""
    written = {place for reading in readings.values() for place in reading.writes}
    limit = REPLICATED_SHARE * sum(readings[node].flops_forward for node in calls)
    found: set[fx.Node] = set()
    for node in calls:
        reading = readings[node]
        light = reading.flops_forward <= limit and not reading.draws and not reading.writes
        alone = written.isdisjoint(reading.outputs) and not reading.needs_grad and not node.is_impure()
        if light and alone and all(_from_batch(source, found, written, readings) for source in node.all_input_nodes):
            found.add(node)
    return found


def _from_batch(
    node: fx.Node, replicated: set[fx.Node], written: set[int], readings: Mapping[fx.Node, Reading]
) -> bool:
    if node.op == "get_attr":
        return not isinstance(node.meta.get("tensor"), nn.Parameter) and written.isdisjoint(readings[node].outputs)
    return node.op == "placeholder" or node in replicated


def _kept(nodes: Sequence[fx.Node], readings: Mapping[fx.Node, Reading]) -> dict[fx.Node, int]:
    """For each op, the bytes of what it made that some op keeps."""
    makers = {place: node for node in nodes for place in readings[node].made}
    kept = dict.fromkeys(nodes, 0)
    counted: set[int] = set()
    for node in nodes:
        for place, size in readings[node].saved.items():
            if place not in counted:
                counted.add(place)
                kept[makers.get(place, node)] += size
    return kept


def _op(module: fx.GraphModule, node: fx.Node, reading: Reading, kept_bytes: int) -> Op:
    named = [source for source in node.all_input_nodes if source.op == "get_attr" and "name" in source.meta]
    return Op(
        name=node.name,
        target=str(node.target),
        calls=_calls(module, node),
        parameters=tuple(source.meta["name"] for source in named if _is_parameter(source)),
        buffers=tuple(source.meta["name"] for source in named if not _is_parameter(source)),
        flops_forward=reading.flops_forward,
        flops_backward=reading.flops_backward,
        saved=reading.saved,
        kept_bytes=kept_bytes,
        working_bytes=reading.working,
        bytes_out=reading.bytes_out,
        draws=reading.draws,
    )


def _is_parameter(node: fx.Node) -> bool:
    return isinstance(node.meta.get("tensor"), nn.Parameter)


def _calls(module: fx.GraphModule, node: fx.Node) -> tuple[str, ...]:
    """A region is part of the calls that its first op is part of."""
    first = node if "nn_module_stack" in node.meta else next(inner_ops(module, node), node)
    stack = first.meta.get("nn_module_stack") or {}
    paths = []
    for key, (path, _) in stack.items():
        _, repeated, occurrence = key.rpartition("@")
        paths.append(path.removeprefix("model").removeprefix(".") + (f"@{occurrence}" if repeated else ""))
    return tuple(path for path in paths if path)


def _written_buffers(module: fx.GraphModule, readings: Mapping[fx.Node, Reading]) -> Iterator[str]:
    written = {place for reading in readings.values() for place in reading.writes}
    for node in module.graph.nodes:
        if node.op == "get_attr" and "name" in node.meta and not written.isdisjoint(readings[node].outputs):
            yield node.meta["name"]


def _widths(nodes: Sequence[fx.Node], readings: Mapping[fx.Node, Reading]) -> Iterator[int | None]:
    """Bytes of the values that are used behind each position; None where a cut would tear something apart."""
    at = {node: place for place, node in enumerate(nodes)}
    last = {node: max((at.get(user, len(nodes)) for user in node.users), default=at[node]) for node in nodes}
    torn = _torn(nodes, at, last, readings)
    steps = [0] * (len(nodes) + 2)  # how much more is alive at a position than at the one before
    for node in nodes:
        size = _value_bytes(readings[node].value) if node.users else 0
        steps[at[node] + 1] += size
        steps[last[node] + 1] -= size
    for position, width in enumerate(accumulate(steps[:-1])):
        yield None if position in torn else width


def _torn(
    nodes: Sequence[fx.Node],
    at: Mapping[fx.Node, int],
    last: Mapping[fx.Node, int],
    readings: Mapping[fx.Node, Reading],
) -> set[int]:
    """Positions inside a lifetime that must stay on one stage."""
    torn: set[int] = set()

    def whole(first: int, final: int) -> None:
        torn.update(range(first + 1, final + 1))

    for node in nodes:
        if not isinstance(readings[node].value, Tensor) and node.users:
            whole(at[node], min(last[node], len(nodes) - 1))  # a tuple, or a number: not sent
        if str(node.target).startswith("hook_") or getattr(node.target, "__name__", "").startswith("hook_"):
            # A hook sees the whole gradient of its tensor only where the tensor is made.
            for source in node.all_input_nodes:
                whole(at.get(source, -1), at[node])
    first_seen: dict[int, int] = {}
    for node in nodes:
        for source in node.all_input_nodes:
            for place in readings[source].outputs:
                first_seen.setdefault(place, at.get(source, at[node]))
        for place in readings[node].outputs:
            first_seen.setdefault(place, at[node])
    buffers = {place for node in readings if node.op == "get_attr" for place in readings[node].outputs}
    for node in nodes:
        for place in readings[node].writes:
            whole(first_seen[place], at[node])
            if place in buffers:
                readers = [
                    at[user] for user in nodes if any(place in readings[i].outputs for i in user.all_input_nodes)
                ]
                whole(min(readers), max(readers))
    return torn


def _value_bytes(value: Any) -> int:
    return value.numel() * value.element_size() if isinstance(value, Tensor) else 0
