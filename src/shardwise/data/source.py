"""What data may be: a DataLoader, or a dataset that one can be made for."""

from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from typing import Any, TypeAlias

from torch.utils.data import DataLoader, Dataset, DistributedSampler, IterableDataset, SequentialSampler

from shardwise.data.loading import fetch
from shardwise.data.randomness import mix, preserved, reseed
from shardwise.data.samplers import samplers
from shardwise.errors import BatchError
from shardwise.job import Batch

Data: TypeAlias = DataLoader[Any] | Dataset[Any] | Sequence[Any]


def loader_of(data: Data) -> DataLoader[Any]:
    """`data`, or a DataLoader that reads it in its own order.

    raises:  TypeError where `data` is no data; BatchError for a DataLoader whose samples cannot be shared out
    """
    loader = data if isinstance(data, DataLoader) else _new_loader(data)
    _check_iteration(loader)
    _check_samplers(loader)
    if isinstance(loader.dataset, IterableDataset):
        _check_workers(loader)
    else:
        _check_length(loader)
    return loader


def example(data: Data) -> Batch:
    """The dataset's first two samples, collated; the sampler, its generators and the global ones stay as they are.

    raises:  BatchError where there are fewer than two
    """
    loader = loader_of(data)
    with preserved():
        samples = _first_two(loader.dataset)
        if len(samples) < 2:
            raise BatchError(
                f"an example needs two samples, but the dataset has {len(samples)}; give example= a batch of two"
            )
        return loader.collate_fn(samples)


def _new_loader(data: Any) -> DataLoader[Any]:
    indexable = hasattr(data, "__getitem__") and not isinstance(data, Mapping | str | bytes)
    if not indexable and not isinstance(data, IterableDataset):
        raise TypeError(
            f"data is a {type(data).__name__}; give a torch.utils.data.DataLoader, a Dataset, or a sequence of samples"
        )
    return DataLoader(data)


def _check_iteration(loader: DataLoader[Any]) -> None:
    name = type(loader).__name__
    if type(loader).__iter__ is not DataLoader.__iter__:
        raise BatchError(
            f"{name} iterates in its own way, which would be passed over since micro-batches are made of samples; "
            "give the plain torch.utils.data.DataLoader, with that way in its dataset, sampler or collate_fn"
        )
    if loader.batch_sampler is None:
        raise BatchError(
            f"{name}(batch_size=None) yields batches that its dataset has made, but micro-batches are made of samples; "
            "let the dataset return samples, or pass each batch to session.step(batch)"
        )


def _check_samplers(loader: DataLoader[Any]) -> None:
    for sampler in samplers(loader):
        if isinstance(sampler, DistributedSampler):
            raise BatchError(
                f"the DataLoader has a {type(sampler).__name__}, but the plan shares the samples out and would share "
                "out a share; leave the sampler out and say shuffle=True, or give one that yields all samples"
            )


def _check_workers(loader: DataLoader[Any]) -> None:
    if loader.num_workers > 1:
        raise BatchError(
            f"the DataLoader reads {type(loader.dataset).__name__}, an IterableDataset, with {loader.num_workers} "
            "workers, and each would read the whole stream; use num_workers=1, or a dataset that is read by index"
        )


def _check_length(loader: DataLoader[Any]) -> None:
    in_order = any(isinstance(sampler, SequentialSampler) for sampler in samplers(loader))
    if in_order and loader.batch_size is not None and not hasattr(loader.dataset, "__len__"):
        raise BatchError(
            f"{type(loader.dataset).__name__} has no length, so its last sample is not known; give it __len__, "
            "give the DataLoader a sampler, or derive it from IterableDataset"
        )


def _first_two(dataset: Any) -> list[Any]:
    if isinstance(dataset, IterableDataset):
        reseed(mix("order", 0, 0, 0))
        return list(islice(_new_pass(dataset), 2))
    places = range(min(2, len(dataset)) if hasattr(dataset, "__len__") else 2)
    return fetch(dataset, list(places), [mix("sample", 0, 0, place) for place in places])


def _new_pass(dataset: IterableDataset[Any]) -> Iterator[Any]:
    """An iterator that shares nothing with others over `dataset`."""
    first, second = iter(dataset), iter(dataset)
    if first is second:
        raise BatchError(
            f"{type(dataset).__name__} can be read only once, so an example would take samples from the run; "
            "give example= a batch of two samples"
        )
    return first
