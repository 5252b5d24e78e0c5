"""The graphs of one function: one serves batches of many sizes; what it froze asks for another.

A capture keeps sizes open where it can. A batch with another structure, with a size that the function took for a plain
number, or of one sample (which broadcasts) gets a graph of its own, cut where its parameters are. Python numbers that
changed since the capture make every graph stale.
"""

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal, final

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from shardwise.errors import CaptureError, PlanError
from shardwise.graph import (
    Chain,
    Graph,
    Ports,
    Refusal,
    Signature,
    Sizes,
    autocast,
    capture,
    chain,
    cut,
    read,
    read_graph,
    scalars,
    shapes,
    take,
)
from shardwise.job import Precision
from shardwise.runtime.executor import Shape
from shardwise.runtime.routes import Routes, routes
from shardwise.runtime.stage import GraphStage, Stage
from shardwise.runtime.weights import Fault, weighed

MOST_VARIANTS = 16  # more kinds of batch than this are a size that should be padded, or kept open
Weighs = Literal["weighed", "as it is"]
"""Whether what is captured is a loss whose micro-batches are weighed."""

MOST_CHANGES = 2  # of a Python number: the third is an error, since each costs a capture


@final
@dataclass(frozen=True)
class Variant:
    """One graph, cut over the stages; the stages of this rank ready to run.

    accepts:  whether a batch with these fields can run through it
    fault:    what is wrong with such a batch, "" where nothing is
    outputs:  how the results nest, leaves left empty
    """

    stages: Mapping[int, Stage]
    routes: Routes
    shapes: Callable[[Sizes], Mapping[str, Shape]]
    dtypes: Sequence[torch.dtype]
    ranks: Sequence[int]
    outputs: Any
    accepts: Callable[[Signature, Sequence[Tensor]], bool]
    fault: Fault


@final
@dataclass
class Variants:
    """The variants of `function(model, batch)` on one rank.

    model:      its parameters here may be sharded or dropped: only shapes count
    holders:    the stages that have each parameter: several where it is tied
    mine:       the stages of this rank
    make_stage: builds one of them
    weighs:     whether the function is a loss whose micro-batches are weighed
    training:   the mode of the model while it is captured
    frozen:     the Python numbers that the captures so far may have frozen, as they are now
    most_sizes: that a batch of any variant so far had, those forgotten included: all ranks know the same number
    """

    function: Callable[[Any, Any], Any]
    model: nn.Module
    precision: Precision
    device: torch.device
    stages: int
    holders: Mapping[str, frozenset[int]]
    mine: Sequence[int]
    make_stage: Callable[[Graph, Ports, int], Stage]
    weighs: Weighs = "weighed"
    training: bool = True
    known: list[Variant] = field(default_factory=list)
    frozen: Mapping[str, object] = field(default_factory=dict)
    changes: int = 0
    most_sizes: int = 0

    def find(self, signature: Signature, tensors: Sequence[Tensor]) -> int | None:
        """The variant that can run this batch, by number."""
        return next((at for at, variant in enumerate(self.known) if variant.accepts(signature, tensors)), None)

    def add(self, signature: Signature) -> None:
        """Capture one more variant, for batches like `signature`.

        raises:  CaptureError where the function cannot be captured for it, or there are too many kinds of batch
        """
        if len(self.known) >= MOST_VARIANTS:
            raise CaptureError(
                f"batches came in more than {MOST_VARIANTS} kinds that need a graph each, the last with "
                f"{_describe(signature)}; pad them to few sizes, or do not turn sizes into Python numbers in the loss"
            )
        batch = signature.assemble([torch.empty(f.shape, dtype=f.dtype, device=self.device) for f in signature.fields])
        with _mode(self.model, self.training):
            found = capture_chain(self.function, self.model, batch, self.precision, self.device, self.weighs)
        self.frozen = {**self.frozen, **found.chain.graph.capture.scalars}
        self.keep(make_variant(found, bounds_by_owner(found.chain, self.holders, self.stages), self))

    def keep(self, variant: Variant) -> None:
        self.known.append(variant)
        self.most_sizes = max(self.most_sizes, sum(variant.ranks))

    def refresh(self, step: int) -> None:
        """Forget every graph where a Python number that it froze has changed.

        raises:  CaptureError the third time
        """
        with _mode(self.model, self.training):
            everything = scalars(self.function, self.model)
        now = {name: everything.get(name) for name in self.frozen}
        if now != self.frozen:
            changed = next(name for name in now if self.frozen[name] != now[name])
            self.changes += 1
            values = f"{changed} from {self.frozen[changed]!r} to {now[changed]!r}"
            if self.changes > MOST_CHANGES:
                raise CaptureError(
                    f"step {step}: the loss reads a Python number that keeps changing, now {values}; each "
                    "change costs a capture. Pass it in the batch as a tensor, such as batch['beta'], or use a "
                    "plan with one stage"
                )
            warnings.warn(f"step {step}: captured again, since {values}", stacklevel=2)
            self.known.clear()
        self.frozen = now


