import pytest

from shardwise.schedule import (
    Links,
    StageCosts,
    forward_only,
    gpipe,
    interleaved_one_f_one_b,
    one_f_one_b,
    simulate,
)
from shardwise.schedule.actions import Exchange, Forward, Reduce, Transfer
from shardwise.schedule.costs import unit_costs

SIZES = [(stages, micro_batches) for stages in (1, 2, 3, 4, 8) for micro_batches in (1, 2, 5, 8, 13)]


def bubble(ranks: int, micro_batches: int, stages_a_rank: int = 1) -> float:
    return (ranks - 1) / (stages_a_rank * micro_batches + ranks - 1)


@pytest.mark.parametrize("make", [gpipe, one_f_one_b])
@pytest.mark.parametrize(("stages", "micro_batches"), SIZES)
@pytest.mark.parametrize("backward", [1.0, 2.0, 3.0])
def test_equal_stages_wait_only_to_fill_and_drain_the_pipeline(make, stages, micro_batches, backward):
    costs = StageCosts(forwards=(1.0,) * stages, backwards=(backward,) * stages)
    timeline = simulate(make(stages=stages, micro_batches=micro_batches), costs)
    assert timeline.bubble_fraction == pytest.approx(bubble(stages, micro_batches))
    assert timeline.step_seconds == (micro_batches + stages - 1) * (1 + backward)


@pytest.mark.parametrize("ranks", [2, 3, 4])
@pytest.mark.parametrize("stages_a_rank", [2, 3])
@pytest.mark.parametrize("uneven", [0, 1, 2])
def test_interleaving_divides_the_bubble_even_where_ranks_do_not_divide_the_micro_batches(ranks, stages_a_rank, uneven):
    stages, micro_batches = ranks * stages_a_rank, 2 * ranks + uneven
    schedule = interleaved_one_f_one_b(stages=stages, ranks=ranks, micro_batches=micro_batches)
    fraction = simulate(schedule, unit_costs(stages)).bubble_fraction
    assert fraction == pytest.approx(bubble(ranks, micro_batches, stages_a_rank))
    assert fraction < bubble(ranks, micro_batches)


def test_one_f_one_b_holds_as_many_micro_batches_as_stages_follow():
    timeline = simulate(one_f_one_b(stages=4, micro_batches=8), unit_costs(4))
    assert [timeline.in_flight(rank) for rank in range(4)] == [4, 3, 2, 1]


def test_gpipe_holds_every_micro_batch():
    timeline = simulate(gpipe(stages=4, micro_batches=8), unit_costs(4))
    assert [timeline.in_flight(rank) for rank in range(4)] == [8, 8, 8, 8]


def test_interleaving_holds_more_than_one_f_one_b_and_less_than_everything():
    timeline = simulate(interleaved_one_f_one_b(stages=4, ranks=2, micro_batches=8), unit_costs(4))
    assert [timeline.in_flight(rank) for rank in range(2)] == [5, 3]


def test_evaluation_holds_nothing():
    timeline = simulate(forward_only(stages=2, micro_batches=4), unit_costs(2))
    assert timeline.in_flight(0) == 0
    assert timeline.step_seconds == 5.0


def test_a_transfer_takes_latency_and_size_over_speed():
    costs = StageCosts(
        forwards=(1.0, 1.0),
        backwards=(2.0, 2.0),
        link_bytes={("activation", 0, 1): 100},
        latency_seconds=0.25,
        bytes_per_second=200.0,
    )
    timeline = simulate(one_f_one_b(stages=2, micro_batches=1), costs)
    assert timeline.step_seconds == 1 + (0.25 + 0.5) + 1 + 2 + 0.25 + 2  # F0, activation, F0, B0, gradient, B0


def test_communication_runs_beside_computation():
    """The receive of the next micro-batch is open while this one computes, so only the first is waited for."""
    costs = StageCosts(forwards=(1.0, 1.0), backwards=(2.0, 2.0), latency_seconds=1.0)
    timeline = simulate(gpipe(stages=2, micro_batches=4), costs)
    forwards = [span for span in timeline.spans[1] if isinstance(span.action, Forward)]
    assert [span.start_seconds for span in forwards] == [2.0, 3.0, 4.0, 5.0]


def test_a_group_waits_for_the_group_in_front_of_it():
    """Two activations of 3 seconds on a link that is slower than the stage that feeds it."""
    costs = StageCosts(forwards=(1.0, 1.0), backwards=(2.0, 2.0), latency_seconds=3.0)
    timeline = simulate(forward_only(stages=2, micro_batches=2), costs)
    exchanges = [span for span in timeline.spans[0] if isinstance(span.action, Exchange)]
    assert [(span.start_seconds, span.end_seconds) for span in exchanges] == [(1.0, 4.0), (4.0, 7.0)]
    assert timeline.step_seconds == 8.0


def test_a_send_lasts_until_the_other_end_is_there():
    """Stage 1 is slow and opens the receive of micro-batch 2 behind forward 0, so stage 0 holds it until then."""
    links = Links(activations=frozenset({(0, 1)}), gradients=frozenset())
    costs = StageCosts(forwards=(1.0, 10.0), backwards=(1.0, 1.0))
    timeline = simulate(gpipe(stages=2, micro_batches=3, links=links), costs)
    sends = [span for span in timeline.spans[0] if isinstance(span.action, Exchange)]
    assert [(span.start_seconds, span.end_seconds) for span in sends] == [(1.0, 1.0), (2.0, 2.0), (3.0, 11.0)]


def test_transfers_of_one_group_share_the_link_between_two_ranks():
    """Rank 1 has stages 1 and 3, and both use what stage 0 gives: one behind the other on the wire."""
    links = Links(activations=frozenset({(0, 1), (0, 3), (1, 2), (2, 3)}), gradients=frozenset())
    costs = StageCosts(
        forwards=(1.0,) * 4, backwards=(1.0,) * 4, link_bytes={("activation", 0, 3): 5}, bytes_per_second=1.0
    )
    timeline = simulate(forward_only(stages=4, ranks=2, micro_batches=1, links=links), costs)
    together = Exchange((Transfer("activation", 0, 0, 1), Transfer("activation", 0, 0, 3)), ())
    (shared,) = [span for span in timeline.spans[0] if span.action == together]
    assert (shared.start_seconds, shared.end_seconds) == (1.0, 6.0)


def test_reductions_run_beside_the_backwards_and_one_after_the_other():
    costs = StageCosts(forwards=(1.0,) * 4, backwards=(2.0,) * 4, reductions=(5.0,) * 4)
    timeline = simulate(interleaved_one_f_one_b(stages=4, ranks=2, micro_batches=2), costs)
    without = simulate(timeline.schedule, unit_costs(4))
    reductions = [span for span in timeline.spans[0] if isinstance(span.action, Reduce)]
    assert [span.action for span in reductions] == [Reduce(2), Reduce(0)]
    assert reductions[1].start_seconds == max(reductions[0].end_seconds, without.step_seconds)
    assert timeline.step_seconds == reductions[1].end_seconds


def test_spans_follow_the_lists_action_by_action():
    schedule = one_f_one_b(stages=3, micro_batches=4, links=Links.chain(3, batch=[2]))
    timeline = simulate(schedule, unit_costs(3))
    assert tuple(tuple(span.action for span in spans) for spans in timeline.spans) == schedule.ranks
