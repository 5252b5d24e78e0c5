"""Capture `loss(model, batch)` as a graph of tensor ops, or say why not.

`torch.export` (non-strict) runs the Python of the loss once on fake tensors, under the watch of `watch`; what comes out
is cleaned of what only export needs, and its parameters go by the names that the one-device model gives them. Sizes of
the batch stay symbols wherever the loss allows it, so that one graph serves micro-batches of any size.
"""

import logging
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from operator import attrgetter
from typing import Any, final

import torch
from torch import Tensor, fx, nn
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode, free_symbols
from torch.utils import _pytree as pytree

from shardwise.errors import ShardwiseError
from shardwise.graph import signature
from shardwise.graph.fakes import faked
from shardwise.graph.names import named_tensors
from shardwise.graph.regions import inner_ops
from shardwise.graph.scalars import noted_reads, scalars, that_were_read
from shardwise.graph.signature import Signature
from shardwise.graph.watch import Refusal, RefusedError, user_line, watched
from shardwise.job import Batch, Precision

Function = Callable[[Any, Batch], Any]
"""What is captured: `function(model, batch)`, a pytree of tensors and plain values."""


@final
@dataclass(frozen=True, slots=True)
class Capture:
    """The ops of one function, as torch.fx holds them.

    module:      the graph; parameters and buffers are `get_attr` nodes named as in the model, inputs are the tensors
                 of the batch in the order of `signature.fields`
    signature:   of the example batch
    dynamic:     per field, which dimensions may differ from the example
    outputs:     how what the function returned nests; its leaves are the graph's outputs
    guards:      raises where a batch's sizes are outside what the graph was captured for
    scalars:     the Python numbers that the capture may have frozen, by where they stand
    """

    module: fx.GraphModule
    signature: Signature
    dynamic: tuple[frozenset[int], ...]
    outputs: pytree.TreeSpec
    guards: Callable[..., None] | None
    scalars: Mapping[str, object]

    def accepts(self, signature: Signature, tensors: Sequence[Tensor]) -> bool:
        """Whether this graph is right for a batch with these fields."""
        if signature.frozen != self.signature.frozen:
            return False
        for mine, given, dynamic in zip(self.signature.sizes, signature.sizes, self.dynamic, strict=True):
            for at, (size, other) in enumerate(zip(mine, given, strict=True)):
                # A size of 0 or 1 may take another branch or broadcast: it is right only where it was captured so.
                if size != other and (at not in dynamic or other < 2):
                    return False
        if self.guards is not None:
            try:
                self.guards(*tensors)
            except AssertionError:
                return False
        return True

    def fill_constants(self, real: Callable[[Tensor], Tensor]) -> None:
        """Give the graph the values of constants that were fake while it was captured."""
        for node in self.module.graph.nodes:
            if isinstance(node.meta.get("value"), Tensor):
                node.meta["value"] = real(node.meta["value"])


def capture(
    function: Function, model: nn.Module, batch: Batch, *, precision: Precision = "fp32", device: str = "cpu"
) -> Capture | Refusal:
    """The graph of `function(model, batch)`, for batches like `batch`, of at least two samples.

    `model` may hold fake tensors. Nothing of the model, the batch or any random state is changed.
    """
    before = scalars(function, model)
    shape, tensors = signature.read(batch)
    results = _Results()
    try:
        with faked(model, tensors, device) as fakes:
            with watched(model) as recorder, noted_reads() as read, _quiet(), autocast(precision, device):
                program = _export(_Wrapper(function, model, shape, before, results), fakes)
            module = program.module()
            recorder.restore(module)
            guards = _take_guards(module)
            _rename(module, model)
    except RefusedError as refused:
        return refused.refusal
    except ShardwiseError:
        raise
    except Exception as error:
        return Refusal(_first_line(error), user_line(error.__traceback__))
    changed = that_were_read(results.changed, model, read)
    if changed:
        return Refusal(
            f"the forward pass changes {changed[0]} in Python, which a graph would freeze; keep it in a buffer"
        )
    _drop_what_only_export_needs(module)
    frozen = {name: before[name] for name in that_were_read(before, model, read)}
    return Capture(module, shape, _dynamic(module), results.tree, guards, frozen)


def autocast(precision: Precision, device: str) -> torch.autocast:
    """The context in which the job's forward pass runs, also as a graph: export records what is above autocast."""
    dtype = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}[precision]
    enabled = precision != "fp32"
    return torch.autocast(device, dtype=dtype if enabled else None, enabled=enabled)


