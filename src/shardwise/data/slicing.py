"""Cut a batch that is already made into micro-batches, where there is one way to do it."""

from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from shardwise.errors import BatchError
from shardwise.graph.signature import Field, Signature, read
from shardwise.job import Batch

MEND = (
    "give parallelize(..., data=) a DataLoader, so that each micro-batch is collated from its samples, "
    "or put the samples first in every tensor"
)


def slice_batch(batch: Batch, sizes: Sequence[int]) -> list[Batch]:
    """Cut `batch` along its samples: micro-batch i holds the next `sizes[i]` of them.

    Every tensor with dimensions is cut along the first one, into views. Tensors without dimensions and plain values go
    whole to every micro-batch.

    raises:  BatchError where the tensors do not all hold `sum(sizes)` samples along their first dimension, or where
             a list or tuple of plain values may be one value per sample
    """
    signature, tensors = _read(batch)
    wanted = sum(sizes)
    _check_first_sizes(signature, wanted)
    _check_plain_values(batch, wanted)
    starts = accumulate(sizes, initial=0)
    return [_cut(signature, tensors, start, size) for start, size in zip(starts, sizes, strict=False)]


def samples_in(batch: Batch) -> int:
    """The number of samples in `batch`: the first size of every tensor with dimensions.

    Nothing in a tensor tells samples from time steps: compare with what the job expects.

    raises:  BatchError where no tensor has dimensions, or where their first sizes differ
    """
    signature, _ = _read(batch)
    sized = _sized(signature)
    if not sized:
        raise BatchError("no tensor of the batch has dimensions, so its samples cannot be counted; " + MEND)
    samples = sized[0].shape[0]
    for field in sized:
        if field.shape[0] != samples:
            raise BatchError(
                f"batch{field.path} has shape {field.shape}, but batch{sized[0].path} has shape {sized[0].shape}: "
                f"which first size counts the samples is not clear; {MEND}"
            )
    return samples


def _read(batch: Batch) -> tuple[Signature, list[Tensor]]:
    for path, leaf in pytree.tree_flatten_with_path(batch)[0]:
        if isinstance(leaf, Tensor) and (leaf.is_nested or leaf.layout is not torch.strided):
            kind = "nested" if leaf.is_nested else leaf.layout
            raise BatchError(f"batch{pytree.keystr(path)} is a {kind} tensor, which cannot be cut by sample; {MEND}")
    return read(batch)


def _sized(signature: Signature) -> list[Field]:
    return [field for field in signature.fields if field.shape]


def _check_first_sizes(signature: Signature, wanted: int) -> None:
    sized = _sized(signature)
    for field in sized:
        if field.shape[0] != wanted:
            raise BatchError(
                f"batch{field.path} has shape {field.shape}, but the step has {wanted} samples: "
                f"it cannot be cut by sample along its first dimension{_hint(sized, wanted)}; {MEND}"
            )


def _hint(sized: Sequence[Field], wanted: int) -> str:
    if all(len(field.shape) > 1 and field.shape[1] == wanted for field in sized):
        return " (every tensor has that many along dimension 1, as in a layout with time first)"
    return ""


def _check_plain_values(batch: Batch, wanted: int) -> None:
    for path, node in pytree.tree_flatten_with_path(batch, is_leaf=_holds_plain_values)[0]:
        if _holds_plain_values(node) and len(node) == wanted > 1:
            raise BatchError(
                f"batch{pytree.keystr(path)} is a {type(node).__name__} of {wanted} plain values in a batch of "
                f"{wanted} samples: whether it is one value per sample is not clear; make it a tensor if it is, "
                "leave it out if it is not, or give parallelize(..., data=) a DataLoader"
            )


def _holds_plain_values(node: Any) -> bool:
    return isinstance(node, list | tuple) and not any(isinstance(leaf, Tensor) for leaf in pytree.tree_leaves(node))


def _cut(signature: Signature, tensors: Sequence[Tensor], start: int, size: int) -> Batch:
    return signature.assemble([tensor.narrow(0, start, size) if tensor.dim() else tensor for tensor in tensors])
