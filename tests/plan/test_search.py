"""The search against brute force: every arrangement, every cut, every set of segments to recompute."""

from collections.abc import Iterator
from itertools import combinations, pairwise
from random import Random

import pytest

from shardwise.plan.case import Case, Split, in_flight, step_seconds
from shardwise.plan.fit import Fit, Sharding
from shardwise.plan.loads import Load, Loads, Shared
from shardwise.plan.search import search


def draw_loads(draw: Random, segments: int, speed: float, seed: int) -> Loads:
    own = Random(seed)  # the segments are the same for devices of every speed
    kinds = [
        Load(
            forward_seconds=own.choice([0.1, 0.5, 1.0, 2.0]) / speed,
            backward_seconds=own.choice([0.2, 1.0, 2.0, 3.0]) / speed,
            parameters=own.randint(0, 6),
            gradients=own.randint(0, 6),
            optimizer=own.randint(0, 12),
            enters=own.randint(1, 4),
            made=own.randint(0, 9),
            working=own.randint(0, 5),
        )
        for _ in range(own.randint(1, segments))
    ]
    readers = tuple(sorted(own.sample(range(segments), 2))) if segments > 1 else (0,)
    shared = [Shared(readers=readers, parameters=2, gradients=2, optimizer=4)] if own.random() < 0.3 else []
    return Loads([own.choice(kinds) for _ in range(segments)], shared)


def draw_cases(seed: int) -> dict[str, Case]:
    draw = Random(seed)
    segments, devices, batch = draw.randint(2, 6), draw.choice([1, 2, 3, 4]), draw.choice([4, 8])
    speeds = [1.0 if draw.random() < 0.7 else 0.5 for _ in range(devices)]
    room, latency, width = draw.randint(30, 160), draw.choice([0.0, 0.1]), draw.choice([2.0, 100.0])
    cases = {}
    for ranks in range(1, min(devices, segments) + 1):
        for per_rank in [1, 2] if 1 < ranks <= segments // 2 else [1]:
            for micro_batches in (1, 2, 4):
                if devices % ranks:
                    continue
                data_ranks = devices // ranks
                scale = batch / data_ranks / micro_batches
                own = [min(speeds[rank * data_ranks : (rank + 1) * data_ranks]) for rank in range(ranks)]
                cases[f"{ranks}x{per_rank} m{micro_batches}"] = Case(
                    schedule="interleaved-1f1b" if per_rank > 1 else draw.choice(["1f1b", "gpipe"]),
                    stages_per_rank=per_rank,
                    micro_batches=micro_batches,
                    loads=tuple(draw_loads(draw, segments, speed / scale, seed) for speed in own),
                    rooms=(room,) * ranks,
                    sharding=draw_sharding(draw, data_ranks),
                    recompute="all or none" if ranks == 1 else "as needed",
                    transfer=lambda size: latency + size / width,
                    gather=lambda size, n=data_ranks: (n - 1) * (latency + 0.1 * size / n),
                    reduce=lambda size, n=data_ranks: 0.05 * size * (n - 1) / n,
                    update=lambda size: 0.01 * size,
                    overlaps=False,
                )
    return cases


def draw_sharding(draw: Random, data_ranks: int) -> Sharding:
    if data_ranks == 1 or draw.random() < 0.4:
        return Sharding()
    return Sharding(data_ranks, draw.choice(["gathered", "regathered"]))


def brute_force(cases: dict[str, Case]) -> dict[str, float]:
    """The shortest step of each case by any cuts that fit; infinite where none do."""
    found = dict.fromkeys(cases, float("inf"))
    for name, case in cases.items():
        for inner in combinations(range(1, case.segments), case.stages - 1):
            bounds = (0, *inner, case.segments)
            fits = [least_fit(case, rank, list(pairwise(bounds))[rank :: case.ranks]) for rank in range(case.ranks)]
            if all(one is not None for one in fits):
                fitted = Split(case, bounds, tuple(one for one in fits if one is not None))
                found[name] = min(found[name], step_seconds(fitted))
    return found


def least_fit(case: Case, rank: int, stages: list[tuple[int, int]]) -> Fit | None:
    """Of all sets of units, of all sizes, the one that takes least time of those that fit."""
    found = [one for one in every_fit(case, rank, stages) if one.bytes <= case.rooms[rank]]
    return min(found, key=lambda one: sum(one.seconds), default=None)


def every_fit(case: Case, rank: int, stages: list[tuple[int, int]]) -> Iterator[Fit]:
    loads, held = case.loads[rank], in_flight(case)[rank]
    for size in range(1, case.segments + 1):
        if size & (size - 1) and size != max(last - first for first, last in stages):
            continue
        units = [
            (number, range(at, min(at + size, last)))
            for number, (first, last) in enumerate(stages)
            for at in range(first, last, size)
        ]
        sets = [s for count in range(len(units) + 1) for s in combinations(units, count)]
        for chosen in [[], units] if case.recompute == "all or none" else sets:
            yield by_hand(case, loads, stages, held, list(chosen))


def by_hand(
    case: Case, loads: Loads, stages: list[tuple[int, int]], held: tuple[int, ...], chosen: list[tuple[int, range]]
) -> Fit:
    total, momentary = 0, [load.working for first, last in stages for load in loads.each[first:last]]
    regions: list[tuple[range, ...]] = []
    for number, (first, last) in enumerate(stages):
        state = loads.state(first, last)
        shards = case.sharding.shards
        total += sum(-(-size // shards) for size in (state.parameters, state.gradients, state.optimizer))
        if shards > 1 and case.sharding.mode == "regathered":
            total += 3 * max(load.parameters for load in loads.each[first:last])
        elif shards > 1:
            total += state.parameters + state.gradients
        own = []
        for unit in (unit for at, unit in chosen if at == number):
            made = sum(load.made for load in loads.each[unit.start : unit.stop])
            enters = loads.each[unit.start].enters if unit.start > first else 0
            if made > enters:  # else it takes less to keep it
                own.append(unit)
                momentary.append(made + max(load.working for load in loads.each[unit.start : unit.stop]))
        kept = loads.each[first].enters + sum(load.made for load in loads.each[first:last])
        for unit in own:
            kept -= sum(load.made for load in loads.each[unit.start : unit.stop])
            kept += loads.each[unit.start].enters if unit.start > first else 0
        total += held[number] * kept
        regions.append(tuple(own))
    seconds = [sum(loads.forward_seconds(unit.start, unit.stop) for unit in own) for own in regions]
    return Fit(tuple(regions), tuple(seconds), total + max(momentary))


@pytest.mark.parametrize("seed", range(200))
def test_the_search_finds_what_brute_force_finds(seed):
    cases = draw_cases(seed)
    searched = search(cases)
    expected = brute_force(cases)
    least = min(expected.values())
    if least == float("inf"):
        assert searched.best is None
        assert searched.simplest is None
    else:
        assert searched.best is not None
        assert searched.best.seconds == pytest.approx(least, rel=1e-9)
        assert searched.simplest is not None
        assert searched.simplest.name == next(name for name, seconds in expected.items() if seconds <= 1.02 * least)
        assert searched.simplest.seconds == pytest.approx(expected[searched.simplest.name], rel=1e-9)
        for name, seconds in searched.slower.items():
            assert expected[name] >= seconds * (1 - 1e-9)
