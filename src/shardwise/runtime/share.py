"""One data rank's part of a global batch, filled up where its shards of the parameters are needed by others."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, final

from shardwise.errors import BatchError
from shardwise.job import Batch
from shardwise.plan import Plan, share_out


@final
@dataclass(frozen=True, slots=True)
class Share:
    """This data rank's part of a global batch.

    batches:  its micro-batches, on the device of the rank that loads; None on the other ranks of a pipeline
    samples:  of each of them, the empty ones left out
    first:    the number of the first one, over all data ranks
    total:    samples of the global batch
    """

    batches: Sequence[Batch] | None
    samples: Sequence[int]
    first: int
    total: int


@final
class Filler:
    """Lets every data rank of a plan with shards run as many micro-batches as the first, which has the most.

    A rank that runs none would not give the others its shards, and they would wait for ever. What it lacks are copies
    of its latest micro-batch; they count as 0 samples, and weigh nothing.
    """

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._latest: Sequence[Batch] | None = None
        self._all_had_samples = False

    def fill(self, share: Share) -> Share:
        """raises:  BatchError, on every rank, where one has no samples and never had any"""
        if self._plan.shards == 1:
            return share
        counts = [sum(size > 0 for size in part) for part in self._sizes(share.total)]
        if not self._all_had_samples and not min(counts):
            raise BatchError(
                f"a first batch of {share.total} samples leaves one of {len(counts)} data ranks without any, which "
                f"sharded parameters cannot run; begin with a batch of {len(counts)} samples or more"
            )
        self._all_had_samples = True
        self._latest = share.batches[-1:] if share.batches else self._latest
        lacking = max(counts) - len(share.samples)
        batches = None if share.batches is None else [*share.batches, *[*(self._latest or ())] * lacking]
        return replace(share, batches=batches, samples=[*share.samples, *[0] * lacking])

    def _sizes(self, total: int) -> list[list[int]]:
        return share_out(total, self._plan.data_ranks, self._plan.micro_batches)


def of_samples(results: Mapping[int, Any], share: Share) -> Mapping[int, Any]:
    """The results of micro-batches that have samples."""
    return {at: result for at, result in results.items() if share.samples[at]}
