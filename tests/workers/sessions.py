"""Tasks that go through the user's own door, `parallelize`, on one rank."""

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, final

import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch.utils.data import DataLoader, Dataset, IterableDataset

from shardwise.data import Data
from shardwise.errors import LossError
from shardwise.job import Job, Mean, Precision
from shardwise.plan import Plan, make_plan
from shardwise.session import parallelize
from shardwise.session.session import Session
from workers import surprises
from workers.layouts import BATCH_SIZE, CASES, job_of
from workers.training import whole
from zoo import Case

EVALUATION_SEED = 9


@final
@dataclass(frozen=True)
class Samples(Dataset[Any]):
    """The first `count` samples of a seed of a case."""

    case: Case
    count: int
    seed: int = 0

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> Any:
        return self.case.sample(self.seed, index)


@final
@dataclass(frozen=True)
class Shards(IterableDataset[Any]):
    """The samples of seed 0 in files of these sizes, one after the other."""

    case: Case
    sizes: Sequence[int]

    def __iter__(self) -> Iterator[Any]:
        return (self.case.sample(0, index) for index in range(sum(self.sizes)))


@final
@dataclass(frozen=True)
class Seen:
    """What a session gave, and the parameters that this rank holds in the end."""

    losses: Sequence[float]
    evaluations: Sequence[float]
    parameters: dict[str, Tensor]
    buffers: dict[str, Tensor]


def loader(case: Case, count: int, seed: int = 0) -> DataLoader[Any]:
    return DataLoader(Samples(case, count, seed), batch_size=BATCH_SIZE, collate_fn=case.collate)


def train_and_evaluate(name: str, plan: Plan, script: Sequence[tuple[str, int]], run: Path) -> Seen:
    """Follow the `script`: ("train", 6) is a step on 6 samples of the next seed, ("evaluate", 16) a pass over 16."""
    case = CASES[name]
    losses: list[float] = []
    evaluations: list[float] = []
    with opened(job_of(case), plan, None, run) as session:
        for verb, samples in script:
            if verb == "train":
                losses.append(session.step(case.batch(samples, len(losses))).loss)
            else:
                evaluations.append(session.evaluate(loader(case, samples, EVALUATION_SEED)).loss)
        return Seen(losses, evaluations, *held(session))


def train_on_shards(name: str, plan: Plan, source: str, shards: Sequence[int], steps: int, run: Path) -> Seen:
    """Steps on the samples of `shards`, indexed or as one stream."""
    case = CASES[name]
    data: Data = loader(case, sum(shards))
    if source == "stream":
        data = DataLoader(Shards(case, shards), batch_size=BATCH_SIZE, collate_fn=case.collate)
    job = replace(job_of(case), batch_size=plan.batch_size)
    with opened(job, plan, data, run) as session:
        losses = [step.loss for step in session.steps(steps)]
        return Seen(losses, [], *held(session))


def train_in_parts(name: str, plan: Plan, stops: Sequence[int], run: Path) -> Seen:
    """Train up to each stop in a session of its own, which goes on from the checkpoint of the one before."""
    case = CASES[name]
    losses: list[float] = []
    for stop in stops:
        with opened(job_of(case), plan, loader(case, 3 * BATCH_SIZE), run) as session:
            losses += [step.loss for step in session.steps(stop)]
            seen = Seen(losses, [], *held(session))
    return seen


def count_hook_calls(name: str, plan: Plan, steps: int, run: Path) -> list[int]:
    """`calls` of each module of this rank that counts them, after so many steps."""
    case = CASES[name]
    built: list[nn.Module] = []

    def model() -> nn.Module:
        built.append(case.model())
        return built[-1]

    with opened(replace(job_of(case), model=model), plan, None, run) as session:
        for step in range(steps):
            session.step(case.batch(BATCH_SIZE, step))
    return [module.calls for module in built[-1].modules() if isinstance(getattr(module, "calls", None), int)]


def with_a_number_of_ones_own(run: Path) -> None:
    """Two steps; before the second, only rank 1 changes a Python number that the loss reads."""
    settings = SimpleNamespace(beta=1.0)
    batch = (torch.ones(4, surprises.FEATURES).double(), torch.zeros(4, surprises.FEATURES).double())
    job = _job(surprises.layers, lambda model, batch: settings.beta * surprises.distance(model, batch), 4)
    plan = make_plan(job, "2x cpu", batch, pipeline=2, micro_batches=2)
    with opened(job, plan, None, run) as session:
        session.step(batch)
        settings.beta += dist.get_rank()
        session.step(batch)


