from itertools import pairwise

import pytest

from shardwise.schedule import Links, Schedule, interleaved_one_f_one_b, one_f_one_b
from shardwise.schedule.actions import Backward, Exchange, Forward, Load, Reduce, Transfer


def activation(micro_batch: int, source: int, target: int) -> Transfer:
    return Transfer("activation", micro_batch, source, target)


def gradient(micro_batch: int, source: int, target: int) -> Transfer:
    return Transfer("gradient", micro_batch, source, target)


def batch(micro_batch: int, target: int) -> Transfer:
    return Transfer("batch", micro_batch, 0, target)


def exchanges_of(schedule: Schedule, rank: int) -> list[Exchange]:
    return [action for action in schedule.ranks[rank] if isinstance(action, Exchange)]


def test_each_rank_starts_one_exchange_per_slot():
    """The picture in the docstring of `communication`."""
    assert one_f_one_b(stages=2, micro_batches=2).ranks == (
        (
            Load(0),
            Forward(0, 0),
            Exchange((activation(0, 0, 1),), ()),
            Load(1),
            Forward(0, 1),
            Exchange((activation(1, 0, 1),), ()),
            Exchange((), (gradient(0, 1, 0),)),
            Backward(0, 0),
            Exchange((), (gradient(1, 1, 0),)),
            Backward(0, 1),
            Reduce(0),
        ),
        (
            Exchange((), (activation(0, 0, 1),)),
            Exchange((), (activation(1, 0, 1),)),
            Forward(1, 0),
            Backward(1, 0),
            Exchange((gradient(0, 1, 0),), ()),
            Forward(1, 1),
            Backward(1, 1),
            Exchange((gradient(1, 1, 0),), ()),
            Reduce(1),
        ),
    )


def test_a_value_that_skips_stages_goes_straight_and_its_gradient_comes_straight_back():
    links = Links(
        activations=frozenset({(0, 1), (1, 2), (0, 2)}),
        gradients=frozenset({(1, 0), (2, 1), (2, 0)}),
    )
    schedule = one_f_one_b(stages=3, micro_batches=1, links=links)
    first, middle, _ = (exchanges_of(schedule, rank) for rank in range(3))
    assert [exchange.sends for exchange in first if exchange.sends] == [(activation(0, 0, 1), activation(0, 0, 2))]
    assert not any(transfer.target == 2 and transfer.source == 0 for exchange in middle for transfer in exchange.sends)
    assert (gradient(0, 2, 0),) in [exchange.receives for exchange in first]


def test_the_batch_travels_a_forward_and_a_transfer_before_its_use():
    """Stage 2 starts forward 1 at 22, behind backward 0, so its batch leaves at 17, while backward 0 runs."""
    schedule = one_f_one_b(stages=3, micro_batches=2, links=Links.chain(3, batch=[2]))
    last = schedule.ranks[2]
    assert last[last.index(Forward(2, 0)) : last.index(Forward(2, 1))] == (
        Forward(2, 0),
        Exchange((), (batch(1, 2),)),
        Backward(2, 0),
        Exchange((gradient(0, 2, 1),), ()),
    )


def test_a_stage_that_runs_ahead_of_stage_0_gets_its_batch_ahead():
    """Stage 1 is a tower of its own: its batch must not wait for a forward of stage 0."""
    links = Links(activations=frozenset({(0, 2), (1, 2)}), gradients=frozenset(), batch=frozenset({1}))
    first = one_f_one_b(stages=3, micro_batches=2, links=links).ranks[0]
    assert first[:4] == (Load(0), Load(1), Exchange((batch(0, 1), batch(1, 1)), ()), Forward(0, 0))


@pytest.mark.parametrize("micro_batches", [1, 3, 8])
def test_micro_batches_are_loaded_in_their_order(micro_batches: int):
    links = Links.chain(4, batch=[1, 3])
    for schedule in (
        one_f_one_b(stages=4, micro_batches=micro_batches, links=links),
        interleaved_one_f_one_b(stages=4, ranks=2, micro_batches=micro_batches, links=links),
    ):
        loads = [action.micro_batch for action in schedule.ranks[0] if isinstance(action, Load)]
        assert loads == list(range(micro_batches))


def test_stages_of_one_rank_send_each_other_nothing():
    links = Links(
        activations=frozenset({(0, 1), (1, 2), (2, 3), (0, 2)}), gradients=frozenset({(2, 0)}), batch=frozenset({2})
    )
    schedule = interleaved_one_f_one_b(stages=4, ranks=2, micro_batches=2, links=links)
    sent = {
        (t.source, t.target) for rank in range(2) for exchange in exchanges_of(schedule, rank) for t in exchange.sends
    }
    assert sent == {(0, 1), (1, 2), (2, 3)}


def test_a_stage_reduces_right_behind_the_exchange_of_its_last_backward():
    for actions in one_f_one_b(stages=3, micro_batches=2).ranks:
        before = [before for before, action in pairwise(actions) if isinstance(action, Reduce)]
        assert len(before) == 1
        assert isinstance(before[0], Backward if actions[0] == Load(0) else Exchange)


def test_links_refuse_what_runs_the_wrong_way():
    with pytest.raises(ValueError, match="activations go from 1 to 0"):
        Links(activations=frozenset({(1, 0)}), gradients=frozenset())
    with pytest.raises(ValueError, match=r"gradients go from 1 to 0, but .* add \(0, 1\) to activations"):
        Links(activations=frozenset(), gradients=frozenset({(1, 0)}))
    with pytest.raises(ValueError, match=r"batch is \[0\]; name only stages after 0"):
        Links.chain(2, batch=[0])


def test_links_of_stages_that_are_not_there_are_refused():
    with pytest.raises(ValueError, match="links name stage 3, but the stages are 0 to 1"):
        one_f_one_b(stages=2, micro_batches=1, links=Links.chain(2, batch=[3]))
