from textwrap import dedent

import pytest

from shardwise.errors import ScheduleError
from shardwise.schedule import Links, forward_only, gpipe, interleaved_one_f_one_b, one_f_one_b, show
from shardwise.schedule.actions import Backward, Exchange, Forward
from shardwise.schedule.communication import with_communication


def test_gpipe_runs_all_forwards_first():
    assert show(gpipe(stages=2, micro_batches=3)) == dedent("""\
        stage 0: F0 F1 F2 B0 B1 B2
        stage 1: F0 F1 F2 B0 B1 B2""")


def test_one_f_one_b_alternates_once_the_pipeline_is_full():
    assert show(one_f_one_b(stages=2, micro_batches=3)) == dedent("""\
        stage 0: F0 F1 B0 F2 B1 B2
        stage 1: F0 B0 F1 B1 F2 B2""")


def test_one_f_one_b_with_fewer_micro_batches_than_stages_is_all_ahead():
    assert show(one_f_one_b(stages=4, micro_batches=2)) == dedent("""\
        stage 0: F0 F1 B0 B1
        stage 1: F0 F1 B0 B1
        stage 2: F0 F1 B0 B1
        stage 3: F0 B0 F1 B1""")


def test_interleaved_goes_through_a_group_per_stage_of_the_rank():
    assert show(interleaved_one_f_one_b(stages=4, ranks=2, micro_batches=4)) == dedent("""\
        rank 0: F0.0 F0.1 F2.0 F2.1 F0.2 B2.0 F0.3 B2.1 F2.2 B0.0 F2.3 B0.1 B2.2 B2.3 B0.2 B0.3
        rank 1: F1.0 F1.1 F3.0 B3.0 F3.1 B3.1 F1.2 B1.0 F1.3 B1.1 F3.2 B3.2 F3.3 B3.3 B1.2 B1.3""")


def test_interleaved_makes_groups_even_where_ranks_do_not_divide_the_micro_batches():
    assert show(interleaved_one_f_one_b(stages=4, ranks=2, micro_batches=5)) == dedent("""\
        rank 0: F0.0 F0.1 F0.2 F2.0 F2.1 F2.2 B2.0 F0.3 B2.1 F0.4 B2.2 F2.3 B0.0 F2.4 B0.1 B0.2 B2.3 B2.4 B0.3 B0.4
        rank 1: F1.0 F1.1 F1.2 F3.0 B3.0 F3.1 B3.1 F3.2 B3.2 F1.3 B1.0 F1.4 B1.1 F3.3 B1.2 F3.4 B3.3 B3.4 B1.3 B1.4""")


def test_orders_that_wait_for_each_other_are_refused():
    orders = [[Backward(0, 0), Forward(0, 0)], [Forward(1, 0), Backward(1, 0)]]
    with pytest.raises(ScheduleError) as refused:
        with_communication("circle", orders, placement=(0, 1), links=Links.chain(2))
    assert str(refused.value) == (
        "the orders of the ranks wait for each other: rank 0 stands at backward 0 of stage 0; "
        "rank 1 stands at forward 0 of stage 1; move what these need to the front"
    )


def test_forward_only_has_no_backward_and_no_gradient_link():
    schedule = forward_only(stages=2, micro_batches=3, links=Links.chain(2, batch=[1]))
    assert show(schedule) == dedent("""\
        stage 0: F0 F1 F2
        stage 1: F0 F1 F2""")
    assert schedule.links == Links(activations=frozenset({(0, 1)}), gradients=frozenset(), batch=frozenset({1}))
    assert not schedule.trains


def test_forward_only_runs_the_stages_of_an_interleaved_plan():
    assert show(forward_only(stages=4, ranks=2, micro_batches=2)) == dedent("""\
        rank 0: F0.0 F0.1 F2.0 F2.1
        rank 1: F1.0 F1.1 F3.0 F3.1""")


def test_one_stage_needs_no_communication():
    assert show(one_f_one_b(stages=1, micro_batches=2)) == "stage 0: F0 B0 F1 B1"
    actions = one_f_one_b(stages=1, micro_batches=2).ranks[0]
    assert not any(isinstance(action, Exchange) for action in actions)


@pytest.mark.parametrize(("stages", "ranks"), [(3, 2), (2, 2), (4, 0)])
def test_interleaving_refuses_what_does_not_share_out(stages: int, ranks: int):
    with pytest.raises(
        ValueError, match=f"{stages} stages cannot interleave on {ranks} ranks; give each rank the same"
    ):
        interleaved_one_f_one_b(stages=stages, ranks=ranks, micro_batches=4)


def test_counts_below_one_are_refused():
    with pytest.raises(ValueError, match="0 stages and 4 micro-batches"):
        gpipe(stages=0, micro_batches=4)
    with pytest.raises(ValueError, match="2 stages and 0 micro-batches"):
        one_f_one_b(stages=2, micro_batches=0)
    with pytest.raises(ValueError, match="2 stages do not fill 3 ranks"):
        forward_only(stages=2, ranks=3, micro_batches=1)
