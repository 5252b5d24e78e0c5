"""Load micro-batches in the user's way: their dataset, collate function and workers."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, final

import torch
from torch.utils.data import DataLoader, Dataset, Subset, get_worker_info

from shardwise.data.order import Index
from shardwise.data.randomness import mix, preserved, reseed
from shardwise.job import Batch


@final
@dataclass(frozen=True, slots=True)
class MicroBatch:
    """Samples to load together.

    first:  place in the epoch of the first of them
    """

    epoch: int
    first: int
    indices: list[Index]


@final
class MicroBatchLoader:
    """The user's DataLoader with micro-batches in place of its own batches: workers load and prefetch them, in order.

    seed, data_rank:  with the epoch, they seed the workers: what a `worker_init_fn` draws differs between data ranks
    """

    def __init__(self, loader: DataLoader[Any], seed: int, data_rank: int) -> None:
        self._seed, self._data_rank = seed, data_rank
        self._wanted = _Wanted()
        self._generator = torch.Generator()
        dataset = _ByMicroBatch(loader.dataset, loader.collate_fn, seed)
        self._loader = DataLoader(
            dataset,
            sampler=self._wanted,
            generator=self._generator,
            persistent_workers=loader.persistent_workers,
            **as_configured(loader),
        )

    def load(self, wanted: Iterator[MicroBatch], epoch: int) -> Iterator[Batch]:
        """The batches of `wanted`, which is drawn ahead as far as the workers prefetch."""
        self._wanted.micro_batches = wanted
        self._generator.manual_seed(mix("worker", self._seed, epoch, self._data_rank))
        return iter(self._loader)


def as_configured(loader: DataLoader[Any]) -> dict[str, Any]:
    """The arguments of a DataLoader that yields what its dataset returns, loaded as `loader` is configured to."""
    return {
        "batch_size": None,
        "collate_fn": _unchanged,
        "num_workers": loader.num_workers,
        "prefetch_factor": loader.prefetch_factor,
        "multiprocessing_context": loader.multiprocessing_context,
        "worker_init_fn": _StartWorker(loader.worker_init_fn),
        "timeout": loader.timeout,
        "pin_memory": loader.pin_memory,
    }


def fetch(dataset: Any, indices: list[Index], seeds: Sequence[int]) -> list[Any]:
    """The samples at `indices`, which are some, with the global generators seeded before each.

    A dataset that fetches many at once draws for all of them after the first seed.
    """
    if _fetches_many(dataset):
        reseed(seeds[0])
        return list(dataset.__getitems__(indices))
    samples = []
    for index, number in zip(indices, seeds, strict=True):
        reseed(number)
        samples.append(dataset[index])
    return samples


def _fetches_many(dataset: Any) -> bool:
    while type(dataset) is Subset:  # it has __getitems__ in any case, and passes it on to a dataset that has it too
        dataset = dataset.dataset
    return callable(getattr(dataset, "__getitems__", None))


@final
class _Wanted(Iterable[MicroBatch]):
    """What to load next, each time it is iterated: a DataLoader keeps its sampler for life, and its workers with it."""

    micro_batches: Iterator[MicroBatch] = iter(())

    def __iter__(self) -> Iterator[MicroBatch]:
        return self.micro_batches


@final
@dataclass(frozen=True, eq=False)
class _ByMicroBatch(Dataset[Batch]):
    """The user's dataset, indexed by micro-batch."""

    dataset: Any
    collate: Callable[[list[Any]], Batch]
    seed: int

    def __getitem__(self, wanted: MicroBatch) -> Batch:
        places = range(wanted.first, wanted.first + len(wanted.indices))
        seeds = [mix("sample", self.seed, wanted.epoch, place) for place in places]
        with preserved():
            samples = fetch(self.dataset, wanted.indices, seeds)
            reseed(mix("collate", self.seed, wanted.epoch, wanted.first))
            return self.collate(samples)


@final
@dataclass(frozen=True, slots=True)
class _StartWorker:
    """The user's `worker_init_fn`, which expects to find the user's dataset in `get_worker_info()`."""

    initialize: Callable[[int], None] | None

    def __call__(self, worker: int) -> None:
        info: Any = get_worker_info()
        assert info is not None, "torch calls this in workers only"
        object.__setattr__(info, "dataset", info.dataset.dataset)  # a frozen record, and torch has no door to it
        if self.initialize is not None:
            self.initialize(worker)


def _unchanged(batch: Batch) -> Batch:
    return batch
