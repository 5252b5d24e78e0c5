"""Make a plan: try the arrangements of the devices in order, and take the first that fits their memory."""

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
from shardwise.plan.layout import Layout
from shardwise.plan.mesh import Mesh, meshes
from shardwise.plan.notes import notes_of, weighting_of
from shardwise.plan.plan import Alternative, Plan, ScheduleName, ShardMode, Stage
from shardwise.plan.prediction import describe, slowest_device, step_seconds
from shardwise.plan.sketch import Sketch, sketch_job

USABLE = 0.92  # of a device's memory: the rest goes to its context, to communication, and to gaps between blocks
PER_RANK = 4  # micro-batches for each pipeline rank: 1F1B then waits a fifth of the time at most
COMPARED = 2  # losing plans whose time is predicted, too


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

    Without any size, replicas are taken if the whole model fits each device; else the fewest shards that fit, else the
    fewest pipeline ranks.

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


def choose(job: Job, cluster: Cluster, sketch: Sketch, asked: Asked, cost: CostModel) -> Plan:
    """As `make_plan`, on a job that was read already, with any source of cost."""
    candidates = meshes(len(cluster.devices), asked.pipeline_ranks, asked.replicas, asked.shards)
    lost: list[Alternative] = []
    nearest: _Draft | None = None
    for at, mesh in enumerate(candidates):
        refused = _refused(mesh, job, sketch, asked)
        if refused:
            lost.append(Alternative(name=str(mesh), reason=refused))
            continue
        draft = _first_that_fits(mesh, job, cluster, sketch, asked)
        if draft.short_by <= 0:
            found = _plan(draft, job, cluster, sketch, cost)
            return _with(found, lost + _slower(found, candidates[at + 1 :], job, cluster, sketch, asked, cost))
        lost.append(Alternative(name=str(mesh), reason=draft.shortage))
        nearest = draft if nearest is None or draft.short_by < nearest.short_by else nearest
    if nearest is not None and len(candidates) == 1:
        # The user decided; an estimate does not forbid.
        return _plan(nearest, job, cluster, sketch, cost, f"predicted to run out of memory: {nearest.shortage}")
    raise PlanError(_no_plan(cluster, lost))


def _cluster(cluster: Cluster | str | None) -> Cluster:
    if cluster is None:
        return local_cluster()
    return parse_cluster(cluster) if isinstance(cluster, str) else cluster


def _refused(mesh: Mesh, job: Job, sketch: Sketch, asked: Asked) -> str:
    """Why `mesh` cannot be, whatever the memory; "" where it can."""
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


@final
@dataclass(frozen=True)
class _Draft:
    layout: Layout
    stages: tuple[Stage, ...]
    short_by: int
    shortage: str


def _first_that_fits(mesh: Mesh, job: Job, cluster: Cluster, sketch: Sketch, asked: Asked) -> _Draft:
    """The first layout of `mesh` that fits its devices; else the one that is short by least."""
    bounds = _bounds(mesh, cluster, sketch, asked)
    nearest: _Draft | None = None
    for layout in _layouts(mesh, bounds, job, sketch, asked):
        draft = _draft(layout, job, cluster, sketch)
        if draft.short_by <= 0:
            return draft
        nearest = draft if nearest is None or draft.short_by < nearest.short_by else nearest
    assert nearest is not None, "there is always one layout"
    return nearest


def _bounds(mesh: Mesh, cluster: Cluster, sketch: Sketch, asked: Asked) -> tuple[int, ...]:
    if mesh.pipeline == 1:
        return (0,)
    assert isinstance(sketch.graph, Chain), "refused before"
    if asked.cuts is not None:
        return tuple(named_positions(asked.cuts, sketch.graph))
    ranks = [slowest_device(cluster, mesh, rank) for rank in range(mesh.pipeline)]
    speeds = [max(device.flops_per_second.values()) for device in ranks] * asked.stages_per_rank
    return place_cuts(sketch.graph, speeds)


