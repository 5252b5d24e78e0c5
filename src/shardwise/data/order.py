"""Which samples each step takes: the user's sampler, cut into global batches."""

import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Any, TypeAlias, final

import torch
from torch.utils.data import DataLoader

from shardwise.data.position import Position
from shardwise.data.randomness import OwnGenerators, mix
from shardwise.data.samplers import samplers, set_epoch
from shardwise.errors import CheckpointError

Index: TypeAlias = Any
"""What a sampler yields and a dataset takes: mostly an integer."""


@final
@dataclass(frozen=True, slots=True)
class GlobalBatch:
    """The samples of one step.

    first:        place in the epoch of the first of them
    fingerprint:  checksum of the indices of the epoch up to the last of them
    """

    first: int
    indices: list[Index]
    fingerprint: int


def global_batches(loader: DataLoader[Any], batch_size: int, seed: int, position: Position) -> Iterator[GlobalBatch]:
    """The steps of the epoch from `position` on; a custom batch sampler decides their sizes, else `batch_size` does.

    The sampler advances as the result is iterated, and is drawn to its end, as a DataLoader would.

    raises:  CheckpointError where the samples before `position` are not those that were consumed
    """
    set_epoch(samplers(loader), position.epoch)
    _draw_as_a_loader_does(loader, position.epoch)
    own = OwnGenerators(mix("order", seed, position.epoch, 0))
    if loader.batch_size is None:
        lists = _by_batch_sampler(loader, position.consumed)
    else:
        lists = _by_sampler(loader, batch_size, position.consumed)
    with own.entered():
        behind = next(lists)
    _check(behind, position)
    return _fingerprinted(lists, own, position)


def _draw_as_a_loader_does(loader: DataLoader[Any], epoch: int) -> None:
    """Make the draw by which a DataLoader seeds its workers, so that its generator then gives the order it would."""
    workers_stay = loader.persistent_workers and loader.num_workers > 0
    if loader.generator is not None and (epoch == 0 or not workers_stay):
        torch.empty((), dtype=torch.int64).random_(generator=loader.generator)


def _by_sampler(loader: DataLoader[Any], batch_size: int, skip: int) -> Iterator[list[Index]]:
    """The first `skip` indices as one list, then lists of `batch_size`."""
    indices = iter(loader.sampler)
    yield list(islice(indices, skip))
    while batch := list(islice(indices, batch_size)):
        if len(batch) == batch_size or not loader.drop_last:
            yield batch


def _by_batch_sampler(loader: DataLoader[Any], skip: int) -> Iterator[list[Index]]:
    """The first `skip` indices as one list, the rest of the list in which they end, then the sampler's own lists."""
    behind: list[Index] = []
    lists = filter(None, map(list, loader.batch_sampler or ()))
    while len(behind) < skip and (batch := next(lists, None)) is not None:
        behind += batch
    yield behind[:skip]
    if behind[skip:]:
        yield behind[skip:]
    yield from lists


def _check(behind: list[Index], position: Position) -> None:
    if len(behind) < position.consumed:
        raise CheckpointError(
            f"{position.consumed} samples of epoch {position.epoch} were consumed, but the sampler now gives only "
            f"{len(behind)}; resume with the data the state was saved with"
        )
    if checksum(behind, 0) != position.fingerprint:
        raise CheckpointError(
            f"the sampler now gives other samples for the first {position.consumed} of epoch {position.epoch} than "
            "were consumed; let it draw from torch's global generator or from a torch.Generator that it holds, or "
            "give it set_epoch(epoch), and resume with the same data and seed"
        )


def _fingerprinted(lists: Iterator[list[Index]], own: OwnGenerators, position: Position) -> Iterator[GlobalBatch]:
    first, fingerprint = position.consumed, position.fingerprint
    while True:
        with own.entered():
            indices = next(lists, None)
        if indices is None:
            return
        fingerprint = checksum(indices, fingerprint)
        yield GlobalBatch(first, indices, fingerprint)
        first += len(indices)


def checksum(indices: list[Index], before: int) -> int:
    """CRC-32 of the indices as text, going on from `before`: the same however they are cut into lists."""
    return zlib.crc32("".join(f"{index}," for index in indices).encode(), before)