@final
class _Wrapper(nn.Module):
    """The function as a module of flat tensors, the form that export takes.

    before:   the Python numbers within reach of the function
    results:  is filled in as it runs
    """

    def __init__(
        self,
        function: Function,
        model: nn.Module,
        shape: Signature,
        before: Mapping[str, object],
        results: "_Results",
    ) -> None:
        super().__init__()
        self.train(model.training)
        self.model = model

        def run(*tensors: Tensor) -> list[Any]:
            try:
                leaves, results.tree = pytree.tree_flatten(function(model, shape.assemble(tensors)))
            except GuardOnDataDependentSymNode as error:
                # Said here: on its way out of torch it would print the graph so far, all of it.
                raise RefusedError(Refusal(_ASKS_FOR_A_VALUE, user_line(error.__traceback__))) from error
            # Seen here: behind this, export puts attributes of modules back.
            results.changed = _differences(before, scalars(function, model))
            return leaves

        self._run = run

    def forward(self, *tensors: Tensor) -> list[Any]:
        return self._run(*tensors)


_ASKS_FOR_A_VALUE = (
    "Python asks for the value of a tensor, to branch on it or to take it as a size, which is not known while a graph "
    "is captured; choose with torch.where, or pass the value in the batch as a plain number"
)


@final
class _Results:
    """What the function left behind: how its results nest, and which Python numbers it changed."""

    tree: pytree.TreeSpec
    changed: Sequence[str]


def _export(wrapper: _Wrapper, tensors: list[Tensor]) -> torch.export.ExportedProgram:
    auto = torch.export.Dim.AUTO
    # A size of one broadcasts, and export would take it for a constant: it stays one.
    dims = tuple({at: auto for at, size in enumerate(tensor.shape) if size > 1} for tensor in tensors)
    return torch.export.export(
        wrapper, tuple(tensors), strict=False, dynamic_shapes={"tensors": dims} if dims else None
    )


@contextmanager
def _quiet() -> Iterator[None]:
    """Export warns of attributes that recurrent layers assign to themselves, and logs each guard it meets."""
    loggers = [logging.getLogger(name) for name in ("torch.fx.experimental.symbolic_shapes", "torch._export")]
    levels = [logger.level for logger in loggers]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for logger in loggers:
            logger.setLevel(logging.CRITICAL)
        try:
            yield
        finally:
            for logger, level in zip(loggers, levels, strict=True):
                logger.setLevel(level)


def _first_line(error: Exception) -> str:
    text = next((line for line in str(error).splitlines() if line.strip()), "")
    return f"torch.export stops at {type(error).__name__}: {text.strip()[:300]}"


def _differences(before: Mapping[str, object], after: Mapping[str, object]) -> list[str]:
    return [name for name in {**before, **after} if before.get(name) != after.get(name)]


def _take_guards(module: fx.GraphModule) -> Callable[..., None] | None:
    """Take the check of sizes out of the graph: it is asked once for a batch, not in each stage."""
    for node in list(module.graph.nodes):
        if node.op == "call_module" and node.target == "_guards_fn":
            guards: Callable[..., None] = module.get_submodule("_guards_fn")
            module.graph.erase_node(node)
            del module._guards_fn
            return guards
    return None


def _rename(module: fx.GraphModule, model: nn.Module) -> None:
    """Give parameters and buffers the names of the model: of a tied one, the first name.

    Export reads a tied parameter under the last of its names, and hangs the model below "model". What is left are
    constants, and the bodies of no_grad and autocast regions: their nodes keep the value itself.
    """
    first: dict[int, str] = {}
    tensors = dict(named_tensors(model))
    for name, tensor in tensors.items():
        first.setdefault(id(tensor), name)
    canonical = {f"model.{name}": first[id(tensor)] for name, tensor in tensors.items()}
    for node in module.graph.nodes:
        if node.op == "get_attr" and node.target in canonical:
            node.meta["name"] = canonical[node.target]
            node.meta["tensor"] = tensors[node.meta["name"]]
        elif node.op == "get_attr":
            node.meta["value"] = attrgetter(str(node.target))(module)


def _drop_what_only_export_needs(module: fx.GraphModule) -> None:
    graph = module.graph
    for node in reversed(list(graph.nodes)):
        if not node.users and (node.op == "get_attr" or str(node.target).startswith(_CHECKS)):
            graph.erase_node(node)
    for node in list(graph.nodes):
        if node.target is torch.ops.aten.lift_fresh_copy.default:
            # Each run gets a copy of its own of an inline constant: later ops may write to it.
            node.target = torch.ops.aten.clone.default
    graph.eliminate_dead_code(lambda node: _has_effect(module, node))
    graph.lint()


_CHECKS = ("aten._assert", "aten.sym_constrain", "_operator.ge", "_operator.le")


def _has_effect(module: fx.GraphModule, node: fx.Node) -> bool:
    impure = node.is_impure() or any(inner.is_impure() for inner in inner_ops(module, node))
    return impure or node.op in ("placeholder", "output")


def _dynamic(module: fx.GraphModule) -> tuple[frozenset[int], ...]:
    shapes = [node.meta["val"].shape for node in module.graph.nodes if node.op == "placeholder"]
    return tuple(frozenset(at for at, size in enumerate(shape) if free_symbols(size)) for shape in shapes)