def _layouts(mesh: Mesh, bounds: tuple[int, ...], job: Job, sketch: Sketch, asked: Asked) -> Iterator[Layout]:
    """Fastest first: recomputing costs most, gathering each time less, small micro-batches least."""
    modes: list[ShardMode] = ["gathered", "regathered"] if mesh.shards > 1 else ["gathered"]
    for recompute in [False, True] if asked.recompute is None else [asked.recompute]:
        for mode in modes if asked.shard_mode is None else [asked.shard_mode]:
            for micro_batches in _micro_batches(mesh, job, sketch, asked):
                yield Layout(
                    mesh=mesh,
                    bounds=bounds,
                    schedule=asked.schedule_name,
                    micro_batches=micro_batches,
                    samples=ceil(ceil(job.batch_size / mesh.data_ranks) / micro_batches),
                    shard_mode=mode,
                    recompute=recompute,
                )


def _micro_batches(mesh: Mesh, job: Job, sketch: Sketch, asked: Asked) -> list[int]:
    if asked.micro_batches is not None:
        return [asked.micro_batches]
    if job.couple == "batch" or isinstance(sketch.weighing, Refusal):
        return [1]
    most = job.batch_size // mesh.data_ranks
    counts = [min(most, PER_RANK * mesh.pipeline if mesh.pipeline > 1 else 1)]
    while counts[-1] < most and isinstance(sketch.graph, Chain):
        counts.append(min(most, 2 * counts[-1]))
    return counts


def _draft(layout: Layout, job: Job, cluster: Cluster, sketch: Sketch) -> _Draft:
    stages = describe(layout, sketch, job.precision)
    mesh = layout.mesh
    short_by, worst = max(
        (sum(stage.memory_bytes for stage in stages if stage.rank == rank) - _usable(cluster, mesh, rank), rank)
        for rank in range(mesh.pipeline)
    )
    where = f"stage {worst}" if len(stages) == mesh.pipeline > 1 else f"rank {worst}" if mesh.pipeline > 1 else "it"
    return _Draft(layout, stages, short_by, f"{where} is short by {_gib(short_by)}")


def _usable(cluster: Cluster, mesh: Mesh, rank: int) -> int:
    own = cluster.devices[rank * mesh.data_ranks : (rank + 1) * mesh.data_ranks]
    return int(USABLE * min(device.memory_bytes for device in own))


def _plan(draft: _Draft, job: Job, cluster: Cluster, sketch: Sketch, cost: CostModel, *notes: str) -> Plan:
    layout = draft.layout
    return Plan(
        cluster=cluster.text,
        devices=len(cluster.devices),
        replicas=layout.mesh.replicas,
        shards=layout.mesh.shards,
        stages=draft.stages,
        schedule=layout.schedule,
        micro_batches=layout.micro_batches,
        shard_mode=layout.shard_mode,
        recompute=layout.recompute and len(draft.stages) == 1,
        precision=job.precision,
        batch_size=job.batch_size,
        weighting=weighting_of(sketch),
        fingerprint=sketch.graph.graph.fingerprint if isinstance(sketch.graph, Chain) else "",
        notes=(*notes, *notes_of(layout, sketch)),
        step_seconds=step_seconds(layout, sketch, cluster, cost),
    )


def _slower(
    found: Plan, rest: Sequence[Mesh], job: Job, cluster: Cluster, sketch: Sketch, asked: Asked, cost: CostModel
) -> list[Alternative]:
    """The next plans that fit as well, with their predicted time."""
    others: list[Alternative] = []
    for mesh in rest:
        if len(others) == COMPARED or found.step_seconds is None:
            break
        if _refused(mesh, job, sketch, asked):
            continue
        draft = _first_that_fits(mesh, job, cluster, sketch, asked)
        seconds = step_seconds(draft.layout, sketch, cluster, cost)
        if draft.short_by <= 0 and seconds is not None:
            reason = f"predicted {seconds:.3g} s a step, against {found.step_seconds:.3g} s; simpler plans come first"
            others.append(Alternative(name=str(mesh), reason=reason))
    return others


def _with(plan: Plan, alternatives: Sequence[Alternative]) -> Plan:
    return replace(plan, alternatives=tuple(alternatives))


def _no_plan(cluster: Cluster, lost: Sequence[Alternative]) -> str:
    if len(lost) == 1:
        return f"no plan for {cluster.text} as {lost[0].name}: {lost[0].reason}"
    lines = "\n".join(f"  {one.name}: {one.reason}" for one in lost)
    return f"no plan for {cluster.text}:\n{lines}\nadd devices, or devices with more memory"


def _gib(size: int) -> str:
    return f"{size / 2**30:.1f} GiB" if size >= 2**30 / 10 else f"{size / 2**20:.1f} MiB"
