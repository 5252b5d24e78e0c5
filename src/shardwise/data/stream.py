"""Steps out of an iterable dataset: every rank reads the whole stream and keeps what is its own."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias, final

import torch
from torch.utils.data import DataLoader, IterableDataset

from shardwise.data.loading import as_configured
from shardwise.data.part import Part
from shardwise.data.position import Drawn, Position
from shardwise.data.randomness import mix, preserved, reseed
from shardwise.data.samplers import generator_states, rewind, set_epoch
from shardwise.errors import CheckpointError
from shardwise.job import Batch

_Loaded: TypeAlias = tuple[list[Batch], int]
"""This rank's micro-batches of a step, and the samples of the whole step."""


@final
@dataclass(frozen=True, slots=True)
class Stream:
    """The samples of an iterable dataset, in its order. A worker is started anew each epoch, to read from the start."""

    loader: DataLoader[Any]
    batch_size: int
    part: Part
    seed: int

    def open(self, position: Position) -> Iterator[Drawn]:
        """The steps of the epoch from `position` on; what lies before it is read and thrown away.

        raises:  CheckpointError where the stream ends before `position`, once it has been read so far
        """
        rewind(self.loader, position.generators)
        set_epoch([self.loader.dataset], position.epoch)
        steps = _Steps(
            self.loader.dataset,
            self.loader.collate_fn,
            self.loader.drop_last,
            self.batch_size,
            self.part,
            self.seed,
            position,
        )
        generator = torch.Generator().manual_seed(mix("worker", self.seed, position.epoch, self.part.data_rank))
        loaded: Iterator[_Loaded] = iter(DataLoader(steps, generator=generator, **as_configured(self.loader)))
        return (Drawn(list(batches), samples, 0) for batches, samples in loaded)

    def generators(self) -> tuple[str, ...]:
        return generator_states(self.loader)

    def rewind(self, generators: Sequence[str]) -> None:
        rewind(self.loader, generators)


@final
@dataclass(frozen=True, eq=False)
class _Steps(IterableDataset[_Loaded]):
    """The stream, cut into steps."""

    dataset: Any
    collate: Callable[[list[Any]], Batch]
    drop_last: bool
    batch_size: int
    part: Part
    seed: int
    position: Position

    def __iter__(self) -> Iterator[_Loaded]:
        with preserved():
            reseed(mix("order", self.seed, self.position.epoch, 0))
            stream = iter(self.dataset)
        self._skip(stream)
        first = self.position.consumed
        while samples := self._take(stream, first, self.batch_size):
            if len(samples) == self.batch_size or not self.drop_last:
                yield self._own(samples, first), len(samples)
            first += len(samples)

    def _skip(self, stream: Iterator[Any]) -> None:
        behind = 0
        while behind < self.position.consumed:
            found = len(self._take(stream, behind, min(self.batch_size, self.position.consumed - behind)))
            if not found:
                raise CheckpointError(
                    f"{self.position.consumed} samples of epoch {self.position.epoch} were consumed, but the stream "
                    f"now ends after {behind}; resume with the data the state was saved with"
                )
            behind += found

    def _take(self, stream: Iterator[Any], first: int, count: int) -> list[Any]:
        """The next samples, `count` or as many as there are; `first` is the place of the first one."""
        samples: list[Any] = []
        with preserved():
            for place in range(first, first + count):
                reseed(mix("sample", self.seed, self.position.epoch, place))
                try:
                    samples.append(next(stream))
                except StopIteration:
                    break
        return samples

    def _own(self, samples: list[Any], first: int) -> list[Batch]:
        batches = []
        with preserved():
            for places in self.part.ranges(len(samples)):
                reseed(mix("collate", self.seed, self.position.epoch, first + places.start))
                batches.append(self.collate(samples[places.start : places.stop]))
        return batches
