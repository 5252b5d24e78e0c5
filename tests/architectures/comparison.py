"""One architecture, planned for two stages, against its reference: in one process, then on two ranks."""

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, final

import torch
from torch import Tensor

import reference
from architectures import CASES
from graph.in_turn import run_backward
from shardwise.graph import Chain, Draws, read
from shardwise.job import Job, NamedParameters, objective
from shardwise.plan import Plan, make_plan, positions
from shardwise.runtime import Share, capture_chain
from shardwise.session.build import build_engine
from workers import Pool
from workers.training import membership, watched_job, whole

SIZES = (3, 3, 2)  # of the micro-batches; the example has two samples, so that a size that was frozen shows
STEPS = 2
SEED = 3
MOST_SECONDS = 300  # for a training: mostly the capture, several times as long where the machine is busy
CPU = torch.device("cpu")

# By the type in which the model computes its loss: most language models of transformers do it in float32, whatever
# type their parameters have. Of the loss, and of the largest gradient in the model.
TOLERANCE = {torch.float64: 1e-11, torch.float32: 1e-6}


def sgd(named: NamedParameters) -> torch.optim.Optimizer:
    """Whose step is linear in the gradient, so that rounding stays rounding in the step after."""
    return torch.optim.SGD(named, lr=0.1, momentum=0.9)


def job_of(name: str) -> Job:
    case = CASES[name]
    return Job(model=case.model, loss=case.loss, optimizer=sgd, batch_size=sum(SIZES), seed=SEED)


def plan_of(name: str, **asked: int) -> Plan:
    """For two devices, from a batch of two samples.

    raises:  PlanError where it cannot be planned so
    """
    return make_plan(job_of(name), "2x cpu", CASES[name].batch(2, 0), **asked)


def two_stages(name: str) -> Plan:
    return plan_of(name, pipeline=2, micro_batches=len(SIZES))


def two_replicas(name: str) -> Plan:
    return plan_of(name, replicas=2, micro_batches=2)


def smallest_stage(plan: Plan) -> float:
    """Its share of the FLOPs, from 0 to 1."""
    flops = [stage.flops for stage in plan.stages]
    return min(flops) / sum(flops)


@dataclass(frozen=True, slots=True, kw_only=True)
class Apart:
    """How far a plan is from its reference.

    loss, gradient:  differences: of the loss, and as a share of the largest gradient in the model
    tolerance:       for both
    """

    loss: float
    gradient: float
    tolerance: float

    @property
    def equal(self) -> bool:
        return max(self.loss, self.gradient) <= self.tolerance


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class InTurn(Apart):
    """The two stages of a plan, run one after the other in one process.

    candidates:       places where the planner may cut
    capture_seconds:  to capture the loss and to measure its graph
    dynamic:          the sizes of micro-batches are open in the graph
    """

    candidates: int
    capture_seconds: float
    dynamic: bool


def compare_in_turn(name: str, plan: Plan) -> InTurn:
    case, job = CASES[name], job_of(name)
    model = job.build()
    start = time.perf_counter()
    chain = capture_chain(objective(job.loss), model, case.batch(2, 0), "fp32", CPU, "weighed").chain
    taken = time.perf_counter() - start
    tensors = dict(model.named_parameters()) | dict(model.named_buffers())
    total = weight = 0.0
    for number, (batch, samples) in enumerate(zip(case.micro_batches(SIZES, 0), SIZES, strict=True)):
        value, weighs = _micro_batch(chain, positions(plan, chain), tensors, batch, samples, number)
        total, weight = total + value, weight + weighs
    expected = reference_of(name, steps=1)
    gradients = {key: None if p.grad is None else p.grad / weight for key, p in model.named_parameters()}
    return InTurn(
        candidates=len(chain.segments) - 1,
        capture_seconds=taken,
        dynamic=all(0 in dimensions for dimensions in chain.graph.capture.dynamic),
        loss=abs(total / weight - expected.losses[0]),
        gradient=gradient_error(gradients, expected.gradients[0]),
        tolerance=TOLERANCE[chain.graph.outputs[0].meta["val"].dtype],
    )


