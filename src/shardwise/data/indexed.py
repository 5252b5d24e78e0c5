"""Steps out of a dataset that is read by index."""

from collections.abc import Iterator, Sequence
from itertools import tee
from typing import Any, final

from torch.utils.data import DataLoader

from shardwise.data.loading import MicroBatch, MicroBatchLoader
from shardwise.data.order import GlobalBatch, global_batches
from shardwise.data.part import Part
from shardwise.data.position import Drawn, Position
from shardwise.data.samplers import generator_states, rewind


@final
class Indexed:
    """The order is drawn on every rank; the samples are loaded where they are used."""

    def __init__(self, loader: DataLoader[Any], batch_size: int, part: Part, seed: int) -> None:
        self._loader, self._batch_size, self._part, self._seed = loader, batch_size, part, seed
        # Persistent workers wait here between epochs. They are not used again after an epoch that broke off: with one
        # that has died, torch fails in every epoch to come.
        self._idle: MicroBatchLoader | None = None

    def open(self, position: Position) -> Iterator[Drawn]:
        """The steps of the epoch from `position` on.

        raises:  CheckpointError where the order or the generators are not those of `position`
        """
        rewind(self._loader, position.generators)
        steps = global_batches(self._loader, self._batch_size, self._seed, position)
        return self._load(steps, position.epoch) if self._part.loads else _count(steps)

    def generators(self) -> tuple[str, ...]:
        return generator_states(self._loader)

    def rewind(self, generators: Sequence[str]) -> None:
        rewind(self._loader, generators)

    def _load(self, steps: Iterator[GlobalBatch], epoch: int) -> Iterator[Drawn]:
        # Workers draw the order ahead of the steps; `tee` holds what lies between.
        steps, ahead = tee(steps)
        wanted = (micro_batch for step in ahead for micro_batch in self._micro_batches(step, epoch))
        loader = self._idle or MicroBatchLoader(self._loader, self._seed, self._part.data_rank)
        self._idle = None
        loaded = loader.load(wanted, epoch)
        for step in steps:
            samples = len(step.indices)
            yield Drawn([next(loaded) for _ in self._part.ranges(samples)], samples, step.fingerprint)
        self._idle = loader

    def _micro_batches(self, step: GlobalBatch, epoch: int) -> Iterator[MicroBatch]:
        for places in self._part.ranges(len(step.indices)):
            yield MicroBatch(epoch, step.first + places.start, step.indices[places.start : places.stop])


def _count(steps: Iterator[GlobalBatch]) -> Iterator[Drawn]:
    for step in steps:
        yield Drawn([], len(step.indices), step.fingerprint)