def step_of_own_plans(run: Path) -> Seen:
    """One step of a batch of which 1 label in 8 counts; each rank makes its plan of another example."""
    x, mask = torch.ones(8, surprises.FEATURES).double(), torch.arange(8) == 0
    job = _job(surprises.layers, _masked, 8)
    plan = make_plan(job, "2x cpu", (x, mask if dist.get_rank() else ~mask), replicas=2)
    with opened(job, plan, None, run) as session:
        return Seen([session.step((x, mask)).loss], [], *held(session))


def _masked(model: Any, batch: Any) -> Mean:
    x, mask = batch
    return Mean((model(x).square().mean(1) * mask).sum(), mask.sum())


def with_a_sparse_gradient(run: Path) -> None:
    job = _job(lambda: nn.Embedding(8, 4, sparse=True), lambda model, batch: model(batch).square().mean(), 4)
    batch = torch.arange(4)
    with opened(job, make_plan(job, "2x cpu", batch, replicas=2), None, run) as session:
        session.step(batch)


@final
class Ratio(nn.Module):
    """[B, D], [B, 1] to [B, D]."""

    def forward(self, x: Tensor, divisor: Tensor) -> Tensor:
        return x / divisor


@final
class Rated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.ratio, self.last = surprises.layers(), Ratio(), surprises.layers()

    def forward(self, x: Tensor, divisor: Tensor) -> Tensor:
        return self.last(self.ratio(self.first(x), divisor))


def divided_by_zero(run: Path) -> tuple[str, bool]:
    """One step of 4 micro-batches in two stages; in the third the second stage divides by 0.

    returns:  the error that came, and whether the parameters of this rank are as they were
    """
    x, divisor = torch.ones(8, surprises.FEATURES).double(), torch.ones(8, 1).double()
    divisor[5] = 0
    job = _job(Rated, lambda model, batch: model(*batch).square().mean(), 8)
    plan = make_plan(job, "2x cpu", (x, divisor), pipeline=2, micro_batches=4, cuts=["before ratio"])
    with opened(job, plan, None, run) as session:
        session.step((x, torch.ones_like(divisor)))
        before, _ = held(session)
        before = {name: value.clone() for name, value in before.items()}
        try:
            session.step((x, divisor))
        except LossError as error:
            return str(error), all(torch.equal(value, before[name]) for name, value in held(session)[0].items())
    return "", True


def train_in_precision(
    precision: Precision, asked: Mapping[str, Any], batches: Sequence[Any], run: Path, *, as_sum: bool = False
) -> Seen:
    """A step on each batch, of 8 samples, in single precision or less; the loss may be a sum over many terms."""
    job = replace(_job(single, summed if as_sum else surprises.distance, 8), precision=precision)
    with opened(job, make_plan(job, "2x cpu", batches[0], **asked), None, run) as session:
        return Seen([session.step(batch).loss for batch in batches], [], *held(session))


def summed(model: Any, batch: Any) -> Mean:
    """The distance, as a sum with a weight of 10,000 a sample: what long sequences come to."""
    weight = 10_000 * len(batch[0])
    return Mean(surprises.distance(model, batch) * weight, weight)


def single() -> nn.Module:
    return surprises.layers().float()


def _job(model: Callable[[], nn.Module], loss: Callable[[Any, Any], Tensor], batch_size: int) -> Job:
    return Job(model=model, loss=loss, optimizer=lambda named: torch.optim.SGD(named, lr=0.1), batch_size=batch_size)


def opened(job: Job, plan: Plan, data: Data | None, run: Path) -> Session:
    os.environ["SHARDWISE_OUTPUT"] = "none"
    return parallelize(job, plan, data, run=run)


def held(session: Session) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    program = session._ready.program
    return (
        {name: whole(parameter) for name, parameter in program.parameters.items()},
        {name: whole(buffer) for name, buffer in program.buffers.items()},
    )


def gradients_left(name: str, plan: Plan, run: Path) -> list[str]:
    """Names of the parameters that have a gradient after an evaluation."""
    case = CASES[name]
    with opened(job_of(case), plan, None, run) as session:
        session.evaluate(loader(case, BATCH_SIZE))
        return [name for name, p in session._ready.program.parameters.items() if p.grad is not None]
