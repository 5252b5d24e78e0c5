"""A layout as the stages of a plan, with the memory and the time that they will take."""

from collections.abc import Mapping, Sequence

from shardwise.cluster import Cluster, Device
from shardwise.cost import CostModel, Memory, rank_memory
from shardwise.graph import Chain, Ports, cut
from shardwise.job import Precision
from shardwise.plan.layout import Layout, bytes_sent, recomputed, segment_of, stage_bytes
from shardwise.plan.mesh import Mesh
from shardwise.plan.plan import Stage
from shardwise.plan.sketch import Sketch
from shardwise.schedule import Links, Schedule, StageCosts, gpipe, interleaved_one_f_one_b, one_f_one_b, simulate
from shardwise.schedule.actions import TransferKind


def describe(layout: Layout, sketch: Sketch, precision: Precision) -> tuple[Stage, ...]:
    """The stages of `layout`, with what they compute, hold and send."""
    memory = memory_of(layout, sketch, precision)
    if not isinstance(sketch.graph, Chain):
        return (Stage(begins="", ends="", rank=0, flops=0, memory_bytes=memory[0].total, bytes_sent=0),)
    graph, scale = sketch.graph.graph, layout.samples / sketch.samples
    ports = cut(sketch.graph, layout.bounds)
    sent = bytes_sent(sketch.graph, ports)
    names = {position: name for name, position in sketch.graph.cuts.items()}
    stages = []
    for number, port in enumerate(ports):
        ops = graph.ops[port.segments[0].start : port.segments[-1].stop]
        segments = [segment_of(sketch.graph, part) for part in port.segments]
        calls = [op.calls[-1] for op in ops if op.calls]
        flops = sum(op.flops_forward + op.flops_backward for op in ops)
        stages.append(
            Stage(
                begins=names[layout.bounds[number]] if number else "",
                ends=calls[-1] if calls else "loss",
                rank=layout.rank_of(number),
                recompute=recomputed(segments) if layout.recompute and len(ports) > 1 else (),
                flops=round(scale * flops),
                memory_bytes=memory[number].total,
                bytes_sent=round(scale * sum(size for (source, _), size in sent.items() if source == number)),
            )
        )
    return tuple(stages)


def memory_of(layout: Layout, sketch: Sketch, precision: Precision) -> dict[int, Memory]:
    """The memory of each stage at the peak of its rank."""
    kept = stage_bytes(layout, sketch, precision)
    # Once the pipeline is full, 1F1B holds no more: a long step need not be listed.
    enough = layout.micro_batches if layout.schedule == "gpipe" else min(layout.micro_batches, 4 * layout.mesh.pipeline)
    schedule = make_schedule(layout, Links.chain(len(layout.bounds)), micro_batches=enough)
    memory: dict[int, Memory] = {}
    for rank, actions in enumerate(schedule.ranks):
        own = {stage: kept[stage] for stage in range(len(kept)) if layout.rank_of(stage) == rank}
        memory |= rank_memory(own, actions, layout.mesh.shards, layout.shard_mode)
    return memory


def make_schedule(layout: Layout, links: Links, *, micro_batches: int) -> Schedule:
    stages = len(layout.bounds)
    match layout.schedule:
        case "gpipe":
            return gpipe(stages=stages, micro_batches=micro_batches, links=links)
        case "1f1b":
            return one_f_one_b(stages=stages, micro_batches=micro_batches, links=links)
        case "interleaved-1f1b":
            return interleaved_one_f_one_b(
                stages=stages, ranks=layout.mesh.pipeline, micro_batches=micro_batches, links=links
            )


def step_seconds(layout: Layout, sketch: Sketch, cluster: Cluster, cost: CostModel) -> float | None:
    """The predicted time of one step; None where nothing was captured."""
    if not isinstance(sketch.graph, Chain):
        return None
    ports = cut(sketch.graph, layout.bounds)
    schedule = make_schedule(layout, _links(ports), micro_batches=layout.micro_batches)
    return simulate(schedule, _costs(layout, sketch, ports, cluster, cost)).step_seconds


def slowest_device(cluster: Cluster, mesh: Mesh, pipeline_rank: int) -> Device:
    """Of the devices that run the stages of one pipeline rank, the one with least FLOPs."""
    own = cluster.devices[pipeline_rank * mesh.data_ranks : (pipeline_rank + 1) * mesh.data_ranks]
    return min(own, key=lambda device: max(device.flops_per_second.values()))


def _links(ports: Sequence[Ports]) -> Links:
    activations = {(source, target) for target, port in enumerate(ports) for source in port.sources.values()}
    gradients = {(target, port.sources[name]) for target, port in enumerate(ports) for name in port.differentiable}
    batch = {stage for stage, port in enumerate(ports) if stage and port.fields}
    return Links(activations=frozenset(activations), gradients=frozenset(gradients), batch=frozenset(batch))


def _costs(layout: Layout, sketch: Sketch, ports: Sequence[Ports], cluster: Cluster, cost: CostModel) -> StageCosts:
    assert isinstance(sketch.graph, Chain)
    mesh, scale = layout.mesh, layout.samples / sketch.samples
    forwards, backwards, reductions = [], [], []
    for number, port in enumerate(ports):
        rank = layout.rank_of(number)
        device = slowest_device(cluster, mesh, rank)
        segments = [segment_of(sketch.graph, ops) for ops in port.segments]
        forward = sum(cost.forward_seconds(segment, device, scale) for segment in segments)
        backward = sum(cost.backward_seconds(segment, device, scale) for segment in segments)
        peers = range(rank * mesh.data_ranks, (rank + 1) * mesh.data_ranks)
        reduced = sum(sketch.gradients.get(name, 0) for name in port.parameters)
        reduction = cost.reduction_seconds(reduced, len(peers), cluster.link(peers))
        # What is gathered each time travels once in forward and once in backward, half of a reduction each.
        gathering = reduction / 2 if mesh.shards > 1 and layout.shard_mode == "regathered" else 0.0
        forwards.append(forward + gathering)
        again = [segments[at] for at in recomputed(segments)] if layout.recompute else []
        backwards.append(backward + gathering + sum(cost.forward_seconds(segment, device, scale) for segment in again))
        reductions.append(reduction)
    wire = cluster.link(range(0, len(cluster.devices), mesh.data_ranks))
    latency = cost.transfer_seconds(0, wire)
    return StageCosts(
        forwards=tuple(forwards),
        backwards=tuple(backwards),
        reductions=tuple(reductions),
        link_bytes=_link_bytes(sketch.graph, ports, scale),
        latency_seconds=latency,
        bytes_per_second=1e9 / (cost.transfer_seconds(10**9, wire) - latency),
    )


def _link_bytes(chain: Chain, ports: Sequence[Ports], scale: float) -> Mapping[tuple[TransferKind, int, int], int]:
    sizes: dict[tuple[TransferKind, int, int], int] = {}
    for (source, target), size in bytes_sent(chain, ports).items():
        sizes["activation", source, target] = sizes["gradient", target, source] = round(scale * size)
    return sizes
