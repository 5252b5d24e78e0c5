"""A step in which no message waits for another, beside the same step played with its channels."""

import random

import pytest

from shardwise.schedule import Links, StageCosts, simulate
from shardwise.schedule.costs import unit_costs
from shardwise.schedule.earliest import earliest_seconds
from shardwise.schedule.orders import training_schedule

ORDERS = [
    ("gpipe", 3, 3),
    ("1f1b", 2, 2),
    ("1f1b", 5, 5),
    ("interleaved-1f1b", 4, 2),
    ("interleaved-1f1b", 9, 3),
]
orders = pytest.mark.parametrize(("name", "stages", "ranks"), ORDERS)


def played(name: str, stages: int, ranks: int, micro_batches: int, costs: StageCosts) -> float:
    links = Links.chain(stages)
    schedule = training_schedule(name, stages=stages, ranks=ranks, micro_batches=micro_batches, links=links)
    return simulate(schedule, costs).step_seconds


def uneven(stages: int, seed: int, wires: float) -> StageCosts:
    """A forward takes about a second, a backward two, a message about `wires` seconds."""
    draw = random.Random(seed)
    chain = range(1, stages)
    return StageCosts(
        forwards=tuple(draw.uniform(0.5, 1.5) for _ in range(stages)),
        backwards=tuple(draw.uniform(1, 3) for _ in range(stages)),
        reductions=tuple(draw.uniform(0, 2) for _ in range(stages)),
        link_bytes={("activation", at - 1, at): draw.randint(500, 1500) for at in chain}
        | {("gradient", at, at - 1): draw.randint(500, 1500) for at in chain},
        latency_seconds=0.1 * wires,
        bytes_per_second=1000 / (0.9 * wires) if wires else float("inf"),
    )


def test_one_rank_computes_one_after_the_other() -> None:
    seconds = earliest_seconds("1f1b", ranks=1, micro_batches=5, costs=unit_costs(1))

    assert seconds == 5 * 3


def test_1f1b_of_even_stages_adds_a_bubble_of_all_stages_but_one() -> None:
    seconds = earliest_seconds("1f1b", ranks=4, micro_batches=8, costs=unit_costs(4))

    assert seconds == (8 + 4 - 1) * 3


def test_a_message_is_on_the_way_once_in_each_direction() -> None:
    costs = StageCosts(forwards=(1.0, 1.0), backwards=(2.0, 2.0), latency_seconds=0.25)

    assert earliest_seconds("gpipe", ranks=2, micro_batches=1, costs=costs) == 6 + 2 * 0.25


@orders
@pytest.mark.parametrize("micro_batches", [1, 4, 9])
def test_even_stages_whose_messages_take_no_time_never_wait_for_a_channel(
    name: str, stages: int, ranks: int, micro_batches: int
) -> None:
    costs = unit_costs(stages)
    seconds = earliest_seconds(name, ranks=ranks, micro_batches=micro_batches, costs=costs)

    assert seconds == played(name, stages, ranks, micro_batches, costs)


@orders
def test_never_longer_than_what_is_played_and_close_to_it_where_messages_are_short(
    name: str, stages: int, ranks: int
) -> None:
    for seed in range(10):
        for wires in (0.05, 1.0):
            costs = uneven(stages, seed, wires)
            seconds = earliest_seconds(name, ranks=ranks, micro_batches=3 * ranks, costs=costs)
            real = played(name, stages, ranks, 3 * ranks, costs)

            assert seconds <= real + 1e-9
            if wires < 0.1:
                assert seconds >= 0.9 * real
