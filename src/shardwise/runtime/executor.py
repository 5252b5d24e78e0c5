"""Run the list of actions of one rank: the same list that was simulated.

Values are sent contiguous and held until the send completes. Between the forward and the backward of a micro-batch only
the edge into autograd's graph of each output is kept, not its storage.
"""

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import Any, Protocol, final

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.utils import _pytree as pytree

from shardwise.graph import Draws, Sizes
from shardwise.runtime.routes import Routes
from shardwise.runtime.stage import Stage
from shardwise.schedule import Schedule, Transport
from shardwise.schedule.actions import Backward, Exchange, Forward, Load, Reduce, Transfer

Shape = tuple[tuple[int, ...], torch.dtype]


class Graph(Protocol):
    """What the executor needs of the graph that a micro-batch runs through.

    stages:   those of this rank, by number
    shapes:   of the values of a micro-batch, by name
    dtypes:   of its fields
    """

    @property
    def stages(self) -> Mapping[int, Stage]: ...
    @property
    def routes(self) -> Routes: ...
    @property
    def shapes(self) -> Callable[[Sizes], Mapping[str, Shape]]: ...
    @property
    def dtypes(self) -> Sequence[torch.dtype]: ...


@final
@dataclass(frozen=True)
class Work:
    """What a run of the lists needs to know of this step's micro-batches, by their number on this data rank.

    graphs:         that they run through
    draws:          seeds their random ops
    sizes:          the shapes of their fields
    load:           on the rank of stage 0, gives their fields on the device
    root:           where the backward pass starts: the loss, and its gradient, given the results
    last_backward:  called before the last backward of a stage
    finished:       called as a stage's gradients are whole
    """

    graphs: Sequence[Graph]
    draws: Callable[[int], Draws]
    sizes: Sequence[Sizes]
    load: Callable[[int], Sequence[Any]]
    root: Callable[[int, Any], tuple[Tensor, Tensor]]
    last_backward: Callable[[int], None]
    finished: Callable[[int], None]


def run(schedule: Schedule, rank: int, work: Work, transport: Transport | None, device: torch.device) -> dict[int, Any]:
    """Execute the list of `rank`. On the rank of the last stage: the results of each micro-batch, detached."""
    return _Run(schedule, rank, work, transport, device).execute()


@final
@dataclass
class _Held:
    """Of one stage and micro-batch, between forward and backward."""

    leaves: Mapping[str, Tensor]
    edges: Mapping[str, GradientEdge]
    results: Any


