"""The shapes of a graph's values for a batch of given sizes: what a receiver must allocate."""

from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache

import torch
from torch import Tensor

from shardwise.graph.ops import Graph

Sizes = tuple[tuple[int, ...], ...]
"""The shape of each field of a batch."""

Shape = tuple[tuple[int, ...], torch.dtype]


def shapes(graph: Graph, names: Sequence[str]) -> Callable[[Sizes], Mapping[str, Shape]]:
    """How the values called `names` look for a batch whose fields have these sizes."""
    values = {node.name: node.meta["val"] for node in graph.nodes if node.name in names}
    symbolic = [tuple(node.meta["val"].shape) for node in graph.placeholders]

    @lru_cache(maxsize=256)
    def of(sizes: Sizes) -> Mapping[str, Shape]:
        known = {}
        for wanted, given in zip(symbolic, sizes, strict=True):
            for symbol, size in zip(wanted, given, strict=True):
                if not isinstance(symbol, int):
                    known[symbol.node.expr] = size
        return {name: (_shape(value, known), value.dtype) for name, value in values.items()}

    return of


def _shape(value: Tensor, known: Mapping[object, int]) -> tuple[int, ...]:
    return tuple(size if isinstance(size, int) else int(size.node.expr.xreplace(known)) for size in value.shape)
