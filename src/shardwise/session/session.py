"""The user's object: a job under way."""

import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, Self, final

import torch
from rich.console import Console
from torch import distributed as dist
from torch import nn

from shardwise.checkpoint import Checkpoint, open_checkpoint, open_latest
from shardwise.data import Data, Feed, FeedStep, epoch_of, example, samples_in, slice_batch
from shardwise.errors import BatchError, PlanError
from shardwise.job import Batch, Job
from shardwise.plan import Plan, report, save, share_out
from shardwise.runtime import Engine, Share, Step, Verdict, verify
from shardwise.session.build import agree_on_plan, build_engine
from shardwise.session.group import Membership, join
from shardwise.session.inference import Inference
from shardwise.session.options import Options, options_from
from shardwise.session.state import describe_job, load_engine, save_engine
from shardwise.track import Callback, JsonLines, JsonStream, StepReport, TensorBoard, Tracker, all_of, progress


@final
@dataclass(frozen=True, slots=True)
class Evaluation:
    """The loss over a whole dataset, weighted as in training, and the metrics averaged over samples."""

    loss: float
    metrics: Mapping[str, float]
    samples: int


def parallelize(
    job: Job,
    plan: Plan | Path | str = "auto",
    data: Data | None = None,
    *,
    run: Path | str | None = None,
    on_step: Callable[[StepReport], object] | None = None,
    trackers: Iterable[Tracker] = (),
) -> "Session":
    """Run `job` on the ranks that this program was started on; use it in a `with`.

    plan:      a plan, a plan file, or "auto" for one made for the devices at hand
    data:      a DataLoader or dataset, for `steps` and for the shape of a batch
    run:       folder for checkpoints and records; else what the launcher said, else runs/<name of the script>
    on_step:   called on rank 0 after each step
    trackers:  used on rank 0 beside those that the launcher asked for
    """
    return Session(job, plan, data, run=run, on_step=on_step, trackers=trackers)


