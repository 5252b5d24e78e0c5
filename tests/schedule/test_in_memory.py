"""The in-memory transport: what hangs on real channels raises here, on every rank, in the same words."""

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

import pytest
import torch

from shardwise.errors import ScheduleError
from shardwise.schedule import in_memory_transports
from shardwise.schedule.actions import Exchange, Transfer
from shardwise.schedule.transport import InMemoryPending, InMemoryTransport

FORTH, BACK = Transfer("activation", 0, 0, 1), Transfer("gradient", 0, 1, 0)
LATER = Transfer("activation", 1, 0, 1)

Rank = Callable[[InMemoryTransport], None]


def send(transport: InMemoryTransport, *transfers: Transfer, value: float = 1.0) -> InMemoryPending:
    return transport.start(Exchange(transfers, ()), {transfer: [torch.tensor([value])] for transfer in transfers}, {})


def receive(transport: InMemoryTransport, *transfers: Transfer) -> InMemoryPending:
    return transport.start(Exchange((), transfers), {}, {transfer: [torch.zeros(1)] for transfer in transfers})


def run(*ranks: Rank) -> list[Future[None]]:
    """Each function in a thread of its own, to its end."""

    def use(rank: Rank, transport: InMemoryTransport) -> None:
        with transport:
            rank(transport)

    with ThreadPoolExecutor(len(ranks)) as pool:
        return [pool.submit(use, *pair) for pair in zip(ranks, in_memory_transports(range(len(ranks))), strict=True)]


def test_a_send_is_done_only_when_it_is_received():
    giver, taker = in_memory_transports((0, 1))
    sending = send(giver, FORTH)
    assert not sending.done()
    receive(taker, FORTH).wait(FORTH)
    assert sending.done()


def test_received_values_fill_the_buffers_that_the_receiver_gave():
    giver, taker = in_memory_transports((0, 1))
    buffers = [torch.zeros(2), torch.zeros(1, dtype=torch.int64)]
    arriving = taker.start(Exchange((), (FORTH,)), {}, {FORTH: buffers})
    giver.start(Exchange((FORTH,), ()), {FORTH: [torch.tensor([1.0, 2.0]), torch.tensor([3])]}, {})
    arriving.wait(FORTH)
    assert torch.equal(buffers[0], torch.tensor([1.0, 2.0]))
    assert torch.equal(buffers[1], torch.tensor([3]))


def test_a_group_starts_only_when_the_group_in_front_of_it_is_complete():
    one, other = in_memory_transports((0, 1))
    send(one, FORTH)
    returning = receive(one, BACK)
    send(other, BACK)
    assert not returning.done()  # both ends of BACK are there, but rank 0 is still at FORTH


def test_a_transfer_can_be_used_before_its_group_is_complete():
    giver, taker = in_memory_transports((0, 1))
    arriving = receive(taker, FORTH, LATER)
    send(giver, FORTH)
    arriving.wait(FORTH)
    assert not arriving.done()


def test_both_sending_first_raises_on_both_ranks_and_says_what_each_waits_for():
    def first(transport: InMemoryTransport) -> None:
        send(transport, FORTH)
        receive(transport, BACK).wait(BACK)

    def last(transport: InMemoryTransport) -> None:
        send(transport, BACK)
        receive(transport, FORTH).wait(FORTH)

    errors = [thread.exception() for thread in run(first, last)]
    assert [type(error) for error in errors] == [ScheduleError, ScheduleError]
    assert {str(error) for error in errors} == {
        "ranks wait for each other for ever: "
        "rank 0 waits for gradient 0 from stage 1 to stage 0, "
        "in its queue for exchange (send activation 0 from stage 0 to stage 1); "
        "rank 1 waits for activation 0 from stage 0 to stage 1, "
        "in its queue for exchange (send gradient 0 from stage 1 to stage 0); "
        "put transfers that need each other into one Exchange on each rank, or start them in one order on all ranks"
    }


def test_both_sending_in_one_exchange_with_their_receive_is_fine():
    def both(mine: Transfer, other: Transfer) -> Rank:
        def rank(transport: InMemoryTransport) -> None:
            values, buffers = {mine: [torch.ones(1)]}, {other: [torch.zeros(1)]}
            transport.start(Exchange((mine,), (other,)), values, buffers).wait(other)

        return rank

    assert [thread.exception() for thread in run(both(FORTH, BACK), both(BACK, FORTH))] == [None, None]


def test_waiting_for_a_rank_that_has_left_raises():
    def waits(transport: InMemoryTransport) -> None:
        receive(transport, FORTH).wait(FORTH)

    left, waiting = run(lambda transport: None, waits)
    assert left.exception() is None
    assert "rank 0 has left; rank 1 waits for activation 0 from stage 0 to stage 1" in str(waiting.exception())


def test_an_error_on_one_rank_reaches_those_that_wait_for_it():
    def fails(transport: InMemoryTransport) -> None:
        raise ZeroDivisionError("of the user")

    def waits(transport: InMemoryTransport) -> None:
        receive(transport, FORTH).wait(FORTH)

    failing, waiting = run(fails, waits)
    assert isinstance(failing.exception(), ZeroDivisionError)
    assert str(waiting.exception()) == "rank 0 stopped with ZeroDivisionError: of the user"


def test_a_send_that_meets_another_receive_raises_on_both_ranks():
    def first(transport: InMemoryTransport) -> None:
        send(transport, LATER).wait(LATER)

    def last(transport: InMemoryTransport) -> None:
        receive(transport, FORTH).wait(FORTH)

    for thread in run(first, last):
        assert str(thread.exception()) == (
            "rank 0 sends activation 1 from stage 0 to stage 1 where rank 1 expects activation 0 from stage 0 to "
            "stage 1; channels have no tags: put the sends of rank 0 and the receives of rank 1 in one order"
        )


def test_values_of_another_shape_than_the_buffers_are_refused_and_not_broadcast():
    giver, taker = in_memory_transports((0, 1))
    taker.start(Exchange((), (FORTH,)), {}, {FORTH: [torch.zeros(2, 3)]})
    with pytest.raises(ScheduleError, match=r"has values of \[\(\(1,\), torch.float32\)\], but its receiver expects"):
        send(giver, FORTH)


def test_payloads_must_be_those_of_the_exchange():
    giver, _ = in_memory_transports((0, 1))
    with pytest.raises(ValueError, match=r"outgoing holds \[\], but this is an exchange \(send activation 0"):
        giver.start(Exchange((FORTH,), ()), {}, {})


def test_waiting_for_a_transfer_of_another_exchange_is_a_slip():
    giver, _ = in_memory_transports((0, 1))
    with pytest.raises(ValueError, match="activation 1 from stage 0 to stage 1 is no part of this exchange"):
        send(giver, FORTH).wait(LATER)
