"""One training step on one rank: the lists of actions, then one update that is the same on all ranks."""

import math
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, final

import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils import _pytree as pytree

from shardwise.errors import LossError
from shardwise.graph import Draws, Sizes
from shardwise.job import Job
from shardwise.plan import Plan
from shardwise.runtime import gradients
from shardwise.runtime.agreement import agree
from shardwise.runtime.diagnosis import inspecting
from shardwise.runtime.executor import Work, run
from shardwise.runtime.loss_scale import LossScale
from shardwise.runtime.mesh import Mesh, tied_groups
from shardwise.runtime.optimizer import make_optimizer
from shardwise.runtime.program import Program, evaluating
from shardwise.runtime.routes import links
from shardwise.runtime.shards import UsedShards
from shardwise.runtime.share import Filler, Share, of_samples
from shardwise.runtime.transport import TorchTransport
from shardwise.runtime.variants import Variant, Variants
from shardwise.schedule import Links, Schedule, forward_only
from shardwise.schedule.orders import training_schedule

FORWARD_ONLY = "forward-only"


@final
@dataclass(frozen=True, slots=True)
class Step:
    """What one optimizer step gave, equal on every rank.

    loss:       over all samples of the step, weighted as declared
    grad_norm:  2-norm of the gradient of the whole model, before clipping
    metrics:    of the loss, averaged over micro-batches by their samples
    skipped:    fp16 only: gradients overflowed, nothing was updated, and the loss scale was halved
    """

    step: int
    loss: float
    grad_norm: float
    samples: int
    metrics: Mapping[str, float] = field(default_factory=dict)
    skipped: bool = False


