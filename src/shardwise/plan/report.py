"""A plan for people: stages, mesh, schedule, notes, and what was not chosen."""

from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from shardwise.plan.plan import Plan


def report(plan: Plan) -> RenderableType:
    """Everything that a plan says, for rich to draw; `as_text` gives plain text."""
    parts: list[RenderableType] = [Text(_headline(plan)), _stages(plan), Text(_how(plan))]
    parts += [Text(f"note: {note}") for note in plan.notes]
    parts += [Text(f"not chosen: {one.name}: {one.reason}") for one in plan.alternatives]
    return Group(*parts)


def as_text(plan: Plan, width: int = 120) -> str:
    """The report as plain text, without colours."""
    console = Console(width=width, color_system=None, force_terminal=False)
    with console.capture() as captured:
        console.print(report(plan))
    return captured.get()


def _headline(plan: Plan) -> str:
    sizes = [
        (plan.pipeline_ranks, "pipeline ranks"),
        (plan.replicas, "replicas"),
        (plan.shards, f"shards ({plan.shard_mode})"),
    ]
    mesh = " x ".join(f"{size} {name}" for size, name in sizes if size > 1) or "one device"
    time = "" if plan.step_seconds is None else f", predicted {plan.step_seconds:.3g} s a step"
    return f"{plan.cluster}: {mesh}{time}"


def _how(plan: Plan) -> str:
    sizes = plan.micro_batch_sizes()[0]
    spread = f"{sizes[0]}" if sizes[0] == sizes[-1] else f"{sizes[-1]} to {sizes[0]}"
    schedule = f"{plan.schedule}, " if len(plan.stages) > 1 else ""  # of one stage, all are the same
    recompute = ", recomputes its blocks" if plan.recompute else ""
    return (
        f"batch of {plan.batch_size}: {_counted(plan.data_ranks, 'data rank')} x "
        f"{_counted(plan.micro_batches, 'micro-batch')} of {spread}; "
        f"{schedule}{plan.precision}, weighed: {plan.weighting}{recompute}"
    )


def _counted(count: int, thing: str) -> str:
    plural = f"{thing}es" if thing.endswith("ch") else f"{thing}s"
    return f"{count} {thing if count == 1 else plural}"


def _stages(plan: Plan) -> Table:
    table = Table(box=None, pad_edge=False)
    for name in ("stage", "rank", "from", "to"):
        table.add_column(name)
    for name in ("FLOPs", "memory", "sent", "recomputed"):
        table.add_column(name, justify="right")
    total = sum(stage.flops for stage in plan.stages)
    for number, stage in enumerate(plan.stages):
        table.add_row(
            str(number),
            str(stage.rank),
            stage.begins or "the start",
            stage.ends or "the end",
            f"{stage.flops / total:.0%}" if total else "unknown",
            size_text(stage.memory_bytes),
            size_text(stage.bytes_sent),
            f"{len(stage.recompute)} segments" if stage.recompute else "",
        )
    return table


def size_text(size_bytes: int) -> str:
    """Bytes in the unit that people would use: 4.2 GiB, 310 KiB."""
    size, units = float(size_bytes), ["bytes", "KiB", "MiB", "GiB"]
    while size >= 1024 and len(units) > 1:
        size, units = size / 1024, units[1:]
    return f"{size:.0f} {units[0]}" if units[0] == "bytes" else f"{size:.1f} {units[0]}"