@contextmanager
def _mode(model: nn.Module, training: bool) -> Iterator[None]:
    """Evaluation mode, or each module's own mode."""
    modes = {module: module.training for module in model.modules()}
    if not training:
        model.eval()
    try:
        yield
    finally:
        for module, mode in modes.items():
            module.training = mode


@final
@dataclass(frozen=True)
class Found:
    """A captured function, and the check of each batch that its weights rest on."""

    chain: Chain
    fault: Fault


def capture_chain(
    function: Callable[[Any, Any], Any],
    model: nn.Module,
    batch: Any,
    precision: Precision,
    device: torch.device,
    weighs: Weighs,
) -> Found:
    """The chain of segments of `function(model, batch)`, with the loss weighed where it is one.

    raises:  CaptureError where it cannot be captured
    """
    captured = capture(function, model, batch, precision=precision, device=device.type)
    if isinstance(captured, Refusal):
        raise CaptureError(f"the loss cannot be cut into stages: {captured}; use a plan with one stage")
    fault: Fault = _nothing_wrong
    if weighs == "weighed":
        captured, fault = weighed(captured)
    return Found(chain(read_graph(captured, model, read(batch)[1])), fault)


def _nothing_wrong(fields: Sequence[Tensor]) -> str:
    return ""


def make_variant(found: Found, bounds: Sequence[int], variants: Variants) -> Variant:
    """`found`, cut at `bounds`."""
    graph = found.chain.graph
    ports = cut(found.chain, bounds)
    for number, stage in enumerate(ports):
        for name in stage.parameters:
            if number not in variants.holders.get(name, {number}):
                raise PlanError(
                    f"this graph reads {name} on stage {number}, but the plan keeps it on stage "
                    f"{min(variants.holders[name])}; use a plan with one stage"
                )
    link = routes(ports)
    names = {name for group in (*link.activations.values(), *link.gradients.values()) for name in group}
    fields = graph.capture.signature.fields
    return Variant(
        stages={number: variants.make_stage(graph, ports[number], number) for number in variants.mine},
        routes=link,
        shapes=shapes(graph, sorted(names)),
        dtypes=[each.dtype for each in fields],
        ranks=[len(each.shape) for each in fields],
        outputs=pytree.tree_unflatten([None] * len(graph.outputs), graph.capture.outputs),
        accepts=graph.capture.accepts,
        fault=found.fault,
    )


def bounds_by_owner(found: Chain, holders: Mapping[str, frozenset[int]], stages: int) -> list[int]:
    """Where each stage begins, so that every op stands on the stage that has its parameters.

    Between the last op of one stage and the first of the next that tell, the narrowest place is taken.

    raises:  PlanError where the ops use the parameters in another order than the stages
    """
    told = [
        (at, min(holders[name]))
        for at, op in enumerate(found.graph.ops)
        for name in op.parameters
        if len(holders.get(name, ())) == 1
    ]
    bounds = [0]
    for stage in range(1, stages):
        low = max([at for at, owner in told if owner < stage], default=bounds[-1]) + 1
        high = min([at for at, owner in told if owner >= stage], default=len(found.graph.ops) - 1)
        places = [k for k in range(max(low, bounds[-1] + 1), high + 1) if found.graph.widths[k] is not None]
        if not places:
            raise PlanError(
                f"this graph uses parameters in another order than the plan's stages: none of its ops can begin stage "
                f"{stage}; use a plan with one stage"
            )
        bounds.append(min(places, key=lambda k: (found.graph.widths[k] or 0, -k)))
    return bounds


def _describe(signature: Signature) -> str:
    return ", ".join(f"batch{each.path} of shape {each.shape}" for each in signature.fields)


def graph_stage(
    graph: Graph,
    ports: Ports,
    resolve: Callable[[str], Any],
    recompute: Sequence[int],
    precision: Precision,
    device: torch.device,
) -> GraphStage:
    """One stage of `graph`, with the parameters that `resolve` gives."""
    shared = {name: resolve(name) for name in ports.shared}
    context = partial(autocast, precision, device.type)
    return GraphStage(graph, take(graph, ports, resolve), shared, recompute, context).to(device)
