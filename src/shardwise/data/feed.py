"""The data of a run, step by step: this data rank's micro-batches, over epochs, from any place on."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, final

from torch.utils.data import IterableDataset

from shardwise.data.indexed import Indexed
from shardwise.data.part import Part, ShareOut
from shardwise.data.position import Drawn, Position, from_state
from shardwise.data.source import Data, loader_of
from shardwise.data.stream import Stream
from shardwise.errors import BatchError
from shardwise.job import Batch


@final
@dataclass(frozen=True, slots=True)
class FeedStep:
    """The data of one step.

    batches:  this data rank's micro-batches, the empty ones left out; None on a rank that does not load
    sizes:    of the micro-batches of each data rank, the empty ones too
    total:    samples of the global batch
    """

    batches: list[Batch] | None
    sizes: list[list[int]]
    total: int


@final
class Feed:
    """Steps without end: epoch after epoch of `data`, none of which reaches over into the next.

    data:        its dataset, sampler, collate_fn, workers and generator are used; a dataset alone is read in order
    batch_size:  samples of a step, over all data ranks; the last step of an epoch is smaller, or left out where the
                 DataLoader says `drop_last`. A custom batch sampler decides for itself: each of its lists is one step
    share:       how the samples of a step are shared out, such as `shardwise.plan.share_out` with the plan's numbers
    data_rank:   whose micro-batches to load
    loads:       False on the ranks of a pipeline that only count
    seed:        of the job: what samplers, datasets and collate functions draw follows from it

    The generators of the DataLoader and its samplers go on from where they are when the feed is made. Data that fails
    to load is asked for again by the next step.

    raises:  BatchError where `data` cannot be shared out
    """

    def __init__(self, data: Data, *, batch_size: int, share: ShareOut, data_rank: int, loads: bool, seed: int) -> None:
        self._part = Part(share, data_rank, loads)
        self._source = _source(data, batch_size, self._part, seed)
        self._position = Position(generators=self._source.generators())
        self._steps: Iterator[Drawn] | None = None

    def __iter__(self) -> "Feed":
        return self

    def __next__(self) -> FeedStep:
        """The next step.

        raises:  BatchError where a whole epoch has none
        """
        drawn = self._draw()
        if drawn is None:
            self._position = Position(self._position.epoch + 1, generators=self._source.generators())
            self._steps = None
            drawn = self._draw()
        if drawn is None:
            raise BatchError(
                f"epoch {self._position.epoch} of the data has not one step: its sampler or stream gives no sample, or "
                "fewer than a batch with drop_last=True; give more samples, a smaller batch_size, or a dataset that "
                "can be read again"
            )
        before = self._position
        self._position = Position(before.epoch, before.consumed + drawn.samples, drawn.fingerprint, before.generators)
        return _feed_step(drawn, self._part)

    def state(self) -> dict[str, Any]:
        """What steps have consumed, as JSON can hold it; what was only loaded ahead is not in it."""
        return self._position.to_state()

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on at the very next sample after `state`, also with other ranks, micro-batches, workers or batch size.

        Indices are skipped without loading their samples; a stream is read up to there.

        raises:  CheckpointError where the order of the data is not the one that `state` was saved with
        """
        position = from_state(state)
        self._steps = None
        self._steps = self._source.open(position)
        self._position = position

    @property
    def order_fingerprint(self) -> int:
        """Checksum of the indices consumed in this epoch, over all data ranks: equal on all ranks after equal steps.

        0 for a stream, whose samples have no index.
        """
        return self._position.fingerprint

    def _draw(self) -> Drawn | None:
        if self._steps is None:
            self._steps = self._source.open(self._position)
        try:
            return next(self._steps, None)
        except BaseException:
            # A generator that raised is at its end, which would pass for the end of the epoch.
            self._steps = None
            raise


def epoch_of(
    data: Data, *, batch_size: int, share: ShareOut, data_rank: int, loads: bool, seed: int = 0
) -> Iterator[FeedStep]:
    """One pass over `data`, as the first epoch of a `Feed`; afterwards, all generators are as they were before.

    raises:  BatchError where `data` cannot be shared out
    """
    part = Part(share, data_rank, loads)
    return _one_pass(_source(data, batch_size, part, seed), part)


class _Source(Protocol):
    """Data that can be read from any position on."""

    def open(self, position: Position) -> Iterator[Drawn]:
        """The steps of the epoch from `position` on."""

    def generators(self) -> tuple[str, ...]:
        """The states of the generators of loader and samplers."""

    def rewind(self, generators: Sequence[str]) -> None:
        """Set them."""


def _source(data: Data, batch_size: int, part: Part, seed: int) -> _Source:
    if batch_size < 1:
        raise ValueError(f"batch_size is {batch_size}; a step needs at least one sample")
    loader = loader_of(data)
    if isinstance(loader.dataset, IterableDataset):
        return Stream(loader, batch_size, part, seed)
    return Indexed(loader, batch_size, part, seed)


def _one_pass(source: _Source, part: Part) -> Iterator[FeedStep]:
    found = source.generators()
    try:
        for drawn in source.open(Position(generators=found)):
            yield _feed_step(drawn, part)
    finally:
        source.rewind(found)


def _feed_step(drawn: Drawn, part: Part) -> FeedStep:
    return FeedStep(drawn.batches if part.loads else None, part.sizes(drawn.samples), drawn.samples)
