"""The user's own autograd code inside a captured graph: called as it is, not traced.

`torch.export` looks through a custom `autograd.Function` and loses its backward, and forgets hooks on tensors. While a
capture runs, each of them is recorded under a number and leaves one op in the graph that carries the number; afterwards
that op is replaced by a call of the user's code.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, final

import torch
from torch import Tensor, fx
from torch.utils import _pytree as pytree

_library = torch.library.Library("shardwise", "DEF")
_library.define("opaque(Tensor[] inputs, int session, int number) -> Tensor[]")
_library.define("hook(Tensor input, int session, int number) -> ()")


@final
@dataclass
class Recorder:
    """What one capture met, by number."""

    functions: list[Callable[[Sequence[Tensor]], list[Tensor]]] = field(default_factory=list)
    hooks: list[Callable[[Tensor], Any]] = field(default_factory=list)

    def apply(self, original: Callable[..., Any], arguments: Sequence[Any]) -> Any:
        """Record a call `original(*arguments)` of an autograd function and leave one op for it."""
        leaves, tree = pytree.tree_flatten(list(arguments))
        places = [place for place, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]
        frozen = [None if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        shapes: list[pytree.TreeSpec] = []

        def call(inputs: Sequence[Tensor]) -> list[Tensor]:
            filled = list(frozen)
            for place, tensor in zip(places, inputs, strict=True):
                filled[place] = tensor
            outputs, shape = pytree.tree_flatten(original(*pytree.tree_unflatten(filled, tree)))
            shapes[:] = [shape]
            return outputs

        self.functions.append(call)
        _recorders[id(self)] = self
        outputs = torch.ops.shardwise.opaque([leaves[place] for place in places], id(self), len(self.functions) - 1)
        return pytree.tree_unflatten(list(outputs), shapes[0])

    def hook(self, tensor: Tensor, function: Callable[[Tensor], Any]) -> None:
        """Record `tensor.register_hook(function)` and leave one op for it."""
        self.hooks.append(function)
        _recorders[id(self)] = self
        torch.ops.shardwise.hook(tensor, id(self), len(self.hooks) - 1)

    def forget(self) -> None:
        _recorders.pop(id(self), None)

    def restore(self, module: fx.GraphModule) -> None:
        """Put the user's code where its op stands, in the graph of `module` and in those of its regions."""
        for part in module.modules():
            if isinstance(part, fx.GraphModule):
                marks = [node for node in part.graph.nodes if node.target in _MARKS]
                for node in marks:
                    self._put_back(node)
                if marks:
                    part.recompile()

    def _put_back(self, node: fx.Node) -> None:
        inputs, _, number = node.args
        assert isinstance(number, int)
        if node.target is torch.ops.shardwise.opaque.default:
            node.target = _named(self.functions[number], f"opaque_{number}")
        else:
            node.target = _named(_register(self.hooks[number]), f"hook_{number}")
        node.args = (inputs,)


# The ops take numbers only, so the fake kernel finds its recorder here for as long as the capture runs.
_recorders: dict[int, Recorder] = {}


def _run_opaque(inputs: Sequence[Tensor], session: int, number: int) -> list[Tensor]:
    with torch.no_grad():
        outputs = _recorders[session].functions[number](inputs)
    # An op may not return its input; only shapes matter here.
    return [output.clone() for output in outputs]


def _run_hook(tensor: Tensor, session: int, number: int) -> None:
    return None


for _name, _kernel in (("opaque", _run_opaque), ("hook", _run_hook)):
    _library.impl(_name, _kernel, "CompositeExplicitAutograd")
    torch.library.register_fake(f"shardwise::{_name}", _kernel, lib=_library)
torch.fx.node.has_side_effect(torch.ops.shardwise.hook.default)
_MARKS = (torch.ops.shardwise.opaque.default, torch.ops.shardwise.hook.default)


def _register(function: Callable[[Tensor], Any]) -> Callable[[Tensor], None]:
    def register(tensor: Tensor) -> None:
        if tensor.requires_grad:
            tensor.register_hook(function)

    torch.fx.node.has_side_effect(register)
    return register


def _named(function: Callable[..., Any], name: str) -> Callable[..., Any]:
    function.__name__ = function.__qualname__ = name
    return function
