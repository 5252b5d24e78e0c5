"""Every kind of bad list, made by hand from one good list of two stages and two micro-batches."""

from dataclasses import replace

import pytest

from shardwise.errors import ScheduleError
from shardwise.schedule import Links, Schedule, forward_only, validate
from shardwise.schedule.actions import Action, Backward, Exchange, Forward, Load, Reduce, Transfer

A0, A1 = Transfer("activation", 0, 0, 1), Transfer("activation", 1, 0, 1)
G0, G1 = Transfer("gradient", 0, 1, 0), Transfer("gradient", 1, 1, 0)


def send(*transfers: Transfer) -> Exchange:
    return Exchange(transfers, ())


def receive(*transfers: Transfer) -> Exchange:
    return Exchange((), transfers)


FIRST: list[Action] = [
    Load(0),
    Forward(0, 0),
    send(A0),
    Load(1),
    Forward(0, 1),
    send(A1),
    receive(G0),
    Backward(0, 0),
    receive(G1),
    Backward(0, 1),
    Reduce(0),
]
LAST: list[Action] = [
    receive(A0),
    Forward(1, 0),
    receive(A1),
    Backward(1, 0),
    send(G0),
    Forward(1, 1),
    Backward(1, 1),
    send(G1),
    Reduce(1),
]


def schedule_of(first: list[Action], last: list[Action], links: Links | None = None) -> Schedule:
    return Schedule(
        name="by hand",
        stages=2,
        micro_batches=2,
        placement=(0, 1),
        links=links or Links.chain(2),
        ranks=(tuple(first), tuple(last)),
    )


def without(actions: list[Action], *gone: Action) -> list[Action]:
    return [action for action in actions if action not in gone]


def swapped(actions: list[Action], one: Action, other: Action) -> list[Action]:
    turn: dict[Action, Action] = {one: other, other: one}
    return [turn.get(action, action) for action in actions]


def fault(first: list[Action], last: list[Action], links: Links | None = None) -> str | None:
    try:
        validate(schedule_of(first, last, links))
    except ScheduleError as error:
        return str(error)
    return None


def test_the_good_list_is_good():
    assert fault(FIRST, LAST) is None


def test_a_missing_send():
    assert fault(without(FIRST, send(A1)), LAST) == (
        "rank 1, action 2 receives activation 1 from stage 0 to stage 1, but rank 0 never sends it; "
        "add the send behind its forward 1 of stage 0"
    )


def test_a_missing_receive():
    assert fault(FIRST, without(LAST, receive(A1))) == (
        "rank 1 never receives activation 1 from stage 0 to stage 1, which its forward 1 of stage 1 needs; "
        "add the receive to rank 1"
    )


def test_a_transfer_that_nobody_thought_of():
    assert fault(without(FIRST, send(A1)), without(LAST, receive(A1))) == (
        "rank 1 never receives activation 1 from stage 0 to stage 1, which its forward 1 of stage 1 needs; "
        "add the receive to rank 1, and the send to rank 0"
    )


def test_both_send_first():
    """What gloo lets through and NCCL does not: both hold a send in front of the receive that the other needs."""
    last = [receive(A0), Forward(1, 0), Backward(1, 0), send(G0), receive(A1), *LAST[5:]]
    assert fault(FIRST, last) == (
        "ranks wait for each other for ever: "
        "rank 0 waits at backward 0 of stage 0 for gradient 0 from stage 1 to stage 0 "
        "and in its queue for exchange (send activation 1 from stage 0 to stage 1); "
        "rank 1 waits at forward 1 of stage 1 for activation 1 from stage 0 to stage 1 "
        "and in its queue for exchange (send gradient 0 from stage 1 to stage 0); "
        "put transfers that need each other into one Exchange on each rank, or start them in one order on all ranks"
    )


def test_both_sending_first_in_one_exchange_each_is_no_circle():
    first = [Load(0), Forward(0, 0), send(A0), Load(1), Forward(0, 1), Exchange((A1,), (G0,)), *FIRST[7:]]
    last = [receive(A0), Forward(1, 0), Backward(1, 0), Exchange((G0,), (A1,)), *LAST[5:]]
    assert fault(first, last) is None


def test_an_order_between_two_ranks_that_differs():
    first = [Load(0), Forward(0, 0), Load(1), Forward(0, 1), send(A1, A0), *FIRST[6:]]
    assert fault(first, LAST) == (
        "rank 0, action 4 sends activation 1 from stage 0 to stage 1, but rank 1, action 0 receives activation 0 from "
        "stage 0 to stage 1 there: channels have no tags; "
        "put the sends of rank 0 and the receives of rank 1 in one order"
    )


def test_a_backward_before_its_forward():
    links = Links(activations=frozenset({(0, 1)}), gradients=frozenset())
    first = swapped(without(FIRST, receive(G0), receive(G1)), Backward(0, 1), Forward(0, 1))
    assert fault(first, without(LAST, send(G0), send(G1)), links) == (
        "rank 0, action 4: backward 1 of stage 0 comes before forward 1 of stage 0, which is action 7; "
        "move it behind that"
    )


def test_an_input_received_behind_its_use():
    last = [*without(LAST, receive(A1), Reduce(1)), receive(A1), Reduce(1)]
    assert fault(FIRST, last) == (
        "rank 1, action 4: forward 1 of stage 1 needs activation 1 from stage 0 to stage 1, "
        "which is received only at action 7; move the exchange in front of it"
    )


