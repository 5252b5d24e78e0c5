"""How much a micro-batch weighs: as its loss declares, by what its loss divides by, or by its samples.

A mean over labels that are not ignored is no mean over samples: micro-batches with many labels must weigh more. Where
that division is the last thing that a loss does, the loss is rewritten to (sum, weight); the runtime divides once, by
the weight of all micro-batches of the step.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import PurePath
from typing import Any, final

import torch
from torch import Tensor, fx
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils import _pytree as pytree

from shardwise.graph import Capture, Refusal
from shardwise.plan.dependence import behind
from shardwise.plan.plan import Weighting
from shardwise.plan.reductions import (
    IGNORE_INDEX,
    SUM,
    MeanOfLabels,
    MeanOfSelected,
    Quotient,
    Reduction,
    Unknown,
    all_reductions,
    arguments,
    last_reduction,
)

aten = torch.ops.aten


@final
@dataclass(frozen=True, slots=True)
class Guard:
    """What must hold of each batch for samples to be the right weight: no label equals `ignore_index`.

    labels:  name of the node that holds them
    """

    labels: str
    ignore_index: int


@final
@dataclass(frozen=True, slots=True)
class Weighing:
    """How the micro-batches of a captured loss are weighed.

    reduction:  with "rewritten": the division that `rewrite` takes out
    path:       the linear ops behind it, the last one first
    guards:     with "samples": to be checked at run time
    """

    weighting: Weighting
    reduction: Reduction | None = None
    path: tuple[fx.Node, ...] = ()
    guards: tuple[Guard, ...] = ()


def weigh(capture: Capture) -> Weighing | Refusal:
    """How to weigh the micro-batches of `capture`, which is of `job.objective(loss)`.

    A refusal means that the batch must not be split; it says what to write instead.
    """
    value, weight = _leaves(capture.module.graph)[:2]
    if weight is not None:
        return Weighing("declared")
    assert isinstance(value, fx.Node), "a loss that is no constant comes out of a node"
    reduction, path = last_reduction(value)
    if reduction is not None and not isinstance(reduction, Unknown):
        return Weighing("rewritten", reduction, path)
    guards = []
    for inner in all_reductions(value):
        guard = _guard(inner)
        if guard is None:
            return _refusal(inner)
        guards.append(guard)
    if _needs_model(_labels(capture, guards)):
        return Refusal("the labels of this loss come out of the model, so that ignored ones cannot be counted first")
    return Weighing("samples", guards=tuple(guards))


def rewrite(capture: Capture, weighing: Weighing) -> Capture:
    """`capture` with the loss as a sum and its weight, where it is weighed as "rewritten"; else as it is.

    The nodes of `capture` are not touched: the graph is copied. Metrics keep the values that they had.
    """
    if weighing.reduction is None:
        return capture
    graph = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    output = graph.graph_copy(capture.module.graph, copies)
    assert isinstance(output, tuple | list)
    graph.output(output)
    writer = _Writer(graph, copies)
    total, weight = writer.take_apart(weighing.reduction)
    for step in reversed(weighing.path):
        total = writer.again(step, total)
    value, _, *metrics = output
    _output(graph).args = ((total, weight, *metrics),)
    writer.erase_unused(value)
    graph.lint()
    return replace(capture, module=fx.GraphModule(capture.module, graph))


def weight_of_batch(rewritten: Capture) -> fx.GraphModule | None:
    """The weight alone, as a module of the batch's tensors that returns a tuple of it; None where it needs the model.

    So a stage that runs the user's module as it is can weigh a scalar: value x weight is the sum, unless weight is 0.
    """
    weight = _leaves(rewritten.module.graph)[1]
    return _part_of_batch(rewritten, [weight]) if isinstance(weight, fx.Node) else None


def sample_weight(rewritten: Capture, fields: Sequence[Tensor], samples: int) -> float:
    """What a sample weighs in this batch of `samples`, on average; 1 where that cannot be told from the batch alone."""
    weight = _leaves(rewritten.module.graph)[1]
    if isinstance(weight, fx.Node):
        module = weight_of_batch(rewritten)
        if module is None:
            return 1.0
        with torch.no_grad():
            (weight,) = module(*fields)
    if weight is None or (isinstance(weight, Tensor) and not _has_values(weight)):
        return 1.0
    return float(weight) / samples if math.isfinite(weight) and weight > 0 else 1.0


def check_of_batch(capture: Capture, guards: Sequence[Guard]) -> Callable[[Sequence[Tensor]], str]:
    """What is wrong with a batch of these fields by the `guards` of `capture`, "" where nothing is.

    Labels without values, as while planning, are taken for right ones.
    """
    if not guards:
        return lambda fields: ""
    labels = _part_of_batch(capture, _labels(capture, guards))
    assert labels is not None, "weigh() refuses where labels need the model"

    def check(fields: Sequence[Tensor]) -> str:
        with torch.no_grad():
            for found, guard in zip(labels(*fields), guards, strict=True):
                if _has_values(found) and bool((found == guard.ignore_index).any()):
                    return _IGNORED.format(guard.ignore_index)
        return ""

    return check


_IGNORED = (
    "a label is {0}, which the loss ignores, so that samples are no weight for its mean. Write the loss with its "
    "weight: total = F.cross_entropy(logits, labels, reduction='sum'); "
    "return shardwise.Mean(total, (labels != {0}).sum())"
)


def _has_values(tensor: Tensor) -> bool:
    return not (tensor.is_meta or isinstance(tensor, FakeTensor))


def _labels(capture: Capture, guards: Sequence[Guard]) -> list[fx.Node]:
    names = {node.name: node for node in capture.module.graph.nodes}
    return [names[guard.labels] for guard in guards]


def _needs_model(wanted: Sequence[fx.Node]) -> bool:
    needed = (node for each in wanted for node in behind(each))
    return any(node.op == "get_attr" and "name" in node.meta for node in needed)


def _part_of_batch(capture: Capture, wanted: Sequence[fx.Node]) -> fx.GraphModule | None:
    if _needs_model(wanted):
        return None
    needed = {node for each in wanted for node in behind(each)}
    graph = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    for node in capture.module.graph.nodes:
        if node in needed or node.op == "placeholder":
            copies[node] = graph.node_copy(node, copies.__getitem__)
    graph.output(tuple(copies[each] for each in wanted))
    return fx.GraphModule(capture.module, graph)


def _output(graph: fx.Graph) -> fx.Node:
    return graph.output_node()


def _leaves(graph: fx.Graph) -> tuple[Any, ...]:
    leaves = _output(graph).args[0]
    assert isinstance(leaves, tuple | list)
    return tuple(leaves)


def _guard(reduction: Reduction) -> Guard | None:
    """What would make the reduction a mean over samples; only where labels are seldom ignored at all."""
    if not isinstance(reduction, MeanOfLabels):
        return None
    found = arguments(reduction.node)
    if found["ignore_index"] != IGNORE_INDEX or found["weight"] is not None:
        return None
    return Guard(found["target"].name, IGNORE_INDEX)


def _refusal(reduction: Reduction) -> Refusal:
    return Refusal(
        "the loss divides by a number that depends on the data, and this is not the last thing that it does, or not a "
        "sum over a sum: weighing micro-batches by their samples would be wrong. Return the sum and its weight:\n"
        "    total, weight = (losses * mask).sum(), mask.sum()\n"
        "    return shardwise.Mean(total, weight)",
        _line(reduction.node),
    )


def _line(node: fx.Node) -> str:
    """The line of a module's forward that made `node`, "" where the loss function itself did: captures note modules."""
    frames = [line.strip() for line in (node.meta.get("stack_trace") or "").splitlines() if "File " in line]
    own = [frame for frame in frames if not any(library in frame for library in ("/torch/", "/shardwise/"))]
    if not own:
        return ""
    file, line = own[-1].split(", ")[:2]
    return f"{PurePath(file.removeprefix('File ').strip(chr(34))).name}:{line.removeprefix('line ')}"


