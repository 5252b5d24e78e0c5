"""One arrangement of the devices as numbers: what a step takes there, for any cuts."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from typing import final

from shardwise.plan.fit import Fit, Recompute, Sharding, Stretch, fit
from shardwise.plan.loads import Loads
from shardwise.plan.plan import ScheduleName
from shardwise.schedule import Links, Schedule, StageCosts, simulate
from shardwise.schedule.actions import Backward, Forward, TransferKind
from shardwise.schedule.earliest import earliest_seconds
from shardwise.schedule.orders import training_orders, training_schedule

Seconds = Callable[[int], float]
"""Of that many bytes."""


@final
@dataclass(frozen=True, kw_only=True)
class Case:
    """Everything about an arrangement that a step depends on, but the cuts.

    stages_per_rank:  stage s is on pipeline rank s % ranks
    loads, rooms:     of each pipeline rank: its segments, and the bytes that it has for them
    transfer:         seconds of one message to another pipeline rank
    gather:           seconds to gather parameters of a stage once more for each micro-batch, where the mode asks for it
    reduce:           seconds to sum gradients over the data ranks
    update:           seconds of the optimizer, and of all else that takes time by the bytes of parameters
    overlaps:         whether messages between data ranks take none of the time of computing
    """

    schedule: ScheduleName
    stages_per_rank: int
    micro_batches: int
    loads: tuple[Loads, ...]
    rooms: tuple[int, ...]
    sharding: Sharding
    recompute: Recompute
    transfer: Seconds
    gather: Seconds
    reduce: Seconds
    update: Seconds
    overlaps: bool

    @property
    def ranks(self) -> int:
        return len(self.loads)

    @property
    def stages(self) -> int:
        return self.ranks * self.stages_per_rank

    @property
    def segments(self) -> int:
        return len(self.loads[0])

    def rank_of(self, stage: int) -> int:
        return stage % self.ranks

    def gather_seconds(self, parameters: int) -> float:
        """Of so many bytes, each of the three times that a micro-batch asks: none where they stay gathered."""
        return self.gather(parameters) if self.sharding.mode == "regathered" else 0.0


@final
@dataclass(frozen=True, slots=True)
class Split:
    """A case with its cuts: stage s is the segments `bounds[s]` to `bounds[s + 1]`; `fits` are by rank."""

    case: Case
    bounds: tuple[int, ...]
    fits: tuple[Fit, ...]

    @property
    def short_by(self) -> tuple[int, int]:
        """Bytes that the rank lacks that lacks most, not above 0 where all fit; and that rank."""
        lacks = [found.bytes - room for found, room in zip(self.fits, self.case.rooms, strict=True)]
        return max(lacks), lacks.index(max(lacks))

    def regions(self, stage: int) -> tuple[range, ...]:
        return self.fits[self.case.rank_of(stage)].regions[stage // self.case.ranks]


def split(case: Case, bounds: Sequence[int], known: dict[object, Fit]) -> Split:
    """Cut, and fit each rank into its memory; `known` remembers what was fitted before."""
    stretches = list(pairwise(bounds))
    fits = tuple(fit_rank(case, rank, stretches[rank :: case.ranks], known) for rank in range(case.ranks))
    return Split(case, tuple(bounds), fits)


def fit_rank(case: Case, rank: int, stretches: Sequence[tuple[int, int]], known: dict[object, Fit]) -> Fit:
    """The stages of one rank, as segments from-to, fitted into its memory."""
    loads, room, held = case.loads[rank], case.rooms[rank], in_flight(case)[rank]
    key = (id(loads), room, case.sharding, case.recompute, held, *stretches)
    if key not in known:
        stages = [Stretch(loads, first, last, count) for (first, last), count in zip(stretches, held, strict=True)]
        known[key] = fit(stages, room, case.sharding, case.recompute)
    return known[key]


def in_flight(case: Case) -> tuple[tuple[int, ...], ...]:
    """For each rank, how many micro-batches each of its stages holds when the rank holds most."""
    return _in_flight(case.schedule, case.stages, case.ranks, case.micro_batches)


@lru_cache(maxsize=4096)
def _in_flight(name: ScheduleName, stages: int, ranks: int, micro_batches: int) -> tuple[tuple[int, ...], ...]:
    if name == "gpipe":
        return tuple((micro_batches,) for _ in range(ranks))
    if name == "1f1b":
        return tuple((min(micro_batches, ranks - rank),) for rank in range(ranks))
    # Interleaved orders repeat themselves; a few rounds reach the peak.
    lists = training_orders(name, stages=stages, ranks=ranks, micro_batches=min(micro_batches, 4 * ranks))
    return tuple(_most_held(actions, range(rank, stages, ranks)) for rank, actions in enumerate(lists))


def _most_held(actions: Sequence[object], own: range) -> tuple[int, ...]:
    held = dict.fromkeys(own, 0)
    most = tuple(held.values())
    for action in actions:
        if isinstance(action, Forward):
            held[action.stage] += 1
            most = max(most, tuple(held.values()), key=sum)
        elif isinstance(action, Backward):
            held[action.stage] -= 1
    return most


@lru_cache(maxsize=256)
def _schedule(name: ScheduleName, stages: int, ranks: int, micro_batches: int, links: Links) -> Schedule:
    return training_schedule(name, stages=stages, ranks=ranks, micro_batches=micro_batches, links=links)


def stage_costs(found: Split) -> StageCosts:
    """As the simulation takes them; every value that crosses a cut goes to the next stage."""
    case = found.case
    forwards, backwards, reductions = [], [], []
    sizes: dict[tuple[TransferKind, int, int], int] = {}
    for stage, (first, last) in enumerate(pairwise(found.bounds)):
        rank = case.rank_of(stage)
        loads, again = case.loads[rank], found.fits[rank].seconds[stage // case.ranks]
        state = loads.state(first, last)
        gather = case.gather_seconds(state.parameters)
        forward, backward = loads.forward_seconds(first, last), loads.backward_seconds(first, last) + again
        if case.overlaps:
            forwards.append(max(forward, gather))
            backwards.append(max(backward, 2 * gather))
        else:
            forwards.append(forward + gather)
            backwards.append(backward + 2 * gather)
        reductions.append(case.reduce(state.gradients))
        if stage:
            size = loads.each[first].enters
            sizes["activation", stage - 1, stage] = sizes["gradient", stage, stage - 1] = size
    latency = case.transfer(0)
    return StageCosts(
        forwards=tuple(forwards),
        backwards=tuple(backwards),
        reductions=tuple(reductions),
        link_bytes=sizes,
        latency_seconds=latency,
        bytes_per_second=1e9 / max(case.transfer(10**9) - latency, 1e-30),
    )


def step_seconds(found: Split, costs: StageCosts | None = None, links: Links | None = None) -> float:
    """Of one step, the schedule played out.

    costs, links:  of the graph itself, where they are known; without them, a plain chain
    """
    case = found.case
    costs = costs or stage_costs(found)
    between = links or Links.chain(case.stages)

    def played(micro_batches: int) -> float:
        schedule = _schedule(case.schedule, case.stages, case.ranks, micro_batches, between)
        return simulate(schedule, costs).step_seconds

    return _of_all(case, played) + update_seconds(found)


def least_seconds(found: Split) -> float:
    """Of one step, if messages never waited for each other: seldom much less than what is played, and soon known."""
    case, costs = found.case, stage_costs(found)

    def played(micro_batches: int) -> float:
        return earliest_seconds(case.schedule, ranks=case.ranks, micro_batches=micro_batches, costs=costs)

    return _of_all(case, played) + update_seconds(found)


def _of_all(case: Case, played: Callable[[int], float]) -> float:
    """Seconds of all micro-batches, `played` giving those of some.

    Once the pipeline is full each micro-batch adds the same time, so that a long step is played in part:
        t(m) = t(3p) + (m - 3p) (t(3p) - t(2p)) / p          m: micro-batches, p: pipeline ranks
    """
    if case.micro_batches <= 3 * case.ranks:
        return played(case.micro_batches)
    full, fuller = (played(groups * case.ranks) for groups in (2, 3))
    return fuller + (case.micro_batches - 3 * case.ranks) * (fuller - full) / case.ranks


def update_seconds(found: Split) -> float:
    """All ranks wait for the slowest optimizer."""
    case = found.case
    totals = [0] * case.ranks
    for stage, (first, last) in enumerate(pairwise(found.bounds)):
        rank = case.rank_of(stage)
        totals[rank] += -(-case.loads[rank].state(first, last).gradients // case.sharding.shards)
    return max(case.update(total) for total in totals)
