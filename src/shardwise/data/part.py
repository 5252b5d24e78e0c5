"""Which samples of a step are this rank's."""

from collections.abc import Callable
from dataclasses import dataclass
from itertools import accumulate, chain
from typing import TypeAlias, final

ShareOut: TypeAlias = Callable[[int], list[list[int]]]
"""From the samples of a step to the sizes of the micro-batches of each data rank."""


@final
@dataclass(frozen=True, slots=True)
class Part:
    """What one rank loads of every step.

    share:      sizes per data rank and micro-batch; data ranks take their samples in order, one after the other
    data_rank:  whose micro-batches these are
    loads:      False on the ranks of a pipeline that get them from another rank
    """

    share: ShareOut
    data_rank: int
    loads: bool

    def sizes(self, samples: int) -> list[list[int]]:
        """Sizes of the micro-batches of all data ranks in a step of `samples`.

        raises:  ValueError where they do not add up, or where there is no such data rank
        """
        sizes = self.share(samples)
        if not 0 <= self.data_rank < len(sizes):
            raise ValueError(f"data_rank is {self.data_rank}, but the samples are shared out over {len(sizes)} ranks")
        if sum(chain.from_iterable(sizes)) != samples:
            raise ValueError(f"share({samples}) gave {sizes}, which is not {samples} samples together")
        return sizes

    def ranges(self, samples: int) -> list[range]:
        """Places in the step of the samples of each micro-batch to load; empty micro-batches are left out."""
        if not self.loads:
            return []
        sizes = self.sizes(samples)
        own = sizes[self.data_rank]
        starts = accumulate(own, initial=sum(chain.from_iterable(sizes[: self.data_rank])))
        return [range(start, start + size) for start, size in zip(starts, own, strict=False) if size]
