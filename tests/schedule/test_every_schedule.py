"""Every schedule is valid, and computes on unbuffered, untagged channels what one process computes."""

import random
from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from schedule_threads import run_in_sequence, run_in_threads

from shardwise.errors import ScheduleError
from shardwise.schedule import (
    Links,
    Schedule,
    StageCosts,
    forward_only,
    gpipe,
    interleaved_one_f_one_b,
    one_f_one_b,
    simulate,
    validate,
)
from shardwise.schedule.actions import Action, Exchange
from shardwise.schedule.costs import unit_costs


def skips(stages: int) -> Links:
    """A chain with long skips, whose batch goes to the last stage too."""
    chain = Links.chain(stages)
    activations = chain.activations | {(0, target) for target in (2, stages - 1) if 0 < target < stages}
    gradients = frozenset((target, source) for source, target in activations)
    return Links(activations=activations, gradients=gradients, batch=frozenset({stages - 1}) - {0})


def one_way_skips(stages: int) -> Links:
    """As `skips`, but the skipping values need no gradient, as masks do, and every stage needs the batch."""
    return Links(
        activations=skips(stages).activations,
        gradients=Links.chain(stages).gradients,
        batch=frozenset(range(1, stages)),
    )


LINKS: list[Callable[[int], Links]] = [Links.chain, skips, one_way_skips]


def micro_batch_counts(ranks: int) -> list[int]:
    """One, fewer than ranks, and an uneven number that fills the pipeline twice."""
    return sorted({1, ranks - 1, 2 * ranks + 1} - {0})


def check(schedule: Schedule) -> None:
    validate(schedule)
    assert run_in_threads(schedule) == run_in_sequence(schedule)


@pytest.mark.parametrize("links", LINKS)
@pytest.mark.parametrize("stages", range(2, 9))
@pytest.mark.parametrize("make", [gpipe, one_f_one_b, forward_only])
def test_a_stage_a_rank_computes_what_one_process_computes(make, stages, links):
    for micro_batches in micro_batch_counts(stages):
        check(make(stages=stages, micro_batches=micro_batches, links=links(stages)))


@pytest.mark.parametrize("links", LINKS)
@pytest.mark.parametrize("ranks", [2, 3, 4])
@pytest.mark.parametrize("make", [interleaved_one_f_one_b, forward_only])
def test_two_stages_a_rank_compute_what_one_process_computes(make, ranks, links):
    for micro_batches in micro_batch_counts(ranks):
        check(make(stages=2 * ranks, ranks=ranks, micro_batches=micro_batches, links=links(2 * ranks)))


@pytest.mark.parametrize("stages_a_rank", [2, 3, 4])
@pytest.mark.parametrize("ranks", range(1, 9))
def test_interleaving_is_valid_for_any_number_of_micro_batches(ranks, stages_a_rank):
    stages = ranks * stages_a_rank
    for micro_batches in micro_batch_counts(ranks):
        schedule = interleaved_one_f_one_b(stages=stages, ranks=ranks, micro_batches=micro_batches, links=skips(stages))
        validate(schedule)
        held = [simulate(schedule, unit_costs(stages)).in_flight(rank) for rank in range(ranks)]
        assert held == sorted(held, reverse=True)


@st.composite
def schedules(draw: st.DrawFn) -> Schedule:
    ranks, micro_batches = draw(st.integers(1, 4)), draw(st.integers(1, 6))
    make = draw(st.sampled_from([gpipe, one_f_one_b, forward_only, interleaved_one_f_one_b]))
    stages = 2 * ranks if make is interleaved_one_f_one_b else ranks
    pairs = [(source, target) for target in range(stages) for source in range(target)]
    activations = draw(st.frozensets(st.sampled_from(pairs))) if pairs else frozenset()
    gradients = draw(st.frozensets(st.sampled_from(sorted(activations)))) if activations else frozenset()
    batch = draw(st.frozensets(st.integers(1, stages - 1))) if stages > 1 else frozenset()
    links = Links(activations=activations, gradients=frozenset((t, s) for s, t in gradients), batch=batch)
    if make is interleaved_one_f_one_b:
        return make(stages=stages, ranks=ranks, micro_batches=micro_batches, links=links)
    return make(stages=stages, micro_batches=micro_batches, links=links)


@settings(max_examples=100, deadline=None)
@given(schedules())
def test_any_links_compute_what_one_process_computes(schedule: Schedule):
    check(schedule)


@settings(max_examples=100, deadline=None)
@given(schedules(), st.randoms(use_true_random=False))
def test_what_the_validator_lets_through_runs_and_what_it_calls_a_circle_does_not(schedule, chance):
    """Exchanges moved at random: the validator and the threads must agree on every list."""
    shaken = replace(schedule, ranks=tuple(tuple(_shaken(actions, chance)) for actions in schedule.ranks))
    try:
        validate(shaken)
    except ScheduleError as error:
        if "for ever" in str(error):
            with pytest.raises(ScheduleError, match=r"for ever|where rank|stopped with"):
                run_in_threads(shaken)
    else:
        assert run_in_threads(shaken) == run_in_sequence(shaken)


def _shaken(actions: tuple[Action, ...], chance: random.Random) -> Iterator[Action]:
    """Some exchanges split into sends and receives, some behind the action that follows them."""
    held: list[Action] = []
    for action in actions:
        if isinstance(action, Exchange) and chance.random() < 0.2:
            held.append(action)
            continue
        if isinstance(action, Exchange) and chance.random() < 0.3:
            yield Exchange(action.sends, ())
            yield Exchange((), action.receives)
        else:
            yield action
        yield from held
        held = []
    yield from held


def test_shaken_lists_are_of_both_kinds():
    """The test above would prove little if every shaken list were good, or every one bad."""
    verdicts = set()
    schedule = one_f_one_b(stages=3, micro_batches=3, links=skips(3))
    for seed in range(100):
        chance = random.Random(seed)
        shaken = replace(schedule, ranks=tuple(tuple(_shaken(actions, chance)) for actions in schedule.ranks))
        try:
            validate(shaken)
            verdicts.add("good" if shaken != schedule else "unchanged")
        except ScheduleError as error:
            verdicts.add("circle" if "for ever" in str(error) else "broken")
    assert verdicts >= {"good", "circle"}


@pytest.mark.parametrize("links", [skips, one_way_skips])
@pytest.mark.parametrize("make", [gpipe, one_f_one_b, forward_only])
def test_long_skips_cost_one_forward_at_most(make, links):
    """The last rank's queue may reach its first activation one forward late, behind a value that skipped ahead."""
    for stages in (2, 4, 8):
        step, chain = (
            simulate(make(stages=stages, micro_batches=32, links=some), unit_costs(stages)).step_seconds
            for some in (links(stages), Links.chain(stages))
        )
        assert chain <= step <= chain + 1


@pytest.mark.parametrize("latency", [0.1, 0.25])
@pytest.mark.parametrize("make", [gpipe, forward_only])
def test_transfers_hide_behind_computation(make, latency):
    """Only filling and draining the pipeline shows the transfers: twice `stages - 1` of them, or once in evaluation."""
    stages, micro_batches = 4, 16
    schedule = make(stages=stages, micro_batches=micro_batches)
    costs = StageCosts(forwards=(1.0,) * stages, backwards=(2.0,) * stages, latency_seconds=latency)
    free = simulate(schedule, unit_costs(stages)).step_seconds
    hops = (stages - 1) * (2 if schedule.trains else 1)
    assert simulate(schedule, costs).step_seconds == pytest.approx(free + hops * latency)