@final
@dataclass
class _Run:
    schedule: Schedule
    rank: int
    work: Work
    transport: Transport | None
    device: torch.device
    fields: dict[int, Sequence[Any]] = field(default_factory=dict)
    ready: dict[Transfer, Sequence[Tensor]] = field(default_factory=dict)  # to be sent, or to be used
    coming: dict[Transfer, Any] = field(default_factory=dict)
    sending: deque[tuple[Any, Mapping[Transfer, Sequence[Tensor]]]] = field(default_factory=deque)
    held: dict[tuple[int, int], _Held] = field(default_factory=dict)
    results: dict[int, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        actions = self.schedule.ranks[self.rank]
        backwards = [action for action in actions if isinstance(action, Backward)]
        self.last = {action.stage: (action.stage, action.micro_batch) for action in backwards}

    def execute(self) -> dict[int, Any]:
        for place, action in enumerate(self.schedule.ranks[self.rank]):
            match action:
                case Load(micro_batch):
                    self._load(micro_batch)
                case Exchange():
                    self._exchange(action)
                case Forward(stage, micro_batch):
                    self._open_ahead(place)
                    self._forward(stage, micro_batch)
                case Backward(stage, micro_batch):
                    self._open_ahead(place)
                    self._backward(stage, micro_batch)
                case Reduce(stage):
                    self.work.finished(stage)
        for pending, sent in self.sending:
            for transfer in sent:
                pending.wait(transfer)
        return self.results

    def _load(self, micro_batch: int) -> None:
        fields = self.work.load(micro_batch)
        self.fields[micro_batch] = fields
        for transfer in self.schedule.links.outputs(Load(micro_batch)):
            chosen = self.work.graphs[micro_batch].routes.fields[transfer.target]
            self.ready[transfer] = [fields[place].contiguous() for place in chosen]

    def _open_ahead(self, place: int) -> None:
        """Open what is received between the computation at `place` and the next one, where nothing queues."""
        if self.transport is None or self.transport.queues:
            return
        for action in islice(self.schedule.ranks[self.rank], place + 1, None):
            if isinstance(action, Forward | Backward):
                break
            if isinstance(action, Exchange) and action.receives:
                self._start(replace(action, sends=()))

    def _exchange(self, exchange: Exchange) -> None:
        opened = bool(exchange.receives) and exchange.receives[0] in self.coming
        self._start(replace(exchange, receives=()) if opened else exchange)

    def _start(self, exchange: Exchange) -> None:
        assert self.transport is not None
        outgoing = {transfer: self.ready.pop(transfer) for transfer in exchange.sends}
        incoming = {transfer: self._buffers(transfer) for transfer in exchange.receives}
        pending = self.transport.start(exchange, outgoing, incoming)
        for transfer, buffers in incoming.items():
            self.ready[transfer] = buffers
            self.coming[transfer] = pending
        while self.sending and self.sending[0][0].done():
            self.sending.popleft()
        if outgoing:
            self.sending.append((pending, outgoing))

    def _buffers(self, transfer: Transfer) -> Sequence[Tensor]:
        sizes, graph = self.work.sizes[transfer.micro_batch], self.work.graphs[transfer.micro_batch]
        if transfer.kind == "batch":
            chosen = graph.routes.fields[transfer.target]
            wanted = [(sizes[place], graph.dtypes[place]) for place in chosen]
        else:
            shapes = graph.shapes(sizes)
            wanted = [shapes[name] for name in graph.routes.names(transfer)]
        return [torch.empty(shape, dtype=dtype, device=self.device) for shape, dtype in wanted]

    def _take(self, transfer: Transfer) -> Sequence[Tensor]:
        """The tensors of a transfer, once they are there."""
        pending = self.coming.pop(transfer, None)
        if pending is not None:
            pending.wait(transfer)
        return self.ready.pop(transfer)

    def _forward(self, stage: int, micro_batch: int) -> None:
        graph = self.work.graphs[micro_batch]
        routes = graph.routes
        values: dict[str, Tensor] = {}
        leaves: dict[str, Tensor] = {}
        fields: Sequence[Any] = ()
        if self.schedule.placement[0] == self.rank and routes.fields[stage]:
            fields = [self.fields[micro_batch][place] for place in routes.fields[stage]]
        for transfer in self.schedule.links.inputs(Forward(stage, micro_batch)):
            tensors = self._take(transfer)
            if transfer.kind == "batch":
                fields = tensors
                continue
            back = routes.gradients.get((stage, transfer.source), ())
            for name, tensor in zip(routes.names(transfer), tensors, strict=True):
                values[name] = tensor
                if self.schedule.trains and name in back:
                    leaves[name] = tensor.requires_grad_()
        with torch.set_grad_enabled(self.schedule.trains):
            outputs = graph.stages[stage].compute(self.work.draws(micro_batch), fields, values)
        for transfer in self.schedule.links.outputs(Forward(stage, micro_batch)):
            sent = [outputs.values[name].detach().contiguous() for name in routes.names(transfer)]
            self.ready[transfer] = sent
        if self.schedule.trains:
            edges = {name: get_gradient_edge(value) for name, value in outputs.values.items() if value.requires_grad}
            self.held[stage, micro_batch] = _Held(leaves, edges, outputs.results)
        if stage == self.schedule.stages - 1:
            self.results[micro_batch] = _detached(outputs.results)

    def _backward(self, stage: int, micro_batch: int) -> None:
        held = self.held.pop((stage, micro_batch))
        if (stage, micro_batch) == self.last[stage]:
            self.work.last_backward(stage)
        roots: list[Any] = []
        gradients: list[Tensor] = []
        if stage == self.schedule.stages - 1:
            root, gradient = self.work.root(micro_batch, held.results)
            if root.requires_grad:
                roots.append(root)
                gradients.append(gradient)
        for name, gradient in self._gradients(stage, micro_batch).items():
            if name in held.edges:
                roots.append(held.edges[name])
                gradients.append(gradient)
        if roots:
            torch.autograd.backward(roots, gradients)
        for transfer in self.schedule.links.outputs(Backward(stage, micro_batch)):
            leaves = [held.leaves[name] for name in self.work.graphs[micro_batch].routes.names(transfer)]
            self.ready[transfer] = [
                torch.zeros_like(leaf) if leaf.grad is None else leaf.grad.contiguous() for leaf in leaves
            ]

    def _gradients(self, stage: int, micro_batch: int) -> dict[str, Tensor]:
        """Of the stage's outputs, summed over their users from the first stage to the last."""
        total: dict[str, Tensor] = {}
        for transfer in self.schedule.links.inputs(Backward(stage, micro_batch)):
            names = self.work.graphs[micro_batch].routes.names(transfer)
            for name, gradient in zip(names, self._take(transfer), strict=True):
                total[name] = gradient if name not in total else total[name] + gradient
        return total


def _detached(results: Any) -> Any:
    """What a loss gives is a dictionary: it needs no walk by pytree, which costs every micro-batch a tenth of a ms."""
    if isinstance(results, Tensor):
        return results.detach()
    if type(results) is dict:
        return {key: _detached(value) for key, value in results.items()}
    return pytree.tree_map_only(Tensor, Tensor.detach, results)
