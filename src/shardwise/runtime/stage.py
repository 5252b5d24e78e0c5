"""What one stage computes for one micro-batch: pieces of a graph, or the user's module as it is."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol, final

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from shardwise.graph import WHOLE, Draws, Graph, Pieces, Ports, Result, mix, results
from shardwise.job import Batch
from shardwise.runtime.recompute import recomputed

Values = Mapping[str, Tensor]


@final
@dataclass(frozen=True, slots=True)
class Outputs:
    """What a stage computed for one micro-batch.

    values:   by name, for later stages
    results:  on the last stage, what the function returned
    """

    values: Values
    results: Any = None


class Stage(Protocol):
    """A stage as the executor sees it; values go by the names that `Ports` gives them."""

    def compute(self, draws: Draws, fields: Sequence[Any], values: Values) -> Outputs: ...


@final
class GraphStage(nn.Module):
    """A stage whose children are its segments, each a module that owns its parameters.

    The graph was recorded above autocast: `context` must be that of the capture, or nothing is cast.
    """

    def __init__(
        self,
        graph: Graph,
        pieces: Pieces,
        shared: Mapping[str, nn.Parameter],
        recompute: Sequence[int],
        context: Callable[[], AbstractContextManager[Any]],
    ) -> None:
        super().__init__()
        self.ports: Ports = pieces.ports
        self.prelude = pieces.prelude
        self.segments = nn.ModuleList(piece.module for piece in pieces.pieces)
        self.shared = nn.ParameterList(shared[name] for name in pieces.ports.shared)
        self._pieces = pieces.pieces
        self._recompute = frozenset(recompute)
        self._context = context
        self._results = results(graph)
        self._tree = graph.capture.outputs
        self._last = pieces.ports.segments[-1].stop == len(graph.ops)
        leaves = [leaf.name for leaf in self._results if isinstance(leaf, Result)]
        self.look: Callable[[int, str, Any], None] | None = None
        self._wanted = tuple(leaves if self._last else pieces.ports.outputs)

    def compute(self, draws: Draws, fields: Sequence[Tensor], values: Values) -> Outputs:
        with self._context():
            known: Values = self(draws, list(fields), dict(values))
        if not self._last:
            return Outputs(known)
        leaves = [known[leaf.name] if isinstance(leaf, Result) else leaf for leaf in self._results]
        return Outputs({}, pytree.tree_unflatten(leaves, self._tree))

    def forward(self, draws: Draws, fields: list[Tensor], values: dict[str, Tensor]) -> dict[str, Tensor]:
        with torch.no_grad():
            prepared = self.prelude(*fields)
        known = {**values, **dict(zip(self.ports.prepared, prepared, strict=True))}
        known.update(zip(self.ports.shared, self.shared, strict=True))
        for number, (segment, piece) in enumerate(zip(self.segments, self._pieces, strict=True)):
            inputs = [known[name] for name in piece.inputs]
            if number in self._recompute and torch.is_grad_enabled():
                written = [segment.get_buffer(name) for name in piece.writes]
                outputs = recomputed(segment, written, draws, *inputs, own_draws=True)
            else:
                outputs = segment(draws, *inputs)
            known.update(zip(piece.outputs, outputs, strict=True))
            if self.look is not None:
                self.look(draws.micro_batch, piece.name, outputs)
        return {name: known[name] for name in self._wanted}

    def named_tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Its parameters and buffers by the names of the one-device model, as they are now (sharded or not)."""
        yield from zip(self.ports.shared, self.shared, strict=True)
        for segment in self.segments:
            yield from segment.named_parameters()
            yield from ((name, buffer) for name, buffer in segment.named_buffers() if name in self.ports.buffers)


@final
class WholeStage:
    """The only stage of a plan that runs the user's module: `function(model, batch)` on torch's own random stream.

    Its one field is the batch itself.
    """

    def __init__(
        self,
        model: nn.Module,
        function: Callable[[nn.Module, Batch], Any],
        context: Callable[[], AbstractContextManager[Any]],
    ) -> None:
        self.model = model
        self._function = function
        self._context = context

    def compute(self, draws: Draws, fields: Sequence[Any], values: Values) -> Outputs:
        (batch,) = fields
        torch.manual_seed(mix(draws.seed, draws.step, draws.micro_batch, WHOLE))
        with self._context():
            return Outputs({}, self._function(self.model, batch))