def test_a_send_before_its_value_is_computed():
    assert fault(swapped(FIRST, send(A0), Forward(0, 0)), LAST) == (
        "rank 0, action 1: send of activation 0 from stage 0 to stage 1 comes before forward 0 of stage 0, "
        "which is action 2; move it behind that"
    )


def test_a_local_input_computed_behind_its_use():
    lists: tuple[Action, ...] = (Load(0), Forward(1, 0), Forward(0, 0))
    links = Links(activations=frozenset({(0, 1)}), gradients=frozenset())
    schedule = Schedule(name="by hand", stages=2, micro_batches=1, placement=(0, 0), links=links, ranks=(lists,))
    with pytest.raises(ScheduleError, match="action 1: forward 0 of stage 1 comes before forward 0 of stage 0"):
        validate(schedule)


@pytest.mark.parametrize(
    ("lost", "words"),
    [
        (Load(1), "rank 0 lacks load of micro-batch 1; add it to its list"),
        (Forward(0, 1), "rank 0 lacks forward 1 of stage 0; add it to its list"),
        (Backward(0, 1), "rank 0 lacks backward 1 of stage 0; add it to its list"),
        (Reduce(0), "rank 0 lacks reduction of stage 0; add it to its list"),
    ],
)
def test_a_lost_action(lost: Action, words: str):
    assert fault(without(FIRST, lost), LAST) == words


def test_a_doubled_micro_batch():
    assert fault([*FIRST, Forward(0, 1)], LAST) == (
        "rank 0, action 11: forward 1 of stage 0 again, after action 4; remove one of them"
    )


def test_a_micro_batch_too_many():
    assert fault([*FIRST, Load(2)], LAST) == (
        "rank 0, action 11: load of micro-batch 2, but the micro-batches are 0 to 1; remove it"
    )


def test_a_doubled_transfer():
    assert fault([*FIRST, send(A1)], LAST) == (
        "rank 0, action 11 sends activation 1 from stage 0 to stage 1 a second time; remove one of them"
    )


def test_a_reduction_before_the_last_backward():
    assert fault(swapped(FIRST, Reduce(0), Backward(0, 1)), LAST) == (
        "rank 0, action 9: reduction of stage 0 comes before backward 1 of stage 0, which is action 10; "
        "move it behind that"
    )


def test_a_forward_before_its_load():
    assert fault(swapped(FIRST, Load(1), Forward(0, 1)), LAST) == (
        "rank 0, action 3: forward 1 of stage 0 comes before load of micro-batch 1, which is action 4; "
        "move it behind that"
    )


def test_a_transfer_of_a_link_that_is_not_there():
    batch = Transfer("batch", 0, 0, 1)
    assert fault([*FIRST, send(batch)], [*LAST, receive(batch)]) == (
        "rank 0, action 11 sends batch 0 from stage 0 to stage 1, but no link asks for it; "
        "add the link, or remove the transfer"
    )


def test_an_action_on_a_rank_that_cannot_do_it():
    assert fault(FIRST, [*LAST, Forward(0, 0)]) == (
        "rank 1, action 9: forward 0 of stage 0 belongs on rank 0; move it there"
    )
    assert fault([*FIRST, Forward(2, 0)], LAST) == (
        "rank 0, action 11: forward 0 of stage 2, but the stages are 0 to 1; remove it"
    )
    assert fault(FIRST, [*LAST, Load(0)]) == "rank 1, action 9: load of micro-batch 0 belongs on rank 0; move it there"
    assert fault([*FIRST, receive(A1)], LAST) == (
        "rank 0, action 11 receives activation 1 from stage 0 to stage 1, which belongs on rank 1; move it there"
    )


def test_a_transfer_between_stages_of_one_rank():
    lists: tuple[Action, ...] = (Load(0), Forward(0, 0), Exchange((A0,), (A0,)), Forward(1, 0))
    links = Links(activations=frozenset({(0, 1)}), gradients=frozenset())
    schedule = Schedule(name="by hand", stages=2, micro_batches=1, placement=(0, 0), links=links, ranks=(lists,))
    with pytest.raises(ScheduleError, match=r"action 2 sends activation 0 .* both stages are on this rank; remove"):
        validate(schedule)


def test_evaluation_has_no_backward_for_one_stage_only():
    schedule = forward_only(stages=2, micro_batches=1)
    one_sided = replace(schedule, ranks=((*schedule.ranks[0], Backward(0, 0), Reduce(0)), schedule.ranks[1]))
    with pytest.raises(ScheduleError, match="rank 1 lacks backward 0 of stage 1"):
        validate(one_sided)


def test_a_schedule_whose_parts_do_not_fit_cannot_be_built():
    good = schedule_of(FIRST, LAST)
    with pytest.raises(ValueError, match=r"placement \(0,\) does not put 2 stages on 2 ranks"):
        replace(good, placement=(0,))
    with pytest.raises(ValueError, match=r"placement \(0, 2\) does not put"):
        replace(good, placement=(0, 2))
    with pytest.raises(ValueError, match="2 stages and 0 micro-batches"):
        replace(good, micro_batches=0)
