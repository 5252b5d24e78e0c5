"""How much memory each stage of a layout takes."""

from collections.abc import Iterable, Sequence

from shardwise.cost import Memory, StageBytes, rank_memory
from shardwise.graph import Segment
from shardwise.job import Precision
from shardwise.plan.layout import Layout, make_schedule
from shardwise.plan.sections import Section, bytes_sent
from shardwise.plan.sketch import Sketch
from shardwise.schedule import Links
from shardwise.schedule.actions import Action, Forward

CAST_SHARE = 2  # of a parameter of 4 bytes, each micro-batch in flight keeps a copy of 2 in half precision


def memory_of(layout: Layout, sketch: Sketch, precision: Precision) -> dict[int, Memory]:
    """The memory of each stage at the peak of its rank."""
    kept = _stage_bytes(layout, sketch, precision)
    memory: dict[int, Memory] = {}
    for rank, actions in enumerate(_until_full(layout)):
        own = {stage: kept[stage] for stage in layout.stages_of(rank)}
        memory |= rank_memory(own, actions, layout.mesh.shards, layout.shard_mode)
    return memory


def _until_full(layout: Layout) -> Sequence[Sequence[Action]]:
    """The actions of each rank, as far as they say what it holds: a step of many micro-batches need not be listed."""
    stages, micro_batches = layout.stages, layout.micro_batches
    match layout.schedule:
        case "gpipe":
            held = [micro_batches] * stages
        case "1f1b":
            held = [min(micro_batches, stages - stage) for stage in range(stages)]
        case "interleaved-1f1b":
            enough = min(micro_batches, 4 * layout.mesh.pipeline)
            return make_schedule(layout, Links.chain(stages), micro_batches=enough).ranks
    return [[Forward(stage, number) for number in range(count)] for stage, count in enumerate(held)]


def _stage_bytes(layout: Layout, sketch: Sketch, precision: Precision) -> list[StageBytes]:
    if not layout.sections:
        return [_held(sketch, sketch.tensors)]
    read = {name for section in layout.sections for name in _read(section)}
    stages = []
    for number, section in enumerate(layout.sections):
        # What no stage reads is kept by the first one.
        rest = [name for name in sketch.tensors if name not in read] if number == 0 else []
        stages.append(_of_section(layout, sketch, precision, number, section, [*_read(section), *rest]))
    return stages


def _read(section: Section) -> tuple[str, ...]:
    return (*section.ports.parameters, *section.ports.buffers)


def _of_section(
    layout: Layout, sketch: Sketch, precision: Precision, number: int, section: Section, names: Sequence[str]
) -> StageBytes:
    scale = layout.samples / sketch.samples
    again = [section.segments[at] for at in section.again] if layout.recompute else []
    kept = [segment for segment in section.segments if segment not in again]
    saved = section.saved_by_others + sum(segment.bytes_in for segment in again) if again else section.saved

    def cast(segments: Sequence[Segment]) -> int:
        names = {name for segment in segments for name in segment.parameters}
        return 0 if precision == "fp32" else sum(sketch.tensors[name] for name in names) // CAST_SHARE

    return _held(
        sketch,
        names,
        largest=max(sum(sketch.tensors[name] for name in segment.parameters) for segment in section.segments),
        activations=round(scale * (saved + section.bytes_in)) + cast(kept),
        working=max((round(scale * segment.saved_bytes) + cast([segment]) for segment in again), default=0),
        sent=round(scale * bytes_sent(layout.sections, number)),
    )


def _held(
    sketch: Sketch, names: Iterable[str], *, largest: int = 0, activations: int = 0, working: int = 0, sent: int = 0
) -> StageBytes:
    names = list(names)
    return StageBytes(
        parameters=sum(sketch.tensors[name] for name in names),
        gradients=sum(sketch.gradients.get(name, 0) for name in names),
        optimizer=sum(sketch.optimizer.bytes_of.get(name, 0) for name in names),
        largest=largest,
        activations=activations,
        working=working,
        sent=sent,
    )
