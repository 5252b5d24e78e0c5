"""The shape of a batch: its tree, its tensors, and the plain values that a capture freezes."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, final

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from shardwise.errors import BatchError
from shardwise.job import Batch

PLAIN = (int, float, bool, str, bytes, complex, type(None), torch.dtype, torch.device)


@final
@dataclass(frozen=True, slots=True)
class Field:
    """One tensor of a batch.

    path:    where it stands, as Python would write it: ["ids"], [0]["mask"], or "" for a batch that is one tensor
    shape:   sizes in the batch at hand
    """

    path: str
    shape: tuple[int, ...]
    dtype: torch.dtype


@final
@dataclass(frozen=True, slots=True)
class Signature:
    """What a captured graph expects of a batch: equal signatures can share one.

    tree:    how the batch nests
    fields:  the tensors, in the order of the tree
    values:  the other leaves, by their place among all leaves: frozen by a capture
    """

    tree: pytree.TreeSpec
    fields: tuple[Field, ...]
    values: tuple[tuple[int, Any], ...]

    @property
    def frozen(self) -> tuple[object, ...]:
        """All but the sizes: what must be equal for a dynamic graph to serve."""
        kinds = tuple((field.path, field.dtype, len(field.shape)) for field in self.fields)
        return (str(self.tree), kinds, self.values)

    @property
    def sizes(self) -> tuple[tuple[int, ...], ...]:
        return tuple(field.shape for field in self.fields)

    def assemble(self, tensors: Sequence[Tensor]) -> Batch:
        """The batch whose tensors are `tensors`, one for each field."""
        leaves: list[Any] = [None] * (len(self.fields) + len(self.values))
        taken = set()
        for place, value in self.values:
            leaves[place] = value
            taken.add(place)
        for place, tensor in zip((at for at in range(len(leaves)) if at not in taken), tensors, strict=True):
            leaves[place] = tensor
        return pytree.tree_unflatten(leaves, self.tree)


def read(batch: Batch) -> tuple[Signature, list[Tensor]]:
    """The signature of `batch` and its tensors.

    raises:  BatchError for a leaf that is neither a tensor nor a plain value
    """
    leaves, tree = pytree.tree_flatten_with_path(batch)
    fields, values, tensors = [], [], []
    for place, (path, leaf) in enumerate(leaves):
        where = pytree.keystr(path)
        if isinstance(leaf, Tensor):
            fields.append(Field(where, tuple(leaf.shape), leaf.dtype))
            tensors.append(leaf)
        elif isinstance(leaf, PLAIN):
            values.append((place, leaf))
        else:
            raise BatchError(
                f"batch{where} is a {type(leaf).__name__}, which is neither a tensor nor a plain value; "
                "let the collate function return tensors in dicts, lists and tuples"
            )
    return Signature(tree, tuple(fields), tuple(values)), tensors
