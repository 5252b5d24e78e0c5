"""The task of training a case by a plan, on one rank."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, final

import torch
from torch import Tensor
from torch import distributed as dist
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from shardwise.job import Job, NamedParameters
from shardwise.plan import Plan, share_out
from shardwise.runtime import Engine, Share
from shardwise.session.build import build_engine
from shardwise.session.group import Membership
from workers.layouts import BATCH_SIZE, CASES, job_of


@final
@dataclass(frozen=True, kw_only=True)
class Training:
    """A case, trained by a plan.

    batches:  samples of the global batch of each step
    seeds:    of the samples: step s has those of seed s, or data rank r in step s those of seed s + r
    """

    case: str
    plan: Plan
    clip_grad_norm: float | None = None
    batches: tuple[int, ...] = (BATCH_SIZE,) * 3
    seeds: Literal["by step", "by step and data rank"] = "by step"

    def shares(self, step: int) -> list[list[int]]:
        """Samples of each micro-batch that is not empty, for each data rank."""
        shared = share_out(self.batches[step], self.plan.data_ranks, self.plan.micro_batches)
        return [[size for size in part if size] for part in shared]

    def sizes(self, step: int) -> list[int]:
        """The same in global order."""
        return [size for part in self.shares(step) for size in part]

    def micro_batches(self, step: int) -> list[Any]:
        """Those of all data ranks, in global order."""
        case = CASES[self.case]
        if self.seeds == "by step":
            return case.micro_batches(self.sizes(step), step)
        parts = enumerate(self.shares(step))
        return [batch for rank, sizes in parts for batch in case.micro_batches(sizes, step + rank)]


@final
@dataclass(frozen=True, kw_only=True)
class Trained:
    """What one rank holds in the end, by one-device names; sharded tensors whole.

    gradients:  of each step, as the optimizer saw them
    """

    data_rank: int
    losses: Sequence[float]
    grad_norms: Sequence[float]
    gradients: Sequence[Mapping[str, Tensor | None]]
    parameters: Mapping[str, Tensor]
    buffers: Mapping[str, Tensor]


def train(training: Training) -> Trained:
    case = CASES[training.case]
    case.before_step(0)  # before the capture: a value that an earlier task left would be frozen, and then change
    seen: list[dict[str, Tensor | None]] = []
    engine = engine_of(training, watched_job(job_of(case, training.clip_grad_norm), seen))
    return trained(training, engine, seen)


def engine_of(training: Training, job: Job) -> Engine:
    example = CASES[training.case].batch(BATCH_SIZE, 0)
    return build_engine(job, training.plan, example, membership())


def membership() -> Membership:
    rank, ranks = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    return Membership(rank, ranks, torch.device("cpu"), made=False)


def trained(training: Training, engine: Engine, seen: Sequence[Mapping[str, Tensor | None]]) -> Trained:
    """Run all steps, and gather what is left."""
    case = CASES[training.case]
    losses, grad_norms = [], []
    for step in range(len(training.batches)):
        case.before_step(step)
        done = engine.step(share_of(training, engine, step), step)
        losses.append(done.loss)
        grad_norms.append(done.grad_norm)
    program = engine.program
    return Trained(
        data_rank=engine.mesh.data_rank,
        losses=losses,
        grad_norms=grad_norms,
        gradients=seen if engine.optimizer is not None else [{}] * len(losses),
        parameters={name: whole(parameter) for name, parameter in program.parameters.items()},
        buffers={name: whole(buffer) for name, buffer in program.buffers.items()},
    )


def share_of(training: Training, engine: Engine, step: int) -> Share:
    """This rank's part of a step; only the first rank of a pipeline gets batches, and may have to send them on."""
    mine, shares = engine.mesh.data_rank, training.shares(step)
    first = sum(len(part) for part in shares[:mine])
    batches = training.micro_batches(step)[first : first + len(shares[mine])]
    loads = engine.mesh.place.pipeline == 0
    return Share(batches if loads else None, shares[mine], first, training.batches[step])


def watched_job(job: Job, seen: list[dict[str, Tensor | None]]) -> Job:
    """`job`, whose optimizer adds the gradients that it sees to `seen` before each of its steps."""

    def optimizer(named: NamedParameters) -> Optimizer:
        parameters = list(named)
        made = job.optimizer(parameters)

        def look(*_: Any) -> None:
            seen.append({name: None if p.grad is None else whole(p.grad) for name, p in parameters})

        made.register_step_pre_hook(look)
        return made

    return replace(job, optimizer=optimizer)


def whole(tensor: Tensor) -> Tensor:
    """A copy of all of it; every rank that holds a shard must ask."""
    full = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
    return full.detach().clone()
