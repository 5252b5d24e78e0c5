"""How long a step of a layout takes, by playing its schedule with the costs of its stages."""

from collections.abc import Mapping

from shardwise.cluster import Cluster, Device
from shardwise.cost import CostModel
from shardwise.plan.layout import Layout, make_schedule
from shardwise.plan.mesh import Mesh
from shardwise.plan.sections import Section, links_between
from shardwise.plan.sketch import Sketch
from shardwise.schedule import StageCosts, simulate
from shardwise.schedule.actions import TransferKind


def step_seconds(layout: Layout, sketch: Sketch, cluster: Cluster, cost: CostModel) -> float | None:
    """The predicted time of one step; None where nothing was captured.

    Once the pipeline is full each micro-batch adds the same time, so that a long step is played in part:
        t(m) = t(3p) + (m - 3p) (t(3p) - t(2p)) / p          m: micro-batches, p: pipeline ranks
    """
    if not layout.sections:
        return None
    costs = _costs(layout, sketch, cluster, cost)
    ranks, micro_batches = layout.mesh.pipeline, layout.micro_batches
    if micro_batches <= 3 * ranks:
        return _played(layout, costs, micro_batches)
    full, fuller = (_played(layout, costs, groups * ranks) for groups in (2, 3))
    return fuller + (micro_batches - 3 * ranks) * (fuller - full) / ranks


def slowest_device(cluster: Cluster, mesh: Mesh, pipeline_rank: int) -> Device:
    """Of the devices that run the stages of one pipeline rank, the one of the lowest peak."""
    own = cluster.devices[pipeline_rank * mesh.data_ranks : (pipeline_rank + 1) * mesh.data_ranks]
    return min(own, key=lambda device: max(device.flops_per_second.values()))


def _played(layout: Layout, costs: StageCosts, micro_batches: int) -> float:
    schedule = make_schedule(layout, links_between(layout.sections), micro_batches=micro_batches)
    return simulate(schedule, costs).step_seconds


def _costs(layout: Layout, sketch: Sketch, cluster: Cluster, cost: CostModel) -> StageCosts:
    scale = layout.samples / sketch.samples
    stages = [_stage(layout, sketch, cluster, cost, number) for number in range(layout.stages)]
    wire = cluster.link(range(0, len(cluster.devices), layout.mesh.data_ranks))
    latency = cost.transfer_seconds(0, wire)
    return StageCosts(
        forwards=tuple(forward for forward, _, _ in stages),
        backwards=tuple(backward for _, backward, _ in stages),
        reductions=tuple(reduction for _, _, reduction in stages),
        link_bytes=_link_bytes(layout.sections, scale),
        latency_seconds=latency,
        bytes_per_second=1e9 / (cost.transfer_seconds(10**9, wire) - latency),
    )


def _stage(
    layout: Layout, sketch: Sketch, cluster: Cluster, cost: CostModel, number: int
) -> tuple[float, float, float]:
    """Seconds of forward and backward of one micro-batch, and of the reduction at the end of the step."""
    mesh, section, rank = layout.mesh, layout.sections[number], layout.rank_of(number)
    device, scale = slowest_device(cluster, mesh, rank), layout.samples / sketch.samples
    forward = sum(cost.forward_seconds(segment, device, scale) for segment in section.segments)
    backward = sum(cost.backward_seconds(segment, device, scale) for segment in section.segments)
    if layout.recompute:
        backward += sum(cost.forward_seconds(section.segments[at], device, scale) for at in section.again)
    peers = range(rank * mesh.data_ranks, (rank + 1) * mesh.data_ranks)
    trained = sum(sketch.gradients.get(name, 0) for name in section.ports.parameters)
    reduction = cost.reduction_seconds(trained, len(peers), cluster.link(peers))
    if mesh.shards > 1 and layout.shard_mode == "regathered":
        # Gathered in forward and again in backward, and gradients shared out: half of a reduction each.
        shards = peers[: mesh.shards]
        half = cost.reduction_seconds(trained, len(shards), cluster.link(shards)) / 2
        return forward + half, backward + 2 * half, reduction
    return forward, backward, reduction


def _link_bytes(sections: tuple[Section, ...], scale: float) -> Mapping[tuple[TransferKind, int, int], int]:
    sizes: dict[tuple[TransferKind, int, int], int] = {}
    for target, section in enumerate(sections):
        for source, size in section.bytes_from.items():
            sizes["activation", source, target] = sizes["gradient", target, source] = round(scale * size)
    return sizes
