"""A schedule in words, and a timeline as a staircase."""

from collections.abc import Iterator

from shardwise.schedule.actions import Backward, Compute, Forward
from shardwise.schedule.lists import Schedule
from shardwise.schedule.timeline import Span, Timeline


def show(schedule: Schedule) -> str:
    """What each rank computes, in order: `stage 0: F0 F1 B0 B1`, where the number is the micro-batch.

    Where a rank has several stages, the stage stands in front: `rank 0: F0.0 F2.0` runs stages 0 and 2.
    """
    return "\n".join(
        f"{name}: " + " ".join(_label(schedule, action) for action in actions if isinstance(action, Forward | Backward))
        for name, actions in zip(_row_names(schedule), schedule.ranks, strict=True)
    )


def draw(timeline: Timeline, *, column_seconds: float | None = None) -> str:
    """A staircase: a row per rank, a column per `column_seconds`, each showing what runs in its middle.

        time      0    1    2    3    4    5
        stage 0   F0   .    .    B0   --         `--`: still the same, `.`: waiting

    column_seconds:  without it, the shortest forward or backward
    """
    computes = [[span for span in spans if isinstance(span.action, Forward | Backward)] for spans in timeline.spans]
    column = column_seconds or min(span.end_seconds - span.start_seconds for spans in computes for span in spans)
    columns = max(1, round(timeline.step_seconds / column)) if column > 0 else 1
    rows = [["time", *(str(index) for index in range(columns))]]
    for name, spans in zip(_row_names(timeline.schedule), computes, strict=True):
        rows.append([name, *_cells(timeline.schedule, spans, column, columns)])
    first = max(len(row[0]) for row in rows) + 3
    rest = max(len(cell) for row in rows for cell in row[1:]) + 3
    return "\n".join((row[0].ljust(first) + "".join(cell.ljust(rest) for cell in row[1:])).rstrip() for row in rows)


def _cells(schedule: Schedule, spans: list[Span], column: float, columns: int) -> Iterator[str]:
    previous: Span | None = None
    for index in range(columns):
        middle = (index + 0.5) * column
        running = next((span for span in spans if span.start_seconds <= middle < span.end_seconds), None)
        if running is None or not isinstance(running.action, Forward | Backward):
            yield "."
        else:
            yield "--" if running is previous else _label(schedule, running.action)
        previous = running


def _row_names(schedule: Schedule) -> list[str]:
    if _one_stage_a_rank(schedule):
        return [f"stage {schedule.placement.index(rank)}" for rank in range(len(schedule.ranks))]
    return [f"rank {rank}" for rank in range(len(schedule.ranks))]


def _label(schedule: Schedule, compute: Compute) -> str:
    letter = "F" if isinstance(compute, Forward) else "B"
    stage = "" if _one_stage_a_rank(schedule) else f"{compute.stage}."
    return f"{letter}{stage}{compute.micro_batch}"


def _one_stage_a_rank(schedule: Schedule) -> bool:
    return schedule.stages == len(schedule.ranks)
