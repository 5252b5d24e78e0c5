"""What the ranks of a pipeline must agree on before a step: which graph each micro-batch runs through, and its sizes.

Only the rank that loads sees the batch. It sends one short row of numbers. Where there are new kinds of batch, it sends
their signatures, and the row again when each rank has made their graphs.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, final

import torch
from torch import Tensor
from torch import distributed as dist

from shardwise.errors import CaptureError, LossError
from shardwise.graph import Signature, Sizes, read
from shardwise.job import Batch
from shardwise.runtime.mesh import Mesh
from shardwise.runtime.variants import Variant, Variants


@final
@dataclass(frozen=True)
class Agreed:
    """Of each micro-batch: its graph, its sizes and, on the rank that loads, its fields."""

    graphs: Sequence[Variant]
    sizes: Sequence[Sizes]
    fields: Sequence[Sequence[Tensor]]


def agree(variants: Variants, mesh: Mesh, batches: Sequence[Batch] | None, count: int, step: int) -> Agreed:
    """Find or make the graph of each micro-batch. Every rank of the pipeline calls it; `batches` on the one that loads.

    raises:  CaptureError, on every rank, where a graph cannot be made; where Python numbers differ, on the ranks that
             differ from the one that loads;
             LossError where a batch has labels that make samples the wrong weight
    """
    variants.refresh(step)
    source = mesh.pipeline_ranks[mesh.plan.placement[0]]
    here = [read(batch) for batch in batches or ()]
    chosen, new = _choose(variants, here)
    digest = _digest(variants)
    row = _shared(_Row(len(new), digest, *_checked(variants, here, chosen)), variants, mesh, source, count)
    if row.digest != digest:
        raise CaptureError(
            f"step {step}: the Python numbers that the loss reads differ between ranks; compute them alike everywhere, "
            "or pass them in the batch"
        )
    if row.new:
        signatures: list[Any] = new if new else [None] * row.new
        if mesh.pipeline is not None:
            dist.broadcast_object_list(signatures, src=source, group=mesh.pipeline)
        for signature in signatures:
            variants.add(signature)
        chosen = [_found(variants.find(*each)) for each in here]
        row = _shared(_Row(0, digest, *_checked(variants, here, chosen)), variants, mesh, source, count)
    graphs = [variants.known[at] for at in row.chosen]
    if row.faulty:
        faults = [graph.fault(tensors) for graph, (_, tensors) in zip(graphs, here, strict=False)]
        raise LossError(
            f"step {step}: {next(filter(None, faults), f'rank {source} found a batch that it cannot weigh')}"
        )
    numbers = iter(row.sizes)
    sizes = [tuple(tuple(next(numbers) for _ in range(rank)) for rank in graph.ranks) for graph in graphs]
    return Agreed(graphs, sizes, [tensors for _, tensors in here])


@final
@dataclass(frozen=True, slots=True)
class _Row:
    """What the rank that loads sends.

    new:     how many kinds of batch have no graph yet; if any, what follows is incomplete
    digest:  of the Python numbers that the loss reads
    faulty:  whether a batch has labels that make samples the wrong weight
    chosen:  the graph of each micro-batch, by number; -1 where there is none yet
    sizes:   of all dimensions of all fields of all micro-batches, in order
    """

    new: int
    digest: int
    faulty: bool
    chosen: Sequence[int]
    sizes: Sequence[int]


def _checked(
    variants: Variants, here: Sequence[tuple[Signature, list[Tensor]]], chosen: Sequence[int]
) -> tuple[bool, Sequence[int], Sequence[int]]:
    """What a row says of the micro-batches: whether one is faulty, their graphs, and their sizes."""
    if -1 in chosen:
        return False, chosen, []
    faulty = any(variants.known[at].fault(tensors) for at, (_, tensors) in zip(chosen, here, strict=True))
    return faulty, chosen, [size for _, tensors in here for tensor in tensors for size in tensor.shape]


def _choose(variants: Variants, here: Sequence[tuple[Signature, list[Tensor]]]) -> tuple[list[int], list[Signature]]:
    """The variant of each micro-batch, -1 where there is none yet, and the signatures to make one for."""
    chosen: list[int] = []
    new: dict[object, Signature] = {}
    for signature, tensors in here:
        found = variants.find(signature, tensors)
        if found is None:
            new.setdefault((signature.frozen, signature.sizes), signature)
        chosen.append(-1 if found is None else found)
    return chosen, list(new.values())


def _found(place: int | None) -> int:
    assert place is not None, "a variant that was made for a batch accepts it"
    return place


def _shared(row: _Row, variants: Variants, mesh: Mesh, source: int, count: int) -> _Row:
    """The row of the rank `source`, on every rank of its pipeline; of one length, whatever it says."""
    if mesh.pipeline is None:
        return row
    numbers = torch.zeros(3 + count * (1 + variants.most_sizes), dtype=torch.int64)
    if mesh.rank == source:
        flat = [row.new, row.digest, row.faulty, *row.chosen, *row.sizes]
        numbers[: len(flat)] = torch.tensor(flat)
    numbers = numbers.to(mesh.device)
    dist.broadcast(numbers, src=source, group=mesh.pipeline)
    new, digest, faulty, *rest = numbers.tolist()
    return _Row(new, digest, bool(faulty), rest[:count], rest[count:])


def _digest(variants: Variants) -> int:
    text = repr(sorted(variants.frozen.items()))
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=7).digest(), "little")
