"""When a step ends at the earliest: if messages never wait for each other, only computations for messages.

As a step is played in `timeline`, but without its channels, so that it takes a hundredth of the time; never longer than
what is played there, and seldom much shorter.
"""

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import final

from shardwise.schedule.actions import Compute, Forward, Transfer
from shardwise.schedule.costs import StageCosts
from shardwise.schedule.orders import training_orders


def earliest_seconds(name: str, *, ranks: int, micro_batches: int, costs: StageCosts) -> float:
    """Of one step of a plain chain of stages, in the order of the schedule `name`, stage s on rank s % ranks."""
    stages = len(costs.forwards)
    order = _order(name, stages, ranks, micro_batches)
    durations = [seconds for both in zip(costs.forwards, costs.backwards, strict=True) for seconds in both]
    wires = _wires(stages, ranks, costs)
    rank_of = [stage % ranks for stage in range(stages) for _ in range(2)]
    clocks = [0.0] * ranks
    ends = [0.0] * (len(order.kinds) + 1)  # the last one belongs to nothing, and stays
    for at, (kind, needed) in enumerate(zip(order.kinds, order.needed, strict=True)):
        start, rank = ends[needed] + wires[kind], rank_of[kind]
        clocks[rank] = ends[at] = max(start, clocks[rank]) + durations[kind]
    reduced = [0.0] * ranks
    for stage, last in order.last_backwards:
        rank = stage % ranks
        reduced[rank] = max(reduced[rank], ends[last]) + costs.reduce_seconds(stage)
    return max(clocks + reduced)


@final
@dataclass(frozen=True, slots=True)
class _Order:
    """All that is computed, each behind what it needs.

    kinds:           2 s for a forward of stage s, 2 s + 1 for a backward
    needed:          the number of what sends it a message, -1 where nothing does
    last_backwards:  by stage, in the order in which they come
    """

    kinds: "array[int]"
    needed: "array[int]"
    last_backwards: tuple[tuple[int, int], ...]


@lru_cache(maxsize=64)
def _order(name: str, stages: int, ranks: int, micro_batches: int) -> _Order:
    todo = [
        list(reversed(order))
        for order in training_orders(name, stages=stages, ranks=ranks, micro_batches=micro_batches)
    ]
    number: dict[tuple[int, int], int] = {}
    kinds, needed = array("l"), array("l")
    while any(todo):
        for own in todo:
            while own and (sender := _sender(own[-1], stages, number)) is not None:
                compute = own.pop()
                kind = _kind(compute)
                number[kind, compute.micro_batch] = len(kinds)
                kinds.append(kind)
                needed.append(sender)
    last = {kind // 2: at for at, kind in enumerate(kinds) if kind % 2}
    return _Order(kinds, needed, tuple(sorted(last.items(), key=lambda entry: entry[1])))


def _kind(compute: Compute) -> int:
    return 2 * compute.stage + (not isinstance(compute, Forward))


def _sender(compute: Compute, stages: int, number: dict[tuple[int, int], int]) -> int | None:
    """The number of what `compute` has its message from: -1 where it needs none, None where that is still to come."""
    kind = _kind(compute)
    sender = kind + 2 if kind % 2 else kind - 2
    if not 0 <= sender < 2 * stages:
        return -1
    return number.get((sender, compute.micro_batch))


def _wires(stages: int, ranks: int, costs: StageCosts) -> Sequence[float]:
    """Seconds of the message that each kind waits for."""
    seconds = [0.0] * (2 * stages)
    for stage in range(1, stages):
        if ranks > 1:
            seconds[2 * stage] = costs.transfer_seconds(Transfer("activation", 0, stage - 1, stage))
            seconds[2 * stage - 1] = costs.transfer_seconds(Transfer("gradient", 0, stage, stage - 1))
    return seconds
