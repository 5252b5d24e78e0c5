"""Run the stages of a graph one after the other in one process, each cut off from the others as on ranks of its own."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, final

import torch
from torch import Tensor

from shardwise.graph import Chain, Draws, Pieces, Result, cut, results, take


@final
@dataclass(frozen=True)
class _Ran:
    """A stage after its forward pass: what it was given, apart from whoever made it, and all that it knows."""

    given: Mapping[str, Tensor]
    known: Mapping[str, Tensor]


def run(
    chain: Chain, bounds: Sequence[int], tensors: Mapping[str, Tensor], fields: Sequence[Tensor], draws: Draws
) -> list[Any]:
    """The leaves of what the function returned for a batch of these `fields`, with stages that begin at `bounds`.

    tensors:  parameters and buffers of the model by name: buffers are updated as the model would
    """
    return _forward(chain, bounds, tensors, fields, draws)[0]


def run_backward(
    chain: Chain,
    bounds: Sequence[int],
    tensors: Mapping[str, Tensor],
    fields: Sequence[Tensor],
    draws: Draws,
    scale: float = 1.0,
) -> list[Any]:
    """As `run`; then the backward pass of `scale` times the first leaf adds to the gradients of `tensors`."""
    leaves, ran = _forward(chain, bounds, tensors, fields, draws)
    roots = {"the first leaf": (leaves[0], torch.full_like(leaves[0], scale))}
    gradients: dict[str, Tensor] = {}
    for ports, stage in reversed(list(zip(cut(chain, bounds), ran, strict=True))):
        roots |= {name: (stage.known[name], gradients[name]) for name in ports.outputs if name in gradients}
        torch.autograd.backward([value for value, _ in roots.values()], [gradient for _, gradient in roots.values()])
        for name in sorted(ports.differentiable):
            gradient = stage.given[name].grad
            if gradient is not None:
                gradients[name] = gradients[name] + gradient if name in gradients else gradient
        roots = {}
    return leaves


def _forward(
    chain: Chain, bounds: Sequence[int], tensors: Mapping[str, Tensor], fields: Sequence[Tensor], draws: Draws
) -> tuple[list[Any], list[_Ran]]:
    values: dict[str, Tensor] = {}
    ran = []
    for ports in cut(chain, bounds):
        assert ports.inputs == tuple(ports.sources)
        given = {name: values[name].detach().requires_grad_(name in ports.differentiable) for name in ports.inputs}
        pieces = take(chain.graph, ports, tensors.__getitem__)
        ran.append(_Ran(given, _compute(pieces, tensors, fields, given, draws)))
        values.update({name: ran[-1].known[name] for name in ports.outputs})
    known = ran[-1].known
    return [known[leaf.name] if isinstance(leaf, Result) else leaf for leaf in results(chain.graph)], ran


def _compute(
    pieces: Pieces,
    tensors: Mapping[str, Tensor],
    fields: Sequence[Tensor],
    given: Mapping[str, Tensor],
    draws: Draws,
) -> dict[str, Tensor]:
    ports = pieces.ports
    known = {**given, **{name: tensors[name] for name in ports.shared}}
    with torch.no_grad():
        prepared = pieces.prelude(*(fields[at] for at in ports.fields))
    known.update(zip(ports.prepared, prepared, strict=True))
    for piece in pieces.pieces:
        outputs = piece.module(draws, *(known[name] for name in piece.inputs))
        known.update(zip(piece.outputs, outputs, strict=True))
    return known
