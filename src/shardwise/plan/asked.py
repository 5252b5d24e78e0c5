"""What the caller of `make_plan` has fixed."""

from dataclasses import dataclass
from typing import final

from shardwise.errors import PlanError
from shardwise.plan.plan import ScheduleName, ShardMode


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """The arguments of `make_plan`; None is left to the planner.

    raises:  PlanError where they contradict each other
    """

    pipeline: int | None = None
    replicas: int | None = None
    shards: int | None = None
    shard_mode: ShardMode | None = None
    schedule: ScheduleName | None = None
    micro_batches: int | None = None
    stages_per_rank: int = 1
    cuts: tuple[str, ...] | None = None
    recompute: bool | None = None

    def __post_init__(self) -> None:
        if self.stages_per_rank < 1:
            raise PlanError(f"stages_per_rank is {self.stages_per_rank}; give 1 or more")
        if self.micro_batches is not None and self.micro_batches < 1:
            raise PlanError(f"micro_batches is {self.micro_batches}; give 1 or more, or leave it out")
        if self.cuts is not None and (len(self.cuts) + 1) % self.stages_per_rank:
            raise PlanError(
                f"{len(self.cuts)} cuts make {len(self.cuts) + 1} stages, which {self.stages_per_rank} stages per rank "
                "do not divide"
            )
        if self.cuts is not None and self.pipeline not in (None, self.pipeline_ranks):
            raise PlanError(
                f"{len(self.cuts)} cuts make {len(self.cuts) + 1} stages, but pipeline is {self.pipeline} with "
                f"{self.stages_per_rank} stages per rank; leave pipeline out, or give "
                f"{(self.pipeline or 1) * self.stages_per_rank - 1} cuts"
            )
        interleaved = self.stages_per_rank > 1
        if self.schedule is not None and interleaved != (self.schedule == "interleaved-1f1b"):
            raise PlanError(
                f"schedule {self.schedule!r} with stages_per_rank={self.stages_per_rank}: interleaving has two or more "
                "stages per rank, the other schedules have one"
            )
        if interleaved and self.cuts is None and self.pipeline in (None, 1):
            raise PlanError(
                f"stages_per_rank={self.stages_per_rank} interleaves the ranks of a pipeline; give pipeline=2 or more"
            )

    @property
    def pipeline_ranks(self) -> int | None:
        """As given, or as the cuts imply."""
        return self.pipeline if self.cuts is None else (len(self.cuts) + 1) // self.stages_per_rank

    @property
    def schedule_name(self) -> ScheduleName:
        return self.schedule or ("interleaved-1f1b" if self.stages_per_rank > 1 else "1f1b")
