"""Make a plan: of the arrangements of the devices that fit their memory, the simplest or the fastest."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from math import ceil
from typing import final

from shardwise.cluster import Cluster, local_cluster, parse_cluster
from shardwise.cost import Analytic, CostModel
from shardwise.errors import PlanError
from shardwise.graph import Chain, Refusal
from shardwise.job import Batch, Job
from shardwise.plan.asked import Asked
from shardwise.plan.cuts import named_positions, place_cuts
from shardwise.plan.layout import Layout, describe
from shardwise.plan.memory import memory_of
from shardwise.plan.mesh import Mesh, meshes
from shardwise.plan.notes import notes_of, sample_weight_of, weighting_of
from shardwise.plan.plan import Alternative, Plan, ScheduleName, ShardMode
from shardwise.plan.report import size_text
from shardwise.plan.seconds import slowest_device, step_seconds
from shardwise.plan.sections import Section, cut_into_sections
from shardwise.plan.sketch import Sketch, sketch_job

USABLE = 0.92  # of a device's memory: the rest goes to its context, to communication, and to gaps between blocks
PER_RANK = 4  # micro-batches for each pipeline rank: 1F1B then waits a fifth of the time at most


def make_plan(
    job: Job,
    cluster: Cluster | str | None,
    example: Batch,
    *,
    pipeline: int | None = None,
    replicas: int | None = None,
    shards: int | None = None,
    shard_mode: ShardMode | None = None,
    schedule: ScheduleName | None = None,
    micro_batches: int | None = None,
    stages_per_rank: int = 1,
    cuts: Sequence[str] | None = None,
    recompute: bool | None = None,
) -> Plan:
    """Work out who runs what. What is not given is chosen; no process group, socket or GPU is touched.

    Without any size, replicas are taken if the whole model fits each device; else the fewest shards or the fewest
    pipeline ranks that fit, whichever is predicted to be faster.

    cluster:          devices; text as `parse_cluster` reads it; None for this machine
    example:          a batch of at least two samples, for its shape
    stages_per_rank:  more than one interleaves
    cuts:             where stages begin, by name, instead of balancing them

    raises:  PlanError where no plan meets what is asked, LossError where the loss cannot be trained on,
             ClusterError where the text cannot be read
    """
    asked = Asked(
        pipeline=pipeline,
        replicas=replicas,
        shards=shards,
        shard_mode=shard_mode,
        schedule=schedule,
        micro_batches=micro_batches,
        stages_per_rank=stages_per_rank,
        cuts=None if cuts is None else tuple(cuts),
        recompute=recompute,
    )
    machines = _cluster(cluster)
    sketch = sketch_job(job, example)
    return choose(job, machines, sketch, asked, Analytic(job.precision))


@final
@dataclass(frozen=True)
class _Draft:
    layout: Layout
    memory_bytes: dict[int, int]  # by stage
    short_by: int
    shortage: str


@final
@dataclass(frozen=True)
class _Setting:
    """What all candidates share."""

    job: Job
    cluster: Cluster
    sketch: Sketch
    asked: Asked


def choose(job: Job, cluster: Cluster, sketch: Sketch, asked: Asked, cost: CostModel) -> Plan:
    """As `make_plan`, on a job that was read already, with any source of cost."""
    setting = _Setting(job, cluster, sketch, asked)
    candidates = meshes(len(cluster.devices), asked.pipeline_ranks, asked.replicas, asked.shards)
    lost: list[Alternative] = []
    fitting: list[_Draft] = []
    short: list[_Draft] = []
    for mesh in candidates:
        if any(draft.layout.mesh.kind == mesh.kind for draft in fitting):
            continue  # a simpler one of this kind fits
        refused = _refused(mesh, setting)
        draft = None if refused else _first_that_fits(mesh, setting)
        if draft is not None and draft.short_by <= 0:
            fitting.append(draft)
            continue
        lost.append(Alternative(name=str(mesh), reason=refused if draft is None else draft.shortage))
        short += [] if draft is None else [draft]
    if fitting:
        return _best(
            [_plan(draft, setting, cost) for draft in fitting], [str(draft.layout.mesh) for draft in fitting], lost
        )
    if short and len(candidates) == 1:
        # The user decided; an estimate does not forbid.
        return _plan(short[0], setting, cost, f"predicted to run out of memory: {short[0].shortage}")
    raise PlanError(_no_plan(cluster, lost))


def _best(plans: Sequence[Plan], names: Sequence[str], lost: Sequence[Alternative]) -> Plan:
    """Replicas where they fit, else the plan that is predicted to be fastest; with all that were not chosen."""
    replicated = plans[0].pipeline_ranks == plans[0].shards == 1
    best = plans[0] if replicated else min(plans, key=lambda plan: plan.step_seconds or 0.0)
    others = [
        Alternative(name=name, reason=_compared(plan, best))
        for name, plan in zip(names, plans, strict=True)
        if plan is not best
    ]
    return replace(best, alternatives=(*lost, *others))


def _compared(other: Plan, best: Plan) -> str:
    if other.step_seconds is None or best.step_seconds is None:
        return "it fits, too, but is no simpler"
    return f"predicted {other.step_seconds:.3g} s a step, against {best.step_seconds:.3g} s"


def _cluster(cluster: Cluster | str | None) -> Cluster:
    if cluster is None:
        return local_cluster()
    return parse_cluster(cluster) if isinstance(cluster, str) else cluster


def _refused(mesh: Mesh, setting: _Setting) -> str:
    """Why `mesh` cannot be, whatever the memory; "" where it can."""
    job, sketch, asked = setting.job, setting.sketch, setting.asked
    fewest = mesh.data_ranks * (asked.micro_batches or 1)
    split = fewest > 1
    weighed = sketch.weighing
    if mesh.pipeline > 1 and isinstance(sketch.graph, Refusal):
        return f"the model cannot be cut: {sketch.graph}; replicas and shards run it as it is"
    if isinstance(sketch.graph, Chain) and asked.cuts is None and mesh.pipeline > 1:
        stages, most = mesh.pipeline * asked.stages_per_rank, len(sketch.graph.segments)
        if stages > most:
            return f"{stages} stages, but the model has {most} segments; use at most {most // asked.stages_per_rank}"
    if job.couple == "batch" and split:
        return 'the job says couple="batch": its batch is not split; plan with 1 replica, 1 shard and 1 micro-batch'
    if job.batch_size < fewest:
        return (
            f"batch_size {job.batch_size} is smaller than {mesh.data_ranks} data ranks x {asked.micro_batches or 1} "
            f"micro-batches = {fewest}; raise batch_size, or plan with fewer of them"
        )
    if isinstance(weighed, Refusal) and split:
        return str(weighed)
    if sketch.optimizer.problem and (mesh.pipeline > 1 or mesh.shards > 1):
        return f"the optimizer cannot step a part of the parameters by itself: {sketch.optimizer.problem}"
    if mesh.shards > 1 and not sketch.optimizer.elementwise:
        return "the optimizer steps the rows of a matrix together, so that no parameter can be sharded"
    return ""


def _first_that_fits(mesh: Mesh, setting: _Setting) -> _Draft:
    """The first layout of `mesh` that fits its devices; else the one that is short by least."""
    drafts = []
    for layout in _layouts(mesh, _sections(mesh, setting), setting):
        drafts.append(_draft(layout, setting))
        if drafts[-1].short_by <= 0:
            return drafts[-1]
    return min(drafts, key=lambda draft: draft.short_by)


def _sections(mesh: Mesh, setting: _Setting) -> tuple[Section, ...]:
    chain = setting.sketch.graph
    if not isinstance(chain, Chain):
        return ()
    return cut_into_sections(chain, _bounds(mesh, chain, setting))


def _bounds(mesh: Mesh, chain: Chain, setting: _Setting) -> Sequence[int]:
    if mesh.pipeline == 1:
        return (0,)
    if setting.asked.cuts is not None:
        return named_positions(setting.asked.cuts, chain)
    ranks = [slowest_device(setting.cluster, mesh, rank) for rank in range(mesh.pipeline)]
    speeds = [device.flops_per_second[setting.job.precision] for device in ranks]
    return place_cuts(chain, speeds * setting.asked.stages_per_rank)


def _layouts(mesh: Mesh, sections: tuple[Section, ...], setting: _Setting) -> Iterator[Layout]:
    """Fastest first: recomputing costs most, gathering each time less, small micro-batches least."""
    asked = setting.asked
    modes: list[ShardMode] = ["gathered", "regathered"] if mesh.shards > 1 else ["gathered"]
    for recompute in [False, True] if asked.recompute is None else [asked.recompute]:
        for mode in modes if asked.shard_mode is None else [asked.shard_mode]:
            for micro_batches in _micro_batches(mesh, setting):
                yield Layout(
                    mesh=mesh,
                    sections=sections,
                    schedule=asked.schedule_name,
                    micro_batches=micro_batches,
                    samples=ceil(ceil(setting.job.batch_size / mesh.data_ranks) / micro_batches),
                    shard_mode=mode,
                    recompute=recompute,
                )


def _micro_batches(mesh: Mesh, setting: _Setting) -> list[int]:
    """Counts to try: enough to fill a pipeline, then smaller micro-batches."""
    sketch, asked = setting.sketch, setting.asked
    if asked.micro_batches is not None:
        return [asked.micro_batches]
    if setting.job.couple == "batch" or isinstance(sketch.weighing, Refusal):
        return [1]
    most = setting.job.batch_size // mesh.data_ranks
    counts = [min(most, PER_RANK * mesh.pipeline if mesh.pipeline > 1 else 1)]
    while counts[-1] < most and isinstance(sketch.graph, Chain):
        counts.append(min(most, 2 * counts[-1]))
    return counts


def _draft(layout: Layout, setting: _Setting) -> _Draft:
    mesh = layout.mesh
    found = memory_of(layout, setting.sketch, setting.job.precision)
    memory_bytes = {stage: memory.total for stage, memory in found.items()}
    needed = [sum(memory_bytes[stage] for stage in layout.stages_of(rank)) for rank in range(mesh.pipeline)]
    short_by, worst = max((size - _usable(setting.cluster, mesh, rank), rank) for rank, size in enumerate(needed))
    one_each = layout.stages == mesh.pipeline
    where = "it" if mesh.pipeline == 1 else f"stage {worst}" if one_each else f"pipeline rank {worst}"
    return _Draft(layout, memory_bytes, short_by, f"{where} is short by {size_text(max(0, short_by))}")


def _usable(cluster: Cluster, mesh: Mesh, rank: int) -> int:
    own = cluster.devices[rank * mesh.data_ranks : (rank + 1) * mesh.data_ranks]
    return int(USABLE * min(device.memory_bytes for device in own))


def _plan(draft: _Draft, setting: _Setting, cost: CostModel, *notes: str) -> Plan:
    layout, job, sketch = draft.layout, setting.job, setting.sketch
    return Plan(
        cluster=setting.cluster.text,
        devices=len(setting.cluster.devices),
        replicas=layout.mesh.replicas,
        shards=layout.mesh.shards,
        stages=describe(layout, sketch, draft.memory_bytes),
        schedule=layout.schedule,
        micro_batches=layout.micro_batches,
        shard_mode=layout.shard_mode,
        recompute=layout.recompute and layout.stages == 1,
        precision=job.precision,
        batch_size=job.batch_size,
        weighting=weighting_of(sketch),
        sample_weight=sample_weight_of(layout, sketch),
        fingerprint=sketch.graph.graph.fingerprint if isinstance(sketch.graph, Chain) else "",
        notes=(*notes, *notes_of(layout, sketch)),
        step_seconds=step_seconds(layout, sketch, setting.cluster, cost),
    )


def _no_plan(cluster: Cluster, lost: Sequence[Alternative]) -> str:
    if len(lost) == 1:
        return f"no plan for {cluster.text} as {lost[0].name}: {lost[0].reason}"
    lines = "\n".join(f"  {one.name}: {one.reason}" for one in lost)
    return f"no plan for {cluster.text}:\n{lines}\nadd devices, or devices with more memory"
