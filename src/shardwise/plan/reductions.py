"""Find the division by which a loss becomes a mean: of what, and by how much, where that depends on the data.

mean of cross entropy        over the labels that are not ignored
total / mask.sum()           a sum divided by a sum that depends on the batch and on no parameter
values[mask].mean()          over as many values as the mask lets through
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias, final

import torch
from torch import Tensor, fx
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols

from shardwise.plan.dependence import behind, from_data, from_parameters

aten = torch.ops.aten

IGNORE_INDEX = -100  # what torch takes where the loss names none
SUM = 2  # torch's number for reduction="sum"
MEAN = 1


@final
@dataclass(frozen=True, slots=True)
class MeanOfLabels:
    """`node` is the mean of a cross entropy over the labels that are not ignored."""

    node: fx.Node


@final
@dataclass(frozen=True, slots=True)
class Quotient:
    """`node` divides the sum `total` by the sum `weight`."""

    node: fx.Node
    total: fx.Node
    weight: fx.Node


@final
@dataclass(frozen=True, slots=True)
class MeanOfSelected:
    """`node` is the mean of `values`, whose number depends on the batch."""

    node: fx.Node
    values: fx.Node


@final
@dataclass(frozen=True, slots=True)
class Unknown:
    """`node` divides by something that depends on the batch, and is no sum over a sum."""

    node: fx.Node


Reduction: TypeAlias = MeanOfLabels | Quotient | MeanOfSelected | Unknown


def last_reduction(value: fx.Node) -> tuple[Reduction | None, tuple[fx.Node, ...]]:
    """The reduction after which only linear ops come, and these ops, the last one first."""
    data, trained = from_data(value.graph), from_parameters(value.graph)
    path: list[fx.Node] = []
    node = value
    while True:
        found = _reduction(node, data, trained, summed=any(step.target in _SUMS for step in path))
        if found is not None or not _is_linear(node):
            return found, tuple(path)
        path.append(node)
        node = node.all_input_nodes[0]


def all_reductions(value: fx.Node) -> tuple[Reduction, ...]:
    """Every reduction that `value` is computed from."""
    data, trained = from_data(value.graph), from_parameters(value.graph)
    terms = _terms(value)
    found = [
        _reduction(node, data, trained, summed=False)
        for node in behind(value)
        if node in trained and (_is_scalar(node) or node in terms)
    ]
    return tuple(reduction for reduction in found if reduction is not None)


def arguments(node: fx.Node) -> dict[str, Any]:
    """All arguments of an op by the names of its schema, defaults filled in."""
    assert isinstance(node.target, torch._ops.OpOverload), "asked only of torch's own ops"
    schema = node.target._schema.arguments
    given = dict(zip((argument.name for argument in schema), node.args, strict=False)) | node.kwargs
    return {argument.name: given.get(argument.name, argument.default_value) for argument in schema}


_CROSS_ENTROPY = frozenset(
    {aten.cross_entropy_loss.default, aten.nll_loss_nd.default, aten.nll_loss.default, aten.nll_loss2d.default}
)
_DIVISIONS = frozenset({aten.div.Tensor, aten.true_divide.Tensor, aten.div_.Tensor})
_SUMS = frozenset({aten.sum.default, aten.count_nonzero.default})
_CASTS = frozenset(
    {
        aten._to_copy.default, aten.to.dtype, aten.to.device, aten.to.dtype_layout, aten.clone.default,
        aten.alias.default, aten.detach.default, aten.view.default, aten.reshape.default, aten.squeeze.default,
        aten.unsqueeze.default, aten.contiguous.default,
    }
)  # fmt: skip
_READS = frozenset({aten.item.default, aten._local_scalar_dense.default})
_SCALED = frozenset({aten.mul.Tensor, aten.div.Tensor})


def _reduction(node: fx.Node, data: set[fx.Node], trained: set[fx.Node], *, summed: bool) -> Reduction | None:
    """`summed`: whether the terms of `node` are summed afterwards."""
    if node.target in _CROSS_ENTROPY:
        found = arguments(node)
        # Labels that no one can have set to the ignored index (a contrastive loss counts them up) are all there.
        ignorable = found["target"] in data and not _value(found["target"]).is_floating_point()
        return MeanOfLabels(node) if found["reduction"] == MEAN and ignorable else None
    if node.target in (aten.mean.default, aten.mean.dim) and _selects(node):
        return MeanOfSelected(node, node.all_input_nodes[0]) if node.target is aten.mean.default else Unknown(node)
    if node.target is aten.nanmean.default:
        return Unknown(node)
    if node.target in _DIVISIONS and _divides_by_data(node, data, trained):
        return _quotient(node, summed)
    if node.target is aten.mul.Tensor and any(_is_inverse(operand, data, trained) for operand in node.all_input_nodes):
        return Unknown(node)
    return None


def _divides_by_data(node: fx.Node, data: set[fx.Node], trained: set[fx.Node]) -> bool:
    divisor = node.args[1]
    return isinstance(divisor, fx.Node) and divisor in data and divisor not in trained and _is_scalar(divisor)


def _is_inverse(node: fx.Node, data: set[fx.Node], trained: set[fx.Node]) -> bool:
    while _is_linear(node):
        node = node.all_input_nodes[0]
    inverted = node.target in (aten.reciprocal.default, aten.rsqrt.default)
    return inverted and node in data and node not in trained and _is_scalar(node)


def _quotient(node: fx.Node, summed: bool) -> Reduction:
    total, divisor = node.args[:2]
    assert isinstance(total, fx.Node)
    assert isinstance(divisor, fx.Node)
    weight = _sum_below(divisor)
    if weight is None or not (summed or _is_sum(total)):
        return Unknown(node)
    return Quotient(node, total, weight)


def _sum_below(divisor: fx.Node) -> fx.Node | None:
    """The sum that `divisor` is, seen through casts and through a floor of at most one (`clamp(min=1)`).

    Where the floor takes effect nothing is counted, and both forms weigh nothing.
    """
    node = divisor
    while not _is_sum(node):
        floored = node.target in (aten.clamp.default, aten.clamp_min.default) and _is_floor(arguments(node))
        if not (floored or node.target in _CASTS or node.target in _READS):
            return None
        node = node.all_input_nodes[0]
    return node


def _is_floor(given: Mapping[str, Any]) -> bool:
    floor = given["min"]
    return isinstance(floor, int | float) and floor <= 1 and given.get("max") is None


def _is_sum(node: fx.Node) -> bool:
    """Whether the value over all samples is the sum of the values over parts of them."""
    if node.target in _SUMS:
        return True
    if node.target in (aten.add.Tensor, aten.sub.Tensor):
        return len(node.all_input_nodes) == 2 and all(_is_sum(operand) for operand in node.all_input_nodes)
    if node.target is aten.sum.dim_IntList:
        return _is_scalar(node)
    if isinstance(node.target, torch._ops.OpOverload) and arguments(node).get("reduction") == SUM:
        return True
    return _is_linear(node) and _is_sum(node.all_input_nodes[0])


def _is_linear(node: fx.Node) -> bool:
    """Whether the op has one operand, and twice the operand gives twice the output."""
    if node.target in _SCALED:
        return isinstance(node.args[0], fx.Node) and isinstance(node.args[1], int | float)
    linear = node.target in _CASTS or node.target in _SUMS or node.target is aten.neg.default
    return linear and node.target is not aten.count_nonzero.default and len(node.all_input_nodes) == 1


def _terms(value: fx.Node) -> set[fx.Node]:
    """Those nodes of which `value` is a linear combination."""
    found = {value}
    waiting = [value]
    while waiting:
        node = waiting.pop()
        if _is_linear(node) or node.target in (aten.add.Tensor, aten.sub.Tensor, aten.stack.default, aten.mean.default):
            fresh = set(node.all_input_nodes) - found
            found |= fresh
            waiting.extend(fresh)
    return found


def _value(node: fx.Node) -> Any:
    return node.meta.get("val")


def _is_scalar(node: fx.Node) -> bool:
    value = _value(node)
    if isinstance(value, Tensor):
        return value.dim() == 0
    return isinstance(value, torch.SymInt | torch.SymFloat | int | float)


def _selects(node: fx.Node) -> bool:
    value = _value(node.all_input_nodes[0])
    return isinstance(value, Tensor) and bool(free_unbacked_symbols(value))
