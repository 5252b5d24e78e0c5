"""The ways of sharing out a model that the exactness tests know, and the plans that they lead to."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import accumulate, combinations, pairwise
from typing import Any, final

import torch

import cases
import zoo
from shardwise.cluster import parse_cluster
from shardwise.cost import Analytic
from shardwise.graph import Chain
from shardwise.job import Job, NamedParameters
from shardwise.plan import Plan
from shardwise.plan.asked import Asked
from shardwise.plan.make import choose
from shardwise.plan.sketch import Sketch, sketch_job
from workers import surprises
from zoo import Case

BATCH_SIZE = 8
SEED = 3
CASES: Mapping[str, Case] = {**zoo.CASES, **cases.CASES, **surprises.CASES}


@final
@dataclass(frozen=True, kw_only=True)
class Layout:
    """A mesh with a schedule.

    asked:   what `make_plan` is asked for
    even:    micro-batches of a data rank that share out its part of 8 samples evenly
    ragged:  and not: 3, 3, 2 of 8 samples and 2, 1, 1 of 4
    """

    name: str
    devices: int
    asked: Mapping[str, Any]
    even: int
    ragged: int = 3

    @property
    def stages(self) -> int:
        return self.asked.get("pipeline", 1) * self.asked.get("stages_per_rank", 1)


LAYOUTS: Mapping[str, Layout] = {
    layout.name: layout
    for layout in (
        Layout(name="2 replicas", devices=2, asked={"replicas": 2}, even=2),
        Layout(name="FSDP2 x2", devices=2, asked={"shards": 2}, even=2),
        Layout(name="1F1B x2", devices=2, asked={"pipeline": 2, "schedule": "1f1b"}, even=4),
        Layout(name="GPipe x3", devices=3, asked={"pipeline": 3, "schedule": "gpipe"}, even=4),
        Layout(name="interleaved 2x2", devices=2, asked={"pipeline": 2, "stages_per_rank": 2}, even=4),
        Layout(name="2x2 pipeline x replicas", devices=4, asked={"pipeline": 2, "replicas": 2}, even=2),
    )
}


def plan_of(case: str, *, devices: int, clip_grad_norm: float | None = None, **asked: Any) -> Plan:
    """As `make_plan`, but each case is read only once.

    raises:  PlanError where it cannot be planned so
    """
    job = job_of(CASES[case], clip_grad_norm)
    return choose(job, parse_cluster(f"{devices}x cpu"), sketch_of(case), Asked(**asked), Analytic(job.precision))


@cache
def sketch_of(case: str) -> Sketch:
    CASES[case].before_step(0)
    return sketch_job(job_of(CASES[case]), CASES[case].batch(BATCH_SIZE, 0))


def job_of(case: Case, clip_grad_norm: float | None = None) -> Job:
    return Job(
        model=case.model,
        loss=case.loss,
        optimizer=adamw,
        batch_size=BATCH_SIZE,
        clip_grad_norm=clip_grad_norm,
        seed=SEED,
    )


def adamw(named: NamedParameters) -> torch.optim.Optimizer:
    return torch.optim.AdamW(named, lr=1e-2)


def cuts_by_flops(case: str, stages: int) -> tuple[str, ...]:
    """Names of the cuts that give the smallest stage as many FLOPs as can be."""
    chain = sketch_of(case).graph
    assert isinstance(chain, Chain)
    done = [0, *accumulate(op.flops_forward + op.flops_backward for op in chain.graph.ops)]

    def smallest(chosen: Sequence[str]) -> int:
        bounds = [0, *(chain.cuts[name] for name in chosen), len(chain.graph.ops)]
        return min(done[end] - done[start] for start, end in pairwise(bounds))

    return max(combinations(sorted(chain.cuts, key=chain.cuts.__getitem__), stages - 1), key=smallest)


TWO_REPLICAS: Mapping[str, Any] = {"devices": 2, "replicas": 2, "micro_batches": 2}
TWO_SHARDS: Mapping[str, Any] = {"devices": 2, "shards": 2, "micro_batches": 2}
TWO_STAGES: Mapping[str, Any] = {"devices": 2, "pipeline": 2, "micro_batches": 3}


def smallest_stage(plan: Plan) -> float:
    """The share of the FLOPs that the smallest stage has, from 0 to 1."""
    flops = [stage.flops for stage in plan.stages]
    return min(flops) / sum(flops) if len(flops) > 1 else 1.0
