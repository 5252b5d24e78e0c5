"""A model, its loss and its samples: all that a test of exactness needs to know about one kind of training."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Generator, Tensor, nn
from torch.utils.data import default_collate

from shardwise.job import Mean

LossValue: TypeAlias = Tensor | Mean | tuple[Tensor | Mean, dict[str, Any]]


def no_change(step: int) -> None:
    """What a loop does before a step where it does nothing."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """One kind of training, in float64 and small: 8 samples run forward and backward in well under 100 ms.

    model:        builds the module, with float64 parameters; called after `torch.manual_seed`
    loss:         `loss(model, batch)`: a scalar that is a mean over samples, a `Mean`, or either with metrics
    sample:       `sample(seed, index)`: the same on every call, in float64, int64 and plain values
    collate:      makes a batch of samples, as a DataLoader's `collate_fn` does
    couple:       a batch's loss is not the weighted mean of the losses of its parts
    random:       the loss draws random numbers
    idle:         names of the parameters whose gradient may be missing, or zero but for rounding
    before_step:  what the user's own loop does before the step of that number, counted from 0
    """

    name: str
    model: Callable[[], nn.Module]
    loss: Callable[[Any, Any], LossValue]
    sample: Callable[[int, int], Any]
    collate: Callable[[list[Any]], Any] = default_collate
    couple: bool = False
    random: bool = False
    idle: frozenset[str] = frozenset()
    before_step: Callable[[int], None] = no_change
    notes: str = ""

    def batch(self, samples: int, seed: int) -> Any:
        """The first `samples` samples of `seed`, collated."""
        return self.micro_batches([samples], seed)[0]

    def micro_batches(self, sizes: Sequence[int], seed: int) -> list[Any]:
        """The samples of `batch(sum(sizes), seed)`, in order, collated in groups of these `sizes`."""
        samples = [self.sample(seed, index) for index in range(sum(sizes))]
        starts = [sum(sizes[:group]) for group in range(len(sizes))]
        return [self.collate(samples[start : start + size]) for start, size in zip(starts, sizes, strict=True)]


def draw(seed: int, index: int) -> Generator:
    """The generator of one sample, so that a sample does not depend on the batch around it."""
    return torch.Generator().manual_seed(1_000_003 * seed + index)


def normal(generator: Generator, *shape: int) -> Tensor:
    """Standard normal numbers in float64."""
    return torch.randn(shape, generator=generator, dtype=torch.float64)


def integers(generator: Generator, below: int, *shape: int) -> Tensor:
    """Integers from 0 up to, not including, `below`."""
    return torch.randint(below, shape, generator=generator)


def by_name(*cases: Case) -> dict[str, Case]:
    """The `cases` under their names, each name once."""
    named = {case.name: case for case in cases}
    if len(named) < len(cases):
        raise ValueError(f"two cases share a name among {[case.name for case in cases]}; rename one")
    return named
