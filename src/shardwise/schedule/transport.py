"""Carry tensors between the ranks of a pipeline: the interface, and its in-memory implementation."""

from collections.abc import Mapping, Sequence
from threading import Condition, Lock
from types import TracebackType
from typing import Protocol, Self, final

from torch import Tensor

from shardwise.errors import ScheduleError
from shardwise.schedule.actions import Exchange, Transfer
from shardwise.schedule.channels import Channels, Group, Meeting

Payloads = Mapping[Transfer, Sequence[Tensor]]


class Pending(Protocol):
    """An Exchange under way."""

    def wait(self, transfer: Transfer) -> None:
        """Return when this transfer of the exchange is complete: received values are there, sent ones may go."""
        ...

    def done(self) -> bool:
        """Whether all transfers of the exchange are complete, without waiting."""
        ...


class Transport(Protocol):
    """One rank's end of the channels to all other ranks.

    queues:  whether a group starts only when the groups before it are complete, as on NCCL. Where not, a rank that
             computes on the thread that starts transfers may open a receive before its turn
    """

    @property
    def queues(self) -> bool: ...

    def start(self, exchange: Exchange, outgoing: Payloads, incoming: Payloads) -> Pending:
        """Start all transfers of `exchange` as one group, and return at once.

        outgoing:  the values of each send; they must stay as they are until the send is complete
        incoming:  for each receive, tensors of the right shapes and types, to be filled
        """
        ...


def in_memory_transports(placement: Sequence[int]) -> tuple["InMemoryTransport", ...]:
    """The ends of all ranks, for one thread each, where `placement` is the rank of each stage."""
    network = _Network(placement)
    return tuple(InMemoryTransport(network, rank) for rank in range(max(placement) + 1))


@final
class InMemoryTransport:
    """Channels without buffer and tags between threads: what hangs on NCCL raises here, naming what ranks wait for.

    Use it in a `with`: leaving tells the other ranks that this one starts nothing more, so that they need not wait.
    After an error, all ends raise it, and the network is of no further use.
    """

    queues = True

    def __init__(self, network: "_Network", rank: int) -> None:
        self._network = network
        self._rank = rank

    def start(self, exchange: Exchange, outgoing: Payloads, incoming: Payloads) -> "InMemoryPending":
        """As `Transport.start`.

        raises:  ValueError where payloads and transfers do not fit; ScheduleError where a send meets another receive,
                 or its values have another shape or type than the receiver expects
        """
        for wanted, given, name in ((exchange.sends, outgoing, "outgoing"), (exchange.receives, incoming, "incoming")):
            if set(wanted) != set(given):
                raise ValueError(f"{name} holds {[str(transfer) for transfer in given]}, but this is an {exchange}")
        return InMemoryPending(self._network, self._rank, self._network.start(self._rank, exchange, outgoing, incoming))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._network.leave(self._rank, error)


@final
class InMemoryPending:
    """An Exchange under way between threads."""

    def __init__(self, network: "_Network", rank: int, group: Group) -> None:
        self._network = network
        self._rank = rank
        self._group = group

    def wait(self, transfer: Transfer) -> None:
        """As `Pending.wait`.

        raises:  ScheduleError where the transfer can never complete, naming what every rank waits for
        """
        if transfer not in (*self._group.exchange.sends, *self._group.exchange.receives):
            raise ValueError(
                f"{transfer} is no part of this {self._group.exchange}; wait on the exchange that holds it"
            )
        self._network.wait(self._rank, self._group, transfer)

    def done(self) -> bool:
        return self._network.is_complete(self._group)


@final
class _Network:
    """What the threads share. Whoever starts a group copies for all transfers that it sets free."""

    def __init__(self, placement: Sequence[int]) -> None:
        self._ranks = range(max(placement) + 1)
        self._lock = Lock()
        self._woken = [Condition(self._lock) for _ in self._ranks]  # one a rank, to wake nobody in vain
        self._channels = Channels(placement, seconds=lambda transfer: 0.0)
        self._outgoing: dict[tuple[Group, Transfer], Sequence[Tensor]] = {}
        self._incoming: dict[tuple[Group, Transfer], Sequence[Tensor]] = {}
        self._waiting: dict[int, tuple[Group, Transfer]] = {}
        self._left: set[int] = set()
        self._failure: str | None = None

    def start(self, rank: int, exchange: Exchange, outgoing: Payloads, incoming: Payloads) -> Group:
        with self._lock:
            self._raise_failure()
            group = self._channels.start(rank, exchange, at_seconds=0.0)
            self._outgoing |= {(group, transfer): values for transfer, values in outgoing.items()}
            self._incoming |= {(group, transfer): buffers for transfer, buffers in incoming.items()}
            try:
                for meeting in self._channels.settle():
                    self._deliver(meeting)
            except ScheduleError as error:
                self._fail(str(error))
                raise
            return group

    def wait(self, rank: int, group: Group, transfer: Transfer) -> None:
        with self._lock:
            if transfer in group.completed:
                return
            self._waiting[rank] = (group, transfer)
            self._fail_if_none_moves()
            self._woken[rank].wait_for(lambda: transfer in group.completed or self._failure is not None)
            self._waiting.pop(rank, None)
            if transfer not in group.completed:
                self._raise_failure()

    def is_complete(self, group: Group) -> bool:
        with self._lock:
            self._raise_failure()
            return group.is_complete()

    def leave(self, rank: int, error: BaseException | None) -> None:
        with self._lock:
            self._left.add(rank)
            self._waiting.pop(rank, None)
            if error is not None:
                self._fail(f"rank {rank} stopped with {type(error).__name__}: {error}")
            self._fail_if_none_moves()

    def _deliver(self, meeting: Meeting) -> None:
        transfer = meeting.transfer
        values = self._outgoing.pop((meeting.giver, transfer))
        _fill(transfer, values, self._incoming.pop((meeting.taker, transfer)))
        for rank, waited_for in list(self._waiting.items()):
            if waited_for in ((meeting.giver, transfer), (meeting.taker, transfer)):
                del self._waiting[rank]
                self._woken[rank].notify()

    def _fail_if_none_moves(self) -> None:
        """Where every rank waits or has left, nothing will ever complete."""
        movable = set(self._ranks) - self._waiting.keys() - self._left
        if movable or not self._waiting:
            return
        states = "; ".join(self._state(rank) for rank in self._ranks)
        self._fail(
            f"ranks wait for each other for ever: {states}; put transfers that need each other into one Exchange on "
            "each rank, or start them in one order on all ranks"
        )

    def _state(self, rank: int) -> str:
        head = self._channels.head(rank)
        queue = f", in its queue for {head.open_transfers()}" if head else ""
        if rank in self._left:
            return f"rank {rank} has left{queue}"
        return f"rank {rank} waits for {self._waiting[rank][1]}{queue}"

    def _fail(self, message: str) -> None:
        self._failure = self._failure or message
        for woken in self._woken:
            woken.notify()

    def _raise_failure(self) -> None:
        if self._failure is not None:
            raise ScheduleError(self._failure)


def _fill(transfer: Transfer, values: Sequence[Tensor], buffers: Sequence[Tensor]) -> None:
    given = [(tuple(value.shape), value.dtype) for value in values]
    expected = [(tuple(buffer.shape), buffer.dtype) for buffer in buffers]
    if given != expected:
        raise ScheduleError(
            f"{transfer} has values of {given}, but its receiver expects {expected}; make both ends agree on what "
            f"stage {transfer.source} gives"
        )
    for value, buffer in zip(values, buffers, strict=True):
        buffer.detach().copy_(value.detach())
