"""When each action of a schedule runs: the very lists that the runtime executes, played with given costs."""

from collections import deque
from dataclasses import dataclass, field
from typing import final

from shardwise.errors import ScheduleError
from shardwise.schedule.actions import Action, Backward, Compute, Exchange, Forward, Load, Reduce, Transfer
from shardwise.schedule.channels import Channels, Group
from shardwise.schedule.costs import Costs
from shardwise.schedule.lists import Schedule


@dataclass(frozen=True, slots=True)
class Span:
    """When an action ran. An Exchange: from when its group was active until its last transfer completed."""

    action: Action
    start_seconds: float
    end_seconds: float


@final
@dataclass(frozen=True, slots=True)
class Timeline:
    """One step over all ranks of the pipeline; `spans[rank]` follows the rank's list action by action."""

    schedule: Schedule
    spans: tuple[tuple[Span, ...], ...]

    @property
    def step_seconds(self) -> float:
        """Until the last rank has nothing left to do, communication included."""
        return max(span.end_seconds for spans in self.spans for span in spans)

    @property
    def bubble_fraction(self) -> float:
        """Share of the ranks' time without computation, from 0 to 1."""
        computing = sum(
            span.end_seconds - span.start_seconds
            for spans in self.spans
            for span in spans
            if isinstance(span.action, Forward | Backward)
        )
        available = len(self.spans) * self.step_seconds
        return 1 - computing / available if available else 0.0

    def in_flight(self, rank: int) -> int:
        """The most forwards that `rank` ever holds for their backward, over all its stages. Evaluation holds none."""
        if not self.schedule.trains:
            return 0
        held = peak = 0
        for action in self.schedule.ranks[rank]:
            held += isinstance(action, Forward)
            peak = max(peak, held)
            held -= isinstance(action, Backward)
        return peak


def simulate(schedule: Schedule, costs: Costs) -> Timeline:
    """Play the lists: computation beside communication, channels as in `channels`.

    A forward or backward waits for what it receives; a rank's reductions run one after the other beside both.

    raises:  ScheduleError where ranks wait for ever; it names what each of them waits for
    """
    channels = Channels(schedule.placement, costs.transfer_seconds)
    ranks = [_Rank(schedule, costs, channels, rank) for rank in range(len(schedule.ranks))]
    arrived: dict[Transfer, float] = {}
    movable = deque(range(len(ranks)))
    while movable:
        ranks[movable.popleft()].advance(arrived)
        for meeting in channels.settle():
            arrived[meeting.transfer] = meeting.end_seconds
            movable.append(schedule.placement[meeting.transfer.target])
    stuck = [text for rank in ranks for text in rank.stuck(arrived)]
    if stuck:
        raise ScheduleError(
            f"ranks wait for each other for ever: {'; '.join(stuck)}; put transfers that need each other into one "
            "Exchange on each rank, or start them in one order on all ranks"
        )
    return Timeline(schedule, tuple(rank.spans() for rank in ranks))


@dataclass(slots=True)
class _Rank:
    """How far a rank has come in its list."""

    schedule: Schedule
    costs: Costs
    channels: Channels
    rank: int
    clock: float = 0.0
    reductions_end: float = 0.0
    played: list[Span | Group] = field(default_factory=list)

    def advance(self, arrived: dict[Transfer, float]) -> None:
        """Play on, as far as what has arrived allows."""
        actions = self.schedule.ranks[self.rank]
        while len(self.played) < len(actions):
            action = actions[len(self.played)]
            if isinstance(action, Forward | Backward):
                if not all(transfer in arrived for transfer in self.schedule.receives_of(action)):
                    return
                self.played.append(self._compute(action, arrived))
            else:
                self.played.append(self._start(action))

    def _compute(self, action: Compute, arrived: dict[Transfer, float]) -> Span:
        start = max([self.clock, *(arrived[transfer] for transfer in self.schedule.receives_of(action))])
        if isinstance(action, Forward):
            self.clock = start + self.costs.forward_seconds(action.stage)
        else:
            self.clock = start + self.costs.backward_seconds(action.stage)
        return Span(action, start, self.clock)

    def _start(self, action: Load | Reduce | Exchange) -> Span | Group:
        match action:
            case Load():
                return Span(action, self.clock, self.clock)
            case Reduce(stage):
                start = max(self.clock, self.reductions_end)
                self.reductions_end = start + self.costs.reduce_seconds(stage)
                return Span(action, start, self.reductions_end)
            case Exchange():
                return self.channels.start(self.rank, action, at_seconds=self.clock)

    def stuck(self, arrived: dict[Transfer, float]) -> list[str]:
        """What this rank still waits for, in words; nothing where it is through."""
        actions = self.schedule.ranks[self.rank]
        head = self.channels.head(self.rank)
        waits = []
        if len(self.played) < len(actions):
            action = actions[len(self.played)]
            assert isinstance(action, Forward | Backward), "all else starts without waiting"
            missing = [str(transfer) for transfer in self.schedule.receives_of(action) if transfer not in arrived]
            waits.append(f"at {action} for {', '.join(missing)}")
        if head is not None:
            waits.append(f"in its queue for {head.open_transfers()}")
        return [f"rank {self.rank} waits {' and '.join(waits)}"] if waits else []

    def spans(self) -> tuple[Span, ...]:
        return tuple(
            Span(entry.exchange, entry.start_seconds, entry.end_seconds) if isinstance(entry, Group) else entry
            for entry in self.played
        )
