"""A plan: who runs what, as a frozen value that can be printed, saved, edited and compared."""

import math
from dataclasses import dataclass
from typing import Literal, TypeAlias, final

from shardwise.errors import PlanError
from shardwise.job import Precision

ScheduleName: TypeAlias = Literal["gpipe", "1f1b", "interleaved-1f1b"]
ShardMode: TypeAlias = Literal["gathered", "regathered"]
Weighting: TypeAlias = Literal["declared", "rewritten", "checked", "samples", "unchecked"]


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """Consecutive segments that one rank of the pipeline runs.

    begins:         the cut before it, by name, such as "before h.11"; "" for the first
    ends:           the last module in it, for people
    rank:           of the pipeline
    recompute:      which of its segments, counted from 0, run their forward pass again in the backward pass
    flops:          forward and backward of one micro-batch
    memory_bytes:   parameters, gradients, optimizer state and activations in flight
    bytes_sent:     to later stages, for one micro-batch
    """

    begins: str
    ends: str
    rank: int
    recompute: tuple[int, ...] = ()
    flops: int
    memory_bytes: int
    bytes_sent: int


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Alternative:
    """A plan that was not chosen, and why."""

    name: str
    reason: str


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """How a job runs on `devices` ranks.

    The mesh is pipeline x replicas x shards, shards innermost: rank = (pipeline * replicas + replica) * shards + shard.
    Each (replica, shard) pair is one *data rank*, with its own share of the samples; the shards of a replica hold one
    copy of the parameters between them.

    stages:         one: the user's module as it is; more: pieces of the captured graph
    micro_batches:  of each data rank in a step
    shard_mode:     with shards: parameters stay gathered for the step, or are gathered each time they are used
    recompute:      with one stage: whether blocks run their forward pass again in the backward pass
    weighting:      how micro-batches are weighed: as the loss declares; rewritten to (sum, weight); by samples,
                    which is checked on each batch where labels could be ignored, or needs no check;
                    or by samples without being sure that this is right
    sample_weight:  what a sample weighs, as far as the example tells: gradients are made as the mean over samples of
                    this weight, and corrected by what the samples of the step really weigh
    fingerprint:    of the graph that was cut, "" with one stage where nothing was captured
    notes:          what the user should know: what couples samples, why the model is not cut
    alternatives:   plans that were tried before or after this one
    step_seconds:   predicted for one step; None where nothing was captured, so that nothing could be predicted
    """

    cluster: str
    devices: int
    replicas: int
    shards: int = 1
    stages: tuple[Stage, ...]
    schedule: ScheduleName
    micro_batches: int
    shard_mode: ShardMode = "gathered"
    recompute: bool = False
    precision: Precision
    batch_size: int
    weighting: Weighting
    sample_weight: float = 1.0
    fingerprint: str
    notes: tuple[str, ...] = ()
    alternatives: tuple[Alternative, ...] = ()
    step_seconds: float | None = None

    def __post_init__(self) -> None:
        _check_counts(self)
        _check_stages(self)
        ranks = self.pipeline_ranks
        if self.devices != ranks * self.replicas * self.shards:
            raise PlanError(
                f"the plan is for {self.devices} devices, but {ranks} pipeline ranks x {self.replicas} replicas x "
                f"{self.shards} shards are {ranks * self.replicas * self.shards}"
            )
        smallest = self.data_ranks * self.micro_batches
        if self.batch_size < smallest:
            raise PlanError(
                f"batch_size {self.batch_size} is smaller than {self.data_ranks} data ranks x {self.micro_batches} "
                f"micro-batches = {smallest}; raise batch_size, or plan with fewer micro-batches or replicas"
            )

    @property
    def pipeline_ranks(self) -> int:
        return max(stage.rank for stage in self.stages) + 1

    @property
    def data_ranks(self) -> int:
        return self.replicas * self.shards

    @property
    def placement(self) -> tuple[int, ...]:
        """The pipeline rank of each stage."""
        return tuple(stage.rank for stage in self.stages)

    def micro_batch_sizes(self) -> list[list[int]]:
        """Samples of each micro-batch of each data rank: 8 samples on one data rank in 3 are [[3, 3, 2]]."""
        return share_out(self.batch_size, self.data_ranks, self.micro_batches)


def _check_counts(plan: Plan) -> None:
    for name in ("devices", "replicas", "shards", "micro_batches", "batch_size"):
        if getattr(plan, name) < 1:
            raise PlanError(f"{name} is {getattr(plan, name)}; a plan has one or more")
    if not 0 < plan.sample_weight < math.inf:
        raise PlanError(f"sample_weight is {plan.sample_weight}; it is a number above zero, 1 where nothing is known")
    for number, stage in enumerate(plan.stages):
        least = min(stage.flops, stage.memory_bytes, stage.bytes_sent, *stage.recompute, 0)
        if least < 0:
            raise PlanError(f"stage {number} has a number below zero, {least}; none of its numbers can be")


def _check_stages(plan: Plan) -> None:
    """Stages go round the ranks of the pipeline, as the schedules run them."""
    if not plan.stages:
        raise PlanError("the plan has no stages; one that runs the whole model has one")
    ranks = plan.pipeline_ranks
    if plan.placement != tuple(stage % ranks for stage in range(len(plan.stages))) or len(plan.stages) % ranks:
        raise PlanError(
            f"the stages are on ranks {list(plan.placement)}; put stage s on rank s % {ranks}, equally many on each"
        )
    for number, stage in enumerate(plan.stages):
        if bool(stage.begins) != bool(number):
            raise PlanError(
                f'stage {number} begins {stage.begins!r}; the first stage begins at "", the others at a named cut'
            )
    interleaved = len(plan.stages) > ranks
    if interleaved != (plan.schedule == "interleaved-1f1b"):
        raise PlanError(
            f"the schedule is {plan.schedule} with {len(plan.stages)} stages on {ranks} pipeline ranks; interleaving "
            "has two or more stages a rank, the other schedules have one"
        )


def share_out(samples: int, data_ranks: int, micro_batches: int) -> list[list[int]]:
    """Share `samples` out in order, as evenly as can be, over data ranks and then micro-batches.

    A smaller batch may leave the last micro-batches of a data rank empty.
    """
    return [_even(part, micro_batches) for part in _even(samples, data_ranks)]


def _even(total: int, parts: int) -> list[int]:
    share, rest = divmod(total, parts)
    return [share + (part < rest) for part in range(parts)]