@final
class Engine:
    """Trains one rank's program. Every rank calls `step` with its share of the same global batch."""

    def __init__(self, job: Job, plan: Plan, program: Program, mesh: Mesh) -> None:
        self.job, self.plan, self.program, self.mesh, self.device = job, plan, program, mesh, mesh.device
        trained = {name: p for name, p in program.parameters.items() if p.requires_grad}
        self.optimizer: Optimizer | None = make_optimizer(job, trained)
        self.scheduler: LRScheduler | None = (
            job.scheduler(self.optimizer) if job.scheduler is not None and self.optimizer is not None else None
        )
        self.loss_scale = LossScale(enabled=job.precision == "fp16")
        self._trained = trained
        shards = {name: p for name, p in trained.items() if isinstance(p, DTensor)}
        whole = {name: p for name, p in trained.items() if name not in shards}
        self._sums = (
            gradients.ReplicaSum(whole, mesh.data, program.of_stage.values())
            if mesh.data is not None and whole
            else None
        )
        self._used = UsedShards(program.sharded, shards, mesh.data) if mesh.data is not None and shards else None
        self._filler = Filler(plan)
        self._schedules: dict[object, Schedule] = {}
        self._metrics: Sequence[str] | None = None

    def step(self, share: Share, step: int) -> Step:
        """Run step number `step`, counted from 0, and update the parameters.

        raises:  LossError, on every rank, where the loss or a gradient is not finite; nothing is updated then
        """
        loss, norm, metrics = self.gradients(share, step)
        skipped = self._update(norm, step)
        return Step(step, loss, norm, share.total, metrics, skipped)

    def gradients(self, share: Share, step: int) -> tuple[float, float, Mapping[str, float]]:
        """The loss, the norm of the gradient, and metrics; the gradients are whole in the parameters' `grad`.

        raises:  LossError, on every rank, where the loss is not finite or weighs nothing
        """
        share = self._filler.fill(share)
        results = self._train(share, step)
        if self._sums is not None:
            self._sums.finish()
        if self._used is not None:
            self._used.finish()
        gradients.sum_tied(self._tied)
        total, weight, metrics, square = self._totals(share, results, gradients.square(self._counted, self.device))
        if not math.isfinite(total):
            self.forget()
            raise LossError(f"the loss of step {step} is {total}{self._origin(share, step)}")
        if not weight > 0:
            self.forget()
            raise LossError(f"the weights of the loss of step {step} sum to {weight}; a mean needs at least one term")
        by = weight / self._expected(share) * self.loss_scale.value
        gradients.divide(list(self._trained.values()), by)
        return total / weight, math.sqrt(square) / by, metrics

    def _origin(self, share: Share, step: int) -> str:
        """Where a loss that is not finite began, found by one more forward pass."""
        function = self.program.whole or self.program.variants
        assert function is not None
        known = [function] if isinstance(function, Variant) else function.known
        with ExitStack() as stack:
            looks = [stack.enter_context(inspecting(variant.stages)) for variant in known]
            if share.samples:
                self._run(self._work(share, step, function), FORWARD_ONLY, share)
        here = min((found for look in looks for found in look.found), default=None)
        everywhere: list[Any] = [here]
        if dist.is_initialized():
            everywhere = [None] * dist.get_world_size()
            dist.all_gather_object(everywhere, here)
        first = min(((found, rank) for rank, found in enumerate(everywhere) if found is not None), default=None)
        if first is None:
            return "; every part of the model gives finite numbers, so it is the loss itself that does not"
        (micro_batch, _, part), rank = first
        return f'; the first numbers that are not finite come out of "{part}" on rank {rank}, micro-batch {micro_batch}'

    def forward(self, share: Share, step: int, function: Variant | Variants) -> Mapping[int, Any]:
        """Run a function forward only: on the rank of the last stage, its results for each micro-batch."""
        share = self._filler.fill(share)
        if not share.samples:
            return {}
        with evaluating(self.program):
            return self._run(self._work(share, step, function), FORWARD_ONLY, share)

    def _update(self, norm: float, step: int) -> bool:
        """Clip and step, or say that this step is skipped."""
        if not math.isfinite(norm):
            self.forget()
            if not self.loss_scale.enabled:
                raise LossError(f"the gradient of step {step} has norm {norm}, though its loss is finite")
            self.loss_scale.overflowed()
            return True
        limit = self.job.clip_grad_norm
        if limit is not None:
            gradients.divide(list(self._trained.values()), by=max(1.0, (norm + 1e-6) / limit))
        if self.optimizer is not None:
            self.optimizer.step()
        if self.scheduler is not None:
            self.scheduler.step()
        self.forget()
        self.loss_scale.stepped()
        return False

    def forget(self) -> None:
        """Drop the gradients."""
        for parameter in self._trained.values():
            parameter.grad = None

    def _train(self, share: Share, step: int) -> Mapping[int, Any]:
        if not share.samples:
            return {}
        for module in self.program.sharded:
            module.set_requires_gradient_sync(self.plan.shard_mode == "regathered")
            module.set_reshard_after_backward(self.plan.shard_mode == "regathered")
        loss = self.program.whole or self.program.variants
        assert loss is not None
        return self._run(self._work(share, step, loss), self.plan.schedule, share)

    def _run(self, work: Work, name: str, share: Share) -> Mapping[int, Any]:
        state = torch.get_rng_state()
        schedule = self.schedule(name, len(share.samples), links([graph.routes for graph in work.graphs]))
        results = run(schedule, self.mesh.place.pipeline, work, self._transport, self.device)
        torch.set_rng_state(state)
        return of_samples(results, share)

    def _work(self, share: Share, step: int, function: Variant | Variants) -> Work:
        count = len(share.samples)
        graphs: Sequence[Variant]
        sizes: Sequence[Sizes]
        if isinstance(function, Variant):
            batches = share.batches or ()
            graphs, sizes = [function] * count, [()] * count
            fields: Sequence[Sequence[Any]] = [[batch] for batch in batches]
        else:
            agreed = agree(function, self.mesh, share.batches, count, step)
            graphs, sizes, fields = agreed.graphs, agreed.sizes, agreed.fields
        return Work(
            graphs=graphs,
            draws=lambda at: Draws(self.job.seed, step, share.first + at, self.device),
            sizes=sizes,
            load=lambda at: [self._to_device(value) for value in fields[at]],
            root=lambda at, results: self._root(results, share.samples[at], self._expected(share)),
            last_backward=self._last_backward,
            finished=self._finished,
        )

    def schedule(self, name: str, micro_batches: int, between: Links) -> Schedule:
        """The lists for this many micro-batches."""
        key = (name, micro_batches, between)
        if key not in self._schedules:
            self._schedules[key] = make_schedule(self.plan, name, micro_batches, between)
        return self._schedules[key]

    @cached_property
    def _transport(self) -> TorchTransport | None:
        if self.mesh.pipeline is None:
            return None
        return TorchTransport(self.mesh.pipeline, self.mesh.pipeline_ranks, self.plan.placement)

    def _to_device(self, value: Any) -> Any:
        if isinstance(value, Tensor):
            return value.to(self.device, non_blocking=True)
        return pytree.tree_map_only(Tensor, lambda tensor: tensor.to(self.device, non_blocking=True), value)

    def _expected(self, share: Share) -> float:
        """The weight of a step's samples, as far as the plan knows: what gradients are divided by as they are made.

        So they are those of the mean that one device would take: fp16 has no room for sums. And where it is the weight
        that the step turns out to have, that is the only division.
        """
        return share.total * self.plan.sample_weight

    def _root(self, results: Any, samples: int, weight: float) -> tuple[Tensor, Tensor]:
        """The loss and its gradient, in a step of this weight: a bare scalar counts for each of its samples.

        A copy that fills up a data rank has no samples, and weighs nothing whatever its loss declares.
        """
        count = samples if results["weight"] is None else min(samples, 1)
        return results["value"], torch.full_like(results["value"], self.loss_scale.value * count / weight)

    def _last_backward(self, stage: int) -> None:
        for module in self.program.sharded:
            module.set_requires_gradient_sync(True)
            module.set_reshard_after_backward(True)
        if self._sums is not None:
            self._sums.arm(self.program.of_stage[stage])

    def _finished(self, stage: int) -> None:
        if self._sums is not None:
            self._sums.complete(self.program.of_stage[stage])

    @cached_property
    def _tied(self) -> list[tuple[nn.Parameter, dist.ProcessGroup]]:
        owners = {name: ranks for name, ranks in sorted(self.program.owners.items()) if self.program.trained[name]}
        groups = tied_groups(self.plan, list(owners.values())) if owners else {}
        return [(self._trained[name], groups[ranks]) for name, ranks in owners.items() if name in self._trained]

    @cached_property
    def _counted(self) -> list[nn.Parameter]:
        """Parameters whose gradient this rank adds to the norm: one that others hold, too, on one of them only."""
        owners, place = self.program.owners, self.mesh.place
        return [
            p
            for number, (name, p) in enumerate(self._trained.items())
            if owners.get(name, (place.pipeline,))[0] == place.pipeline
            and number % self.plan.replicas == place.replica
            and (isinstance(p, DTensor) or place.shard == 0)
        ]

    def totals(self, share: Share, results: Mapping[int, Any]) -> tuple[float, float, Mapping[str, float]]:
        """The sums of loss and weight over the world, and each metric's mean over samples."""
        loss, weight, metrics, _ = self._totals(share, results, torch.zeros(()))
        return loss, weight, metrics

    def _totals(
        self, share: Share, results: Mapping[int, Any], square: Tensor
    ) -> tuple[float, float, Mapping[str, float], float]:
        """As `totals`, and the sum of the ranks' `square`: one message for all of them."""
        names = self._metric_names(results)
        sums = torch.zeros(3 + len(names), dtype=torch.float64)
        for at, result in results.items():
            samples, weight = share.samples[at], result["weight"]
            sums[0] += float(result["value"]) * (samples if weight is None else 1)
            sums[1] += samples if weight is None else float(weight)
            sums[2] += samples
            for place, name in enumerate(names):
                sums[3 + place] += float(result["metrics"][name]) * samples
        message = torch.cat([sums.to(self.device), square.to(self.device, torch.float64).reshape(1)])
        if dist.is_initialized():
            dist.all_reduce(message)
        loss, weight, samples, *means, squares = message.tolist()
        return loss, weight, {name: mean / samples for name, mean in zip(names, means, strict=True)}, squares

    def _metric_names(self, results: Mapping[int, Any]) -> Sequence[str]:
        """Which metrics the loss gives; with the module as it is, known from the first step."""
        if self.program.variants is not None:
            return list(self.program.variants.known[0].outputs["metrics"])
        if self._metrics is None:
            here = list(next(iter(results.values()))["metrics"]) if results else []
            everywhere: list[Any] = [here]
            if dist.is_initialized():
                everywhere = [None] * dist.get_world_size()
                dist.all_gather_object(everywhere, here)
            self._metrics = max(everywhere, key=len)
        return self._metrics


def make_schedule(plan: Plan, name: str, micro_batches: int, between: Links) -> Schedule:
    """The schedule called `name` of the plan's stages."""
    stages, ranks = len(plan.stages), plan.pipeline_ranks
    if name == FORWARD_ONLY:
        return forward_only(stages=stages, ranks=ranks, micro_batches=micro_batches, links=between)
    return training_schedule(name, stages=stages, ranks=ranks, micro_batches=micro_batches, links=between)
