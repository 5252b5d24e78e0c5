"""Where this rank stands in the mesh of a plan, and the process groups that it talks in."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from typing import final

import torch
from torch import distributed as dist

from shardwise.errors import PlanError
from shardwise.plan import Plan


@final
@dataclass(frozen=True, slots=True)
class Place:
    """Coordinates of a rank: rank = (pipeline * replicas + replica) * shards + shard."""

    pipeline: int
    replica: int
    shard: int


@final
@dataclass(frozen=True)
class Mesh:
    """The groups of this rank; None where it would be alone.

    pipeline:  the ranks that share its samples
    data:      that hold the same stages, and share the samples of a step: replicas x shards
    """

    plan: Plan
    rank: int
    place: Place
    device: torch.device
    pipeline: dist.ProcessGroup | None
    data: dist.ProcessGroup | None

    @property
    def data_rank(self) -> int:
        return self.place.replica * self.plan.shards + self.place.shard

    @property
    def pipeline_ranks(self) -> list[int]:
        """The global ranks of its pipeline, in order."""
        place = self.place
        return [rank_of(self.plan, p, place.replica, place.shard) for p in range(self.plan.pipeline_ranks)]


def rank_of(plan: Plan, pipeline: int, replica: int, shard: int) -> int:
    return (pipeline * plan.replicas + replica) * plan.shards + shard


def make_mesh(plan: Plan, device: torch.device) -> Mesh:
    """The mesh of `plan` over the default process group, which every rank must have joined (one rank alone need not).

    raises:  PlanError where the world has another size than the plan
    """
    world = dist.get_world_size() if dist.is_initialized() else 1
    if world != plan.devices:
        raise PlanError(
            f"the plan is for {plan.devices} devices, but {world} processes run; start it with "
            f"`shardwise train --devices {plan.devices}`, or make a plan for {world}"
        )
    rank = dist.get_rank() if dist.is_initialized() else 0
    place = Place(rank // (plan.replicas * plan.shards), rank // plan.shards % plan.replicas, rank % plan.shards)
    ranges = (range(plan.pipeline_ranks), range(plan.replicas), range(plan.shards))
    return Mesh(
        plan=plan,
        rank=rank,
        place=place,
        device=device,
        pipeline=_group(plan, rank, ranges, vary=(True, False, False)),
        data=_group(plan, rank, ranges, vary=(False, True, True)),
    )


def tied_groups(plan: Plan, owners: Sequence[tuple[int, ...]]) -> dict[tuple[int, ...], dist.ProcessGroup]:
    """For each set of pipeline ranks in `owners`: the group of those ranks in this rank's pipeline.

    Every rank must ask for the same sets in the same order.
    """
    rank = dist.get_rank()
    mine: dict[tuple[int, ...], dist.ProcessGroup] = {}
    for pipelines in dict.fromkeys(owners):
        for replica, shard in product(range(plan.replicas), range(plan.shards)):
            members = [rank_of(plan, pipeline, replica, shard) for pipeline in pipelines]
            group = dist.new_group(members)
            if rank in members:
                mine[pipelines] = group
    return mine


def _group(
    plan: Plan, rank: int, ranges: tuple[range, range, range], vary: tuple[bool, bool, bool]
) -> dist.ProcessGroup | None:
    """The group of the ranks that differ from this one only where `vary` says so. All groups are made, on all ranks."""
    mine = None
    fixed = [range(1) if free else values for values, free in zip(ranges, vary, strict=True)]
    for start in product(*fixed):
        free = [values if free else [at] for values, free, at in zip(ranges, vary, start, strict=True)]
        members = [rank_of(plan, *place) for place in product(*free)]
        if len(members) > 1:
            group = dist.new_group(members)
            if rank in members:
                mine = group
    return mine
