"""What the values of a captured graph depend on: the data of the batch, and the trained parameters."""

import operator

import torch
from torch import Tensor, fx, nn
from torch.utils import _pytree as pytree

aten = torch.ops.aten


def from_data(graph: fx.Graph) -> set[fx.Node]:
    """The nodes whose value depends on what stands in the batch, and not on its sizes alone."""
    found: set[fx.Node] = set()
    for node in graph.nodes:
        sizes_only = getattr(node.target, "overloadpacket", node.target) in _OF_SIZES
        if node.op == "placeholder" or (not sizes_only and any(operand in found for operand in node.all_input_nodes)):
            found.add(node)
    return found


_OF_SIZES = frozenset(
    {
        aten.sym_size, aten.sym_numel, aten.ones_like, aten.zeros_like, aten.full_like,
        aten.new_ones, aten.new_zeros, aten.new_full,
    }
)  # fmt: skip


def from_parameters(graph: fx.Graph) -> set[fx.Node]:
    """The nodes through which a gradient can flow back to a trained parameter."""
    found: set[fx.Node] = set()
    for node in graph.nodes:
        if node.op == "get_attr":
            tensor = node.meta.get("tensor")
            flows = isinstance(tensor, nn.Parameter) and tensor.requires_grad
        else:
            flows = any(operand in found for operand in node.all_input_nodes) and not _stops(node)
        if flows:
            found.add(node)
    return found


def _stops(node: fx.Node) -> bool:
    if node.target is aten.detach.default or node.op == "output":
        return True
    if node.target is torch.ops.higher_order.wrap_with_set_grad_enabled and node.args[0] is False:
        return True
    if node.target is operator.getitem:
        return False
    tensors = [value for value in pytree.tree_leaves(node.meta.get("val")) if isinstance(value, Tensor)]
    return bool(tensors) and not any(value.is_floating_point() for value in tensors)


def behind(node: fx.Node) -> list[fx.Node]:
    """`node` and all that it is computed from, nearest first."""
    reached = [node]
    seen = {node}
    for each in reached:  # grows on the way
        for operand in each.all_input_nodes:
            if operand not in seen:
                seen.add(operand)
                reached.append(operand)
    return reached
