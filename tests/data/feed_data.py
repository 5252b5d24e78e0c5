"""Datasets whose samples say which they are, and ways to read a feed on every data rank at once."""

import random
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset

from shardwise.data import Feed, FeedStep


def evenly(samples: int, data_ranks: int, micro_batches: int) -> list[list[int]]:
    """As even as can be over data ranks, then over micro-batches, the larger ones first."""

    def split(total: int, parts: int) -> list[int]:
        return [total // parts + (part < total % parts) for part in range(parts)]

    return [split(part, micro_batches) for part in split(samples, data_ranks)]


class Numbers(Dataset):
    """Sample i is the number i; `loaded` lists what was asked for in this process."""

    def __init__(self, length: int) -> None:
        self.length = length
        self.loaded: list[int] = []

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> torch.Tensor:
        self.loaded.append(index)
        return torch.tensor(index)


class Augmented(Numbers):
    """Sample i is i and one draw from each of the three global generators."""

    def __getitem__(self, index: int) -> torch.Tensor:
        drawn = [float(torch.rand(())), random.random(), float(np.random.rand())]
        return torch.tensor([index, *drawn], dtype=torch.float64)


class Counting(IterableDataset):
    """The numbers from 0, without a length."""

    def __init__(self, length: int) -> None:
        self.length = length

    def __iter__(self) -> Iterator[torch.Tensor]:
        for number in range(self.length):
            yield torch.tensor(number)


class AugmentedStream(IterableDataset):
    """The samples of `Augmented`, one after the other."""

    def __init__(self, length: int) -> None:
        self.samples = Augmented(length)

    def __iter__(self) -> Iterator[torch.Tensor]:
        return (self.samples[index] for index in range(len(self.samples)))


def packed(samples: list[torch.Tensor]) -> dict[str, torch.Tensor]:
    """Sample i as i % 3 + 1 values in one flat tensor, with offsets: not to be cut afterwards."""
    lengths = torch.tensor([int(sample) % 3 + 1 for sample in samples])
    values = torch.cat([sample.expand(int(length)) for sample, length in zip(samples, lengths, strict=True)])
    return {"values": values, "offsets": torch.cat([torch.zeros(1, dtype=torch.long), lengths.cumsum(0)])}


def shared(loader: Any, *, ranks: int = 2, micro_batches: int = 3, batch_size: int = 4, seed: int = 0) -> list[Feed]:
    """One feed for each data rank. `loader` makes the data anew, as each process would."""
    share = partial(evenly, data_ranks=ranks, micro_batches=micro_batches)
    return [
        Feed(loader(), batch_size=batch_size, share=share, data_rank=rank, loads=True, seed=seed)
        for rank in range(ranks)
    ]


def steps(feeds: list[Feed], count: int) -> list[list[FeedStep]]:
    """The next `count` steps, each as one `FeedStep` per data rank."""
    return [[next(feed) for feed in feeds] for _ in range(count)]


def ids(step: list[FeedStep]) -> list[int]:
    """The samples of one step of `Numbers`, over all data ranks in order."""
    return [int(sample) for part in step for batch in part.batches or [] for sample in batch]


def one_device(loader: DataLoader, epochs: int) -> list[list[int]]:
    """The batches of an ordinary loop."""
    return [batch.tolist() for _ in range(epochs) for batch in loader]


def numbers_loader(length: int = 13, **options: Any) -> Callable[[], DataLoader]:
    """Makes a shuffled loader of `Numbers`, whose generator starts from seed 5 each time."""

    def make() -> DataLoader:
        generator = torch.Generator().manual_seed(5)
        return DataLoader(Numbers(length), batch_size=4, shuffle=True, generator=generator, **options)

    return make
