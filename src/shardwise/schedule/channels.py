"""How ranks exchange: channels without buffer and without tags, as NCCL has them and gloo pretends not to.

- Each rank has one queue of groups. A group starts when the group before it is complete.
- A transfer completes only while the groups of both its ends are active.
- Between two ranks, in one direction, the k-th send meets the k-th receive, whatever they mean to be. The meaning is
  compared here, because real channels would fill the buffer with the wrong values and say nothing.

Simulation and the in-memory transport both stand on this one implementation.
"""

from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import final

from shardwise.errors import ScheduleError
from shardwise.schedule.actions import Exchange, Transfer

_ByPeer = dict[int, deque[Transfer]]


@final
@dataclass(slots=True, eq=False)
class Group:
    """An Exchange that one rank has started.

    start_seconds:  when it became active; before that, when it was put into the queue
    end_seconds:    when its last transfer so far completed
    """

    exchange: Exchange
    start_seconds: float
    end_seconds: float
    sends: _ByPeer
    receives: _ByPeer
    completed: set[Transfer] = field(default_factory=set)

    def is_complete(self) -> bool:
        return len(self.completed) == len(self.exchange.sends) + len(self.exchange.receives)

    def open_transfers(self) -> Exchange:
        """What is not complete yet."""
        return Exchange(
            tuple(transfer for transfer in self.exchange.sends if transfer not in self.completed),
            tuple(transfer for transfer in self.exchange.receives if transfer not in self.completed),
        )


@final
@dataclass(frozen=True, slots=True)
class Meeting:
    """A transfer that completed, with the groups of its two ends."""

    transfer: Transfer
    giver: Group
    taker: Group
    end_seconds: float


@final
class Channels:
    """The queues of all ranks. Not safe for threads by itself."""

    def __init__(self, placement: Sequence[int], seconds: Callable[[Transfer], float]) -> None:
        self._placement = placement
        self._seconds = seconds
        self._queues: list[deque[Group]] = [deque() for _ in range(max(placement) + 1)]
        self._link_free: defaultdict[tuple[int, int], float] = defaultdict(float)
        self._changed: list[int] = []  # ranks whose queue has a new head

    def start(self, rank: int, exchange: Exchange, *, at_seconds: float) -> Group:
        """Put `exchange` at the end of the queue of `rank`. Call `settle` to see what it sets free."""
        sends = self._by_rank(exchange.sends, (transfer.target for transfer in exchange.sends))
        receives = self._by_rank(exchange.receives, (transfer.source for transfer in exchange.receives))
        group = Group(exchange, at_seconds, at_seconds, sends, receives)
        self._queues[rank].append(group)
        if self._queues[rank][0] is group:
            self._changed.append(rank)
        return group

    def settle(self) -> list[Meeting]:
        """Complete every transfer whose two ends are active; on return, all queues stand still.

        raises:  ScheduleError where a send meets a receive that means another transfer
        """
        meetings: list[Meeting] = []
        while self._changed:
            rank = self._changed.pop()
            if not self._queues[rank]:
                continue
            head = self._queues[rank][0]
            for peer in (*head.sends, *head.receives):
                meetings += self._meet(rank, peer)
                meetings += self._meet(peer, rank)
            if head.is_complete():
                self._leave(rank, head)
        return meetings

    def head(self, rank: int) -> Group | None:
        """The group that is active on `rank`."""
        queue = self._queues[rank]
        return queue[0] if queue else None

    def _by_rank(self, transfers: Iterable[Transfer], stages: Iterable[int]) -> _ByPeer:
        by_rank: defaultdict[int, deque[Transfer]] = defaultdict(deque)
        for transfer, stage in zip(transfers, stages, strict=True):
            by_rank[self._placement[stage]].append(transfer)
        return dict(by_rank)

    def _meet(self, source: int, target: int) -> list[Meeting]:
        giver, taker = self.head(source), self.head(target)
        if giver is None or taker is None:
            return []
        meetings: list[Meeting] = []
        sends, receives = giver.sends.get(target), taker.receives.get(source)
        while sends and receives:
            sent, expected = sends.popleft(), receives.popleft()
            if sent != expected:
                raise ScheduleError(_mismatch(source, sent, target, expected))
            end = max(giver.start_seconds, taker.start_seconds, self._link_free[source, target]) + self._seconds(sent)
            self._link_free[source, target] = end
            for rank, group in ((source, giver), (target, taker)):
                group.completed.add(sent)
                group.end_seconds = max(group.end_seconds, end)
                if group.is_complete():
                    self._changed.append(rank)
            meetings.append(Meeting(sent, giver, taker, end))
        return meetings

    def _leave(self, rank: int, head: Group) -> None:
        queue = self._queues[rank]
        queue.popleft()
        if queue:
            queue[0].start_seconds = max(queue[0].start_seconds, head.end_seconds)
            queue[0].end_seconds = queue[0].start_seconds
            self._changed.append(rank)


def _mismatch(source: int, sent: Transfer, target: int, expected: Transfer) -> str:
    return (
        f"rank {source} sends {sent} where rank {target} expects {expected}; channels have no tags: "
        f"put the sends of rank {source} and the receives of rank {target} in one order"
    )
