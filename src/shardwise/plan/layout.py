"""One way to run a job on a mesh: what planning chooses between."""

from dataclasses import dataclass
from typing import final

from shardwise.plan.mesh import Mesh
from shardwise.plan.plan import ScheduleName, ShardMode, Stage
from shardwise.plan.sections import Section, bytes_sent
from shardwise.plan.sketch import Sketch
from shardwise.schedule import Links, Schedule
from shardwise.schedule.orders import training_schedule


@final
@dataclass(frozen=True, kw_only=True)
class Layout:
    """Everything about a plan that memory and time depend on.

    sections:  the graph, cut into stages; () where nothing was captured, which is one stage
    samples:   of the largest micro-batch
    """

    mesh: Mesh
    sections: tuple[Section, ...]
    schedule: ScheduleName
    micro_batches: int
    samples: int
    shard_mode: ShardMode
    recompute: bool

    @property
    def stages(self) -> int:
        return len(self.sections) or 1

    @property
    def splits_the_batch(self) -> bool:
        return self.mesh.data_ranks * self.micro_batches > 1

    def rank_of(self, stage: int) -> int:
        return stage % self.mesh.pipeline

    def stages_of(self, rank: int) -> range:
        return range(rank, self.stages, self.mesh.pipeline)


def describe(layout: Layout, sketch: Sketch, memory_bytes: dict[int, int]) -> tuple[Stage, ...]:
    """The stages of a plan; `memory_bytes` is by stage."""
    if not layout.sections:
        return (Stage(begins="", ends="", rank=0, flops=0, memory_bytes=memory_bytes[0], bytes_sent=0),)
    scale = layout.samples / sketch.samples
    return tuple(
        Stage(
            begins=section.begins,
            ends=section.ends,
            rank=layout.rank_of(number),
            recompute=section.again if layout.recompute and layout.stages > 1 else (),
            flops=round(scale * section.flops),
            memory_bytes=memory_bytes[number],
            bytes_sent=round(scale * bytes_sent(layout.sections, number)),
        )
        for number, section in enumerate(layout.sections)
    )


def make_schedule(layout: Layout, links: Links, *, micro_batches: int) -> Schedule:
    return training_schedule(
        layout.schedule,
        stages=layout.stages,
        ranks=layout.mesh.pipeline,
        micro_batches=micro_batches,
        links=links,
    )