@final
class _Writer:
    """Adds nodes to a copied graph, each behind what it needs, with the value that a capture would have noted."""

    def __init__(self, graph: fx.Graph, copies: dict[fx.Node, fx.Node]) -> None:
        self._graph = graph
        self._copies = copies

    def take_apart(self, reduction: Reduction) -> tuple[fx.Node, fx.Node]:
        """The total and the weight of `reduction`."""
        like = self._copies[reduction.node]
        match reduction:
            case MeanOfLabels():
                found = arguments(like)
                total = self._add(like, like.target, *(found | {"reduction": SUM}).values())
                return total, self._labels(like, found["target"], found["weight"], found["ignore_index"])
            case Quotient(_, total, weight):
                return self._copies[total], self._copies[weight]
            case MeanOfSelected(_, values):
                ones = self._add(like, aten.ones_like.default, self._copies[values])
                return self._add(like, aten.sum.default, self._copies[values]), self._add(like, aten.sum.default, ones)
            case Unknown():
                raise AssertionError("weigh() never asks to rewrite what it does not know")

    def again(self, step: fx.Node, operand: fx.Node) -> fx.Node:
        """A second copy of the linear op `step`, on another operand."""
        like = self._copies[step]
        old = like.all_input_nodes[0]
        args = pytree.tree_map(lambda argument: operand if argument is old else argument, like.args)
        return self._add(like, like.target, *args, **like.kwargs)

    def erase_unused(self, mean: fx.Node) -> None:
        """Erase `mean`, and what only it needed."""
        candidates = set(behind(mean))
        for node in reversed(list(self._graph.nodes)):
            if node in candidates and not node.users and node.op == "call_function":
                self._graph.erase_node(node)

    def _labels(self, like: fx.Node, target: fx.Node, weight: fx.Node | None, ignore_index: int) -> fx.Node:
        """How many labels count, or the sum of their class weights."""
        counted = self._add(like, aten.ne.Scalar, target, ignore_index)
        if weight is None:
            return self._add(like, aten.sum.default, counted)
        classes = self._add(like, aten.where.ScalarOther, counted, target, 0)
        weights = self._add(like, aten.mul.Tensor, self._add(like, aten.index.Tensor, weight, [classes]), counted)
        return self._add(like, aten.sum.default, weights)

    def _add(self, like: fx.Node, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
        """One op at the end of the graph, which counts as part of the call that made `like`."""
        with self._graph.inserting_before(_output(self._graph)):
            node = self._graph.call_function(target, args, kwargs)
        node.meta = {key: value for key, value in like.meta.items() if key != "val"}
        mode = like.meta["val"].fake_mode
        given = fx.map_arg((args, kwargs), lambda operand: operand.meta["val"])
        with mode, torch.no_grad():
            node.meta["val"] = target(*given[0], **given[1])
        return node
