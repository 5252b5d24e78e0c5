"""From a job and a plan to the engine of this rank."""

from pathlib import Path
from typing import Any

from torch import distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from shardwise.cluster import local_cluster
from shardwise.errors import PlanError
from shardwise.job import Batch, Job, objective
from shardwise.plan import Plan, load, make_plan, positions
from shardwise.runtime import Engine, Mesh, Program, capture_chain, graph_program, make_mesh, whole_program
from shardwise.runtime.construction import Construction, construct
from shardwise.runtime.pretrained import fill, names_of
from shardwise.session.group import Membership


def agree_on_plan(job: Job, plan: Plan | Path | str, example: Batch | None, member: Membership) -> Plan:
    """The plan of this run: the one given, one from a file, or with "auto" one made for the devices that run.

    The first rank's counts, for plans that each rank made or read may differ.
    """
    made: list[Any] = [None]
    if member.rank == 0:
        made = [_attempt(job, plan, example, member)]
    if dist.is_initialized():
        dist.broadcast_object_list(made, src=0)
    if isinstance(made[0], Exception):
        raise made[0]
    assert isinstance(made[0], Plan)
    _check_device(made[0], member)
    return made[0]


def _attempt(job: Job, plan: Plan | Path | str, example: Batch | None, member: Membership) -> Plan | Exception:
    """On one rank; an error belongs to all of them."""
    try:
        if isinstance(plan, Plan):
            return _checked(plan, job)
        if plan != "auto":
            return _checked(load(plan), job)
        return make_plan(job, local_cluster(member.world_size), example)
    except Exception as error:
        return error


def _check_device(plan: Plan, member: Membership) -> None:
    """On every rank: one may lack a device that the first has."""
    if member.device.type == "cpu" and "cpu" not in plan.cluster:
        raise PlanError(
            f"the plan is for {plan.cluster}, but this machine has no CUDA device; make it for the CPU: "
            f'--cluster "{member.world_size}x cpu"'
        )


def _checked(plan: Plan, job: Job) -> Plan:
    for name in ("batch_size", "precision"):
        mine, theirs = getattr(job, name), getattr(plan, name)
        if mine != theirs:
            raise PlanError(
                f"the plan was made for {name} {theirs!r}, but the job says {mine!r}; make the plan again, or change "
                "the job"
            )
    return plan


def build_engine(job: Job, plan: Plan, example: Batch | None, member: Membership) -> Engine:
    """Build the model and keep this rank's part of it.

    example:  of the batch, for plans that cut the graph
    """
    mesh = make_mesh(plan, member.device)
    # One stage holds the whole model anyway.
    construction = Construction(job.build(), job.seed, None) if len(plan.stages) == 1 else construct(job)
    names = names_of(construction.model)
    program = _program(job, plan, construction, example, mesh, member)
    if job.weights is not None:
        fill({**program.parameters, **program.buffers}, names, Path(job.weights))
    return Engine(job, plan, program, mesh)


def _program(
    job: Job, plan: Plan, construction: Construction, example: Batch | None, mesh: Mesh, member: Membership
) -> Program:
    model = construction.model
    if len(plan.stages) == 1:
        return whole_program(job, plan, model, _shards(plan, member), member.device)
    agreed = _agree_on_example(example, member)
    found = capture_chain(objective(job.loss), model, agreed, job.precision, member.device, "weighed")
    bounds = positions(plan, found.chain)
    return graph_program(job, plan, found, bounds, construction, mesh, _shards(plan, member), member.device)


def _shards(plan: Plan, member: Membership) -> DeviceMesh | None:
    if plan.shards == 1:
        return None
    shape = (plan.pipeline_ranks, plan.replicas, plan.shards)
    mesh = init_device_mesh(member.device.type, shape, mesh_dim_names=("pipeline", "replica", "shard"))
    return mesh["shard"] if plan.replicas == 1 else mesh["replica", "shard"]


def _agree_on_example(example: Batch | None, member: Membership) -> Batch:
    """An example on every rank: the first rank's stands in where a rank was given none."""
    given: list[Any] = [example if member.rank == 0 else None]
    if dist.is_initialized():
        dist.broadcast_object_list(given, src=0)
    return given[0]