def _micro_batch(
    chain: Chain, bounds: Sequence[int], tensors: Mapping[str, Tensor], batch: Any, samples: int, number: int
) -> tuple[float, float]:
    """Value and weight of one micro-batch; its gradient is added to those of the parameters."""
    weighed = chain.graph.outputs[1] is not None
    draws = Draws(SEED, 0, number, CPU)
    value, weight = run_backward(chain, bounds, tensors, read(batch)[1], draws, 1 if weighed else samples)[:2]
    return (value.item(), float(weight)) if weighed else (value.item() * samples, samples)


def reference_of(name: str, steps: int) -> reference.Result:
    case = CASES[name]
    micro_batches = [case.micro_batches(SIZES, step) for step in range(steps)]
    return reference.run(case.model, case.loss, micro_batches, [SIZES] * steps, sgd, seed=SEED)


@final
@dataclass(frozen=True, slots=True)
class Trained:
    """What one rank holds after some steps.

    graphs:     captured on the way; 0 with one stage
    gradients:  of each step, as the optimizer saw them
    """

    graphs: int
    losses: Sequence[float]
    gradients: Sequence[Mapping[str, Tensor | None]]
    parameters: Mapping[str, Tensor]


def train(name: str, plan: Plan) -> Trained:
    """The task of one rank."""
    case, seen = CASES[name], list[dict[str, Tensor | None]]()
    engine = build_engine(watched_job(job_of(name), seen), plan, case.batch(2, 0), membership())
    sizes = plan.micro_batch_sizes()
    mine, first = engine.mesh.data_rank, sum(len(part) for part in sizes[: engine.mesh.data_rank])
    losses = []
    for step in range(STEPS):
        batches = case.micro_batches([size for part in sizes for size in part], step)[first : first + len(sizes[mine])]
        share = Share(batches if engine.mesh.place.pipeline == 0 else None, sizes[mine], first, sum(SIZES))
        losses.append(engine.step(share, step).loss)
    return Trained(
        graphs=0 if engine.program.variants is None else len(engine.program.variants.known),
        losses=losses,
        gradients=seen,
        parameters={key: whole(parameter) for key, parameter in engine.program.parameters.items()},
    )


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class OnTwoRanks(Apart):
    """A plan of two stages, trained for some steps on two ranks."""

    graphs: int


def compare_on_two_ranks(name: str, plan: Plan, tolerance: float, pool: Pool) -> OnTwoRanks:
    """raises:  TaskError where a rank fails, AssertionError where the ranks differ in what must be equal"""
    ranks = pool.run(2, train, name, plan, seconds=MOST_SECONDS)
    assert_agreement(ranks)
    expected = reference_of(name, STEPS)
    found = [{**one, **other} for one, other in zip(ranks[0].gradients, ranks[1].gradients, strict=True)]
    return OnTwoRanks(
        graphs=max(rank.graphs for rank in ranks),
        loss=max(abs(one - other) for one, other in zip(ranks[0].losses, expected.losses, strict=True)),
        gradient=max(
            gradient_error(_all_named(step, wanted), wanted)
            for step, wanted in zip(found, expected.gradients, strict=True)
        ),
        tolerance=tolerance,
    )


def assert_agreement(ranks: Sequence[Trained]) -> None:
    """Losses are numbers and equal on all ranks, and what several hold, such as a tied parameter, has equal bits."""
    assert all(map(math.isfinite, ranks[0].losses))
    for rank in ranks[1:]:
        assert rank.losses == ranks[0].losses
        for key in rank.parameters.keys() & ranks[0].parameters.keys():
            assert torch.equal(rank.parameters[key], ranks[0].parameters[key]), f"ranks differ in {key}"


def _all_named(found: Mapping[str, Tensor | None], wanted: Mapping[str, Tensor | None]) -> dict[str, Tensor | None]:
    """An optimizer sees only what is trained; the reference names the rest, too."""
    return {key: found.get(key) for key in wanted} | dict(found)


def gradient_error(found: Mapping[str, Tensor | None], expected: Mapping[str, Tensor | None]) -> float:
    """The greatest difference, as a share of the largest gradient in the model; one that is missing counts as zero."""
    assert found.keys() == expected.keys()
    largest = max(gradient.abs().max().item() for gradient in expected.values() if gradient is not None)
    return max(_apart(found[name], expected[name]) for name in expected) / largest


def _apart(one: Tensor | None, other: Tensor | None) -> float:
    if one is None or other is None:
        present = one if one is not None else other
        return 0.0 if present is None else present.abs().max().item()
    return (one - other).abs().max().item()