@final
class Session:
    """A job under way on this rank. Every rank calls the same methods in the same order.

    raises:  whatever `parallelize` says, from `__enter__` on
    """

    def __init__(
        self,
        job: Job,
        plan: Plan | Path | str,
        data: Data | None,
        *,
        run: Path | str | None,
        on_step: Callable[[StepReport], object] | None,
        trackers: Iterable[Tracker],
    ) -> None:
        self._job, self._asked, self._data = job, plan, data
        self._run, self._on_step, self._trackers = run, on_step, tuple(trackers)
        self._at = _Progress()
        self._member: Membership | None = None
        self._engine: Engine | None = None
        self._own_tracker: Tracker | None = None

    def __enter__(self) -> Self:
        self._options = _with_run(options_from(os.environ, sys.argv[0]), self._run)
        self._member = join()
        if self._data is not None:
            self._build(example(self._data))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        member, self._member = self._member, None
        if self._own_tracker is not None:
            self._own_tracker.close()
        if member is not None and member.made and error is None:
            dist.barrier()
            dist.destroy_process_group()

    @property
    def plan(self) -> Plan:
        """The plan that runs."""
        return self._ready.plan

    @property
    def rank(self) -> int:
        return self._joined.rank

    @property
    def step_number(self) -> int:
        """How many optimizer steps were made, over all runs of this session's checkpoints."""
        return self._at.step

    @property
    def module(self) -> nn.Module:
        """The user's module, on this rank's device.

        raises:  PlanError where the plan has several stages, and no rank has a whole module
        """
        whole = self._ready.program.whole
        if whole is None:
            raise PlanError(
                f"the plan has {len(self.plan.stages)} stages, so that no rank has the module; use session.predict, or "
                "a plan with one stage"
            )
        return whole.stages[0].model  # type: ignore[attr-defined,no-any-return]  # the stage of a whole variant

    def steps(self, until: int) -> Iterator[StepReport]:
        """Train until step `until`, from the last checkpoint of the run folder on; saves, tracks, and gives each step.

        raises:  BatchError where the session has no data
        """
        if self._data is None:
            raise BatchError("session.steps needs data: shardwise.parallelize(job, data=loader), or use session.step")
        feed = Feed(
            self._data,
            batch_size=self._job.batch_size,
            share=self._share,
            data_rank=self._ready.mesh.data_rank,
            loads=self._loads,
            seed=self._job.seed,
        )
        self._resume(feed, until)
        tracker = self._tracker(until)
        try:
            yield from self._train(feed, tracker, until)
        finally:
            tracker.close()

    def step(self, batch: Batch | None) -> StepReport:
        """One optimizer step on a global batch, equal on every rank; a rank that loads nothing may give None.

        It is recorded in the run folder. Saving and resuming are yours: `save`, `load`.

        raises:  BatchError where the batch cannot be shared out
        """
        if self._engine is None:
            self._build(batch)
        if self._own_tracker is None:
            self._own_tracker = self._tracker(None)
        done = self._advance(self._slice(batch, self._agree_on_samples(batch)))
        self._own_tracker.record(done)
        return done

    def evaluate(self, data: Data) -> Evaluation:
        """The loss over `data` once, in evaluation mode, without gradients."""
        shares = self._pass(data)  # builds the engine, where nothing has yet
        return Evaluation(*self._inference.evaluate(shares))

    def predict(self, data: Data, function: Callable[[Any, Batch], Any]) -> list[Any]:
        """`function(model, batch)` for each batch of `data`, in order, in evaluation mode; on every rank.

        The batches are of the job's batch size, and each result is a list: one entry for each of its micro-batches.
        """
        shares = self._pass(data)
        return self._inference.predict(shares, function)

    def verify(self, batch: Batch) -> Verdict | None:
        """One step's gradients against one process in plain PyTorch; nothing is updated. On rank 0 the verdict.

        batch:  a global batch, equal on every rank
        """
        if self._engine is None:
            self._build(batch)
        total = self._agree_on_samples(batch)
        sizes = [size for part in self._share(total) for size in part if size]
        return verify(self._ready, self._to_share(self._slice(batch, total)), slice_batch(batch, sizes), sizes)

    def save(self, folder: Path | str) -> Path:
        """Write a checkpoint below `folder`, whole or not at all; every rank calls it."""
        return save_engine(self._ready, Path(folder), self._at.step, self._described, self._at.data)

    def load(self, folder: Path | str) -> None:
        """Take the latest whole checkpoint below `folder`, or that checkpoint itself; every rank calls it.

        raises:  CheckpointError where there is none, or it is of another job
        """
        path = Path(folder)
        found = open_checkpoint(path) if (path / "meta.json").exists() else open_latest(path)
        if found is None:
            raise FileNotFoundError(f"{path} has no checkpoint")
        self._restore(found)

    # How it works, from here on.

    @property
    def _joined(self) -> Membership:
        if self._member is None:
            raise RuntimeError("the session is not open: with shardwise.parallelize(job, ...) as session: ...")
        return self._member

    @property
    def _ready(self) -> Engine:
        if self._engine is None:
            raise RuntimeError("no step was made yet, and the session has no data to tell the shape of a batch")
        return self._engine

    @property
    def _loads(self) -> bool:
        """Whether this rank loads samples: the one of the first stage does."""
        return self._ready.mesh.place.pipeline == self.plan.placement[0]

    def _build(self, batch: Batch | None) -> None:
        plan = agree_on_plan(self._job, self._asked_plan(), batch, self._joined)
        self._engine = build_engine(self._job, plan, batch, self._joined)
        self._described = describe_job(self._job, self._engine)
        self._share: Callable[[int], list[list[int]]] = partial(
            share_out, data_ranks=plan.data_ranks, micro_batches=plan.micro_batches
        )
        self._inference = Inference(self._engine, self._job)
        if self._joined.rank == 0:
            save(plan, _made(self._options.run) / "plan.json")
            if self._options.output == "progress":
                Console().print(report(plan))

    def _asked_plan(self) -> Plan | Path | str:
        return self._options.plan or self._asked

    def _resume(self, feed: Feed, until: int) -> None:
        if self._at.step or self._options.fresh:
            return
        found = open_latest(self._options.run)
        if found is not None:
            self._restore(found)
            if self._at.data is not None:
                feed.restore(self._at.data)
            if self._joined.rank == 0 and self._options.output == "progress":
                Console().print(f"resumed from {found.path} at step {self._at.step}")
                if self._at.step >= until:
                    Console().print(f"nothing is left of {until} steps: ask for more, or begin anew with --fresh")

    def _restore(self, found: Checkpoint) -> None:
        meta = load_engine(self._ready, found, self._described)
        self._at = _Progress(step=meta["step"], data=meta["data"])

    def _train(self, feed: Feed, tracker: Tracker, until: int) -> Iterator[StepReport]:
        every = self._options.save_every
        while self._at.step < until:
            done = self._advance(next(feed))
            self._at.data = feed.state()
            tracker.record(done)
            if every and (self._at.step % every == 0 or self._at.step == until):
                self.save(self._options.run)
            yield done

    def _tracker(self, until: int | None) -> Tracker:
        """What follows the steps; without an end to count to, no live line."""
        if self._joined.rank:
            return all_of()
        run, options = _made(self._options.run), self._options
        chosen: list[Tracker] = [JsonLines(run, resume_step=self._at.step), *self._trackers]
        if options.output == "progress" and until is not None:
            chosen.append(progress(until))
        if options.output == "json":
            chosen.append(JsonStream(sys.stdout))
        if options.tensorboard:
            chosen.append(TensorBoard(run, resume_step=self._at.step))
        if self._on_step is not None:
            chosen.append(Callback(self._on_step))
        return all_of(*chosen)

    def _advance(self, data: FeedStep) -> StepReport:
        start = self._at.ended or time.monotonic()
        rate = self._learning_rate()
        done = self._ready.step(self._to_share(data), self._at.step)
        self._at.step += 1
        self._at.ended = time.monotonic()
        return self._report(done, rate, max(self._at.ended - start, 1e-9))

    def _to_share(self, data: FeedStep) -> Share:
        mine = self._ready.mesh.data_rank
        first = sum(size > 0 for part in data.sizes[:mine] for size in part)
        return Share(data.batches, [size for size in data.sizes[mine] if size], first, data.total)

    def _report(self, done: Step, rate: float, seconds: float) -> StepReport:
        return StepReport(
            step=self._at.step,
            loss=done.loss,
            grad_norm=done.grad_norm,
            samples_per_second=done.samples / seconds,
            learning_rate=rate,
            seconds=seconds,
            memory_bytes=_peak_memory(self._joined.device),
            metrics={**done.metrics, **self._scaling(done)},
        )

    def _scaling(self, done: Step) -> dict[str, float]:
        """fp16: the scale of the loss, and whether the step was skipped because gradients overflowed."""
        scale = self._ready.loss_scale
        return {"loss_scale": scale.value, "skipped": float(done.skipped)} if scale.enabled else {}

    def _learning_rate(self) -> float:
        optimizer = self._ready.optimizer
        return float(optimizer.param_groups[0]["lr"]) if optimizer is not None else 0.0

    def _slice(self, batch: Batch | None, total: int) -> FeedStep:
        """This data rank's micro-batches of a global batch that the user made."""
        sizes = self._share(total)
        if not self._loads:
            return FeedStep(None, sizes, total)
        if batch is None:
            raise BatchError(f"rank {self.rank} got no batch, but it loads: give every rank the global batch")
        mine = self._ready.mesh.data_rank
        first = sum(size > 0 for part in sizes[:mine] for size in part)
        batches = slice_batch(batch, [size for part in sizes for size in part if size])
        return FeedStep(batches[first : first + sum(size > 0 for size in sizes[mine])], sizes, total)

    def _agree_on_samples(self, batch: Batch | None) -> int:
        """Samples in the global batch, also on ranks that were given none."""
        count = torch.tensor([0 if batch is None else samples_in(batch)])
        if dist.is_initialized():
            most, least = count.to(self._joined.device), count.to(self._joined.device)
            least = torch.where(least == 0, torch.iinfo(least.dtype).max, least)
            dist.all_reduce(most, dist.ReduceOp.MAX)
            dist.all_reduce(least, dist.ReduceOp.MIN)
            if int(most) != int(least):
                raise BatchError(
                    f"ranks were given batches of {int(least)} and {int(most)} samples; give every rank the same "
                    "global batch: the session shares it out"
                )
            count = most
        return int(count)

    def _pass(self, data: Data) -> Iterator[Share]:
        """The shares of this rank of one pass over `data`."""
        if self._engine is None:
            self._build(example(data))
        steps = epoch_of(
            data,
            batch_size=self._job.batch_size,
            share=self._share,
            data_rank=self._ready.mesh.data_rank,
            loads=self._loads,
        )
        return map(self._to_share, steps)


@final
@dataclass
class _Progress:
    """How far the session has come."""

    step: int = 0
    data: Mapping[str, Any] | None = field(default=None)
    ended: float | None = None


def _with_run(options: Options, run: Path | str | None) -> Options:
    return options if run is None else replace(options, run=Path(run))


def _made(folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def _peak_memory(device: torch.device) -> int:
    """Of the allocator on a GPU; on the CPU, of the whole process."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    if sys.platform == "linux":
        # getrusage would give what the launcher used, if that was more: Linux hands it on to child processes.
        peak = Path("/proc/self/status").read_text().partition("VmHWM:")[2].split(maxsplit=1)
        if peak:  # some kernels do not tell it
            return 1024 * int(peak[0])
    import resource  # no such module on Windows, which has no processes of gloo either

    unit = 1 if sys.platform == "darwin" else 1024  # of ru_maxrss, in bytes
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
