from dataclasses import replace
from itertools import accumulate, combinations, pairwise
from random import Random

import pytest
from plan_jobs import PLAN, batch, changed, job

from shardwise.errors import PlanError
from shardwise.graph import Chain
from shardwise.plan import positions
from shardwise.plan.cuts import least_bytes, place_cuts, slowest_stage
from shardwise.plan.sketch import sketch_job


@pytest.fixture(scope="module")
def chain() -> Chain:
    graph = sketch_job(job(), batch()).graph
    assert isinstance(graph, Chain)
    return graph


def best_by_trying_all(work: list[int], crossing: list[int], speeds: list[float]) -> tuple[float, float]:
    """The slowest stage and the bytes that cross, of the best way to share out: least time, then fewest bytes."""
    total = [0, *accumulate(work)]
    found = []
    for inner in combinations(range(1, len(work)), len(speeds) - 1):
        bounds = [0, *inner, len(work)]
        seconds = [(total[b] - total[a]) / speed for (a, b), speed in zip(pairwise(bounds), speeds, strict=True)]
        found.append((max(seconds), float(sum(crossing[at] for at in inner))))
    return min(found)


@pytest.mark.parametrize("seed", range(40))
def test_cuts_are_as_good_as_the_best_of_all(seed):
    draw = Random(seed)
    count = draw.randint(4, 9)
    work = [draw.randint(0, 5) for _ in range(count)]
    crossing = [draw.randint(1, 9) for _ in range(count)]
    speeds = [float(draw.choice([1, 1, 2])) for _ in range(draw.randint(1, 4))]
    total = [0, *accumulate(work)]
    slowest = slowest_stage(total, speeds)
    starts = least_bytes(total, crossing, speeds, slowest)
    bounds = [*starts, count]
    assert starts[0] == 0
    assert all(a < b for a, b in pairwise(bounds))
    seconds = [(total[b] - total[a]) / speed for (a, b), speed in zip(pairwise(bounds), speeds, strict=True)]
    crossed = float(sum(crossing[at] for at in starts[1:]))
    assert (max(seconds), crossed) == best_by_trying_all(work, crossing, speeds)


def test_equal_blocks_are_shared_out_evenly(chain):
    names = [chain.name(position) for position in place_cuts(chain, [1.0, 1.0])[1:]]
    assert names == ["before blocks.2"]


def test_more_stages_than_segments_says_how_many_would_do(chain):
    most = len(chain.segments)
    with pytest.raises(PlanError, match=f"the model has {most} segments; use at most {most} stages"):
        place_cuts(chain, [1.0] * (most + 1))
    assert len(place_cuts(chain, [1.0] * most)) == most


def test_positions_of_a_plan_are_where_its_stages_begin(chain):
    assert positions(PLAN, chain) == [0, chain.cuts["before blocks.2"]]


def test_a_cut_that_is_not_in_the_model_names_the_nearest(chain):
    first, last = PLAN.stages
    plan = changed(stages=(first, replace(last, begins="before block2")))
    with pytest.raises(PlanError, match=r'no cut "before block2"; the nearest are "before blocks\.'):
        positions(plan, chain)


def test_a_cut_that_is_like_no_other_shows_how_cuts_are_named(chain):
    first, last = PLAN.stages
    plan = changed(stages=(first, replace(last, begins="?")))
    with pytest.raises(PlanError, match="cuts are named like"):
        positions(plan, chain)
