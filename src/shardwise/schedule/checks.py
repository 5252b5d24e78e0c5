"""Whether the lists of a schedule compute the step, each micro-batch once, and none of them waits for ever."""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from shardwise.errors import ScheduleError
from shardwise.schedule.actions import Action, Backward, Compute, Exchange, Forward, Load, Reduce, Transfer
from shardwise.schedule.costs import unit_costs
from shardwise.schedule.lists import Schedule, producer_of
from shardwise.schedule.timeline import simulate


def validate(schedule: Schedule) -> None:
    """Return where the schedule is whole and can run on channels without buffer and tags.

    raises:  ScheduleError that names the rank, the action and the cure; for the first fault found
    """
    found = _Found.of(schedule)
    _check_places(schedule)
    _check_counts(schedule, found)
    _check_transfers(schedule, found)
    _check_own_order(schedule, found)
    _check_pair_order(schedule)
    simulate(schedule, unit_costs(schedule.stages))  # raises where ranks wait in a circle


_Single: TypeAlias = Load | Forward | Backward | Reduce


@dataclass(frozen=True, slots=True)
class _Place:
    """Position `index` in the list of `rank`."""

    rank: int
    index: int

    def __str__(self) -> str:
        return f"rank {self.rank}, action {self.index}"


@dataclass(frozen=True, slots=True)
class _Found:
    """Where everything stands in the lists."""

    singles: Mapping[_Single, Sequence[_Place]]
    sends: Mapping[Transfer, Sequence[_Place]]
    receives: Mapping[Transfer, Sequence[_Place]]

    @classmethod
    def of(cls, schedule: Schedule) -> "_Found":
        singles: defaultdict[_Single, list[_Place]] = defaultdict(list)
        sends: defaultdict[Transfer, list[_Place]] = defaultdict(list)
        receives: defaultdict[Transfer, list[_Place]] = defaultdict(list)
        for place, action in _places(schedule):
            if not isinstance(action, Exchange):
                singles[action].append(place)
                continue
            for transfer in action.sends:
                sends[transfer].append(place)
            for transfer in action.receives:
                receives[transfer].append(place)
        return cls(dict(singles), dict(sends), dict(receives))


def _places(schedule: Schedule) -> Iterable[tuple[_Place, Action]]:
    for rank, actions in enumerate(schedule.ranks):
        for index, action in enumerate(actions):
            yield _Place(rank, index), action


def _check_places(schedule: Schedule) -> None:
    """Every action stands on the rank that can do it."""
    for place, action in _places(schedule):
        match action:
            case Exchange(sends, receives):
                for transfer in sends:
                    _check_end(schedule, place, transfer, "sends", transfer.source)
                for transfer in receives:
                    _check_end(schedule, place, transfer, "receives", transfer.target)
            case Load():
                _check_stage(schedule, place, action, stage=0)
            case Forward(stage) | Backward(stage) | Reduce(stage):
                _check_stage(schedule, place, action, stage)


def _check_stage(schedule: Schedule, place: _Place, action: Action, stage: int) -> None:
    if not 0 <= stage < schedule.stages:
        raise ScheduleError(f"{place}: {action}, but the stages are 0 to {schedule.stages - 1}; remove it")
    if schedule.placement[stage] != place.rank:
        raise ScheduleError(f"{place}: {action} belongs on rank {schedule.placement[stage]}; move it there")


def _check_end(schedule: Schedule, place: _Place, transfer: Transfer, verb: str, stage: int) -> None:
    if transfer not in schedule.links.outputs(producer_of(transfer)):
        raise ScheduleError(f"{place} {verb} {transfer}, but no link asks for it; add the link, or remove the transfer")
    if schedule.is_local(transfer):
        raise ScheduleError(f"{place} {verb} {transfer}, and both stages are on this rank; remove the transfer")
    if schedule.placement[stage] != place.rank:
        raise ScheduleError(
            f"{place} {verb} {transfer}, which belongs on rank {schedule.placement[stage]}; move it there"
        )


def _check_counts(schedule: Schedule, found: _Found) -> None:
    """Each micro-batch is loaded once and goes through each stage once; each stage that trains reduces once."""
    wanted = _wanted(schedule)
    for action, stage in wanted.items():
        places = found.singles.get(action, ())
        if not places:
            raise ScheduleError(f"rank {schedule.placement[stage]} lacks {action}; add it to its list")
        if len(places) > 1:
            raise ScheduleError(f"{places[1]}: {action} again, after action {places[0].index}; remove one of them")
    for action, places in found.singles.items():
        if action not in wanted:
            raise ScheduleError(
                f"{places[0]}: {action}, but the micro-batches are 0 to {schedule.micro_batches - 1}; remove it"
            )


def _wanted(schedule: Schedule) -> dict[_Single, int]:
    """What a whole step consists of, with the stage whose rank does it."""
    wanted: dict[_Single, int] = {Load(micro_batch): 0 for micro_batch in range(schedule.micro_batches)}
    for stage in range(schedule.stages):
        wanted |= {Forward(stage, micro_batch): stage for micro_batch in range(schedule.micro_batches)}
        if schedule.trains:
            wanted |= {Backward(stage, micro_batch): stage for micro_batch in range(schedule.micro_batches)}
            wanted[Reduce(stage)] = stage
    return wanted


def _check_transfers(schedule: Schedule, found: _Found) -> None:
    """Every transfer that a link asks for has both its ends, once."""
    for compute in found.singles:
        if isinstance(compute, Forward | Backward):
            for transfer in schedule.receives_of(compute):
                _check_ends(schedule, found, transfer, compute)


def _check_ends(schedule: Schedule, found: _Found, transfer: Transfer, compute: Compute) -> None:
    sends, receives = found.sends.get(transfer, ()), found.receives.get(transfer, ())
    source, target = schedule.placement[transfer.source], schedule.placement[transfer.target]
    if not receives:
        also = "" if sends else f", and the send to rank {source}"
        raise ScheduleError(
            f"rank {target} never receives {transfer}, which its {compute} needs; "
            f"add the receive to rank {target}{also}"
        )
    if not sends:
        raise ScheduleError(
            f"{receives[0]} receives {transfer}, but rank {source} never sends it; "
            f"add the send behind its {producer_of(transfer)}"
        )
    for places, verb in ((sends, "sends"), (receives, "receives")):
        if len(places) > 1:
            raise ScheduleError(f"{places[1]} {verb} {transfer} a second time; remove one of them")


def _check_own_order(schedule: Schedule, found: _Found) -> None:
    """On its own rank, nothing runs before what it needs."""
    for action, (place,) in found.singles.items():
        if isinstance(action, Forward | Backward):
            _check_compute(schedule, found, place, action)
        if isinstance(action, Reduce):
            for micro_batch in range(schedule.micro_batches):
                _check_before(found, Backward(action.stage, micro_batch), place, action)
    for transfer, (place,) in found.sends.items():
        _check_before(found, producer_of(transfer), place, f"send of {transfer}")


def _check_compute(schedule: Schedule, found: _Found, place: _Place, compute: Compute) -> None:
    if isinstance(compute, Backward):
        _check_before(found, Forward(compute.stage, compute.micro_batch), place, compute)
    elif compute.stage == 0:
        _check_before(found, Load(compute.micro_batch), place, compute)
    for transfer in schedule.links.inputs(compute):
        if schedule.is_local(transfer):
            _check_before(found, producer_of(transfer), place, compute)
        else:
            _check_received(found, transfer, place, compute)


def _check_before(found: _Found, first: _Single, place: _Place, then: Compute | Reduce | str) -> None:
    (first_place,) = found.singles[first]
    if first_place.index > place.index:
        raise ScheduleError(
            f"{place}: {then} comes before {first}, which is action {first_place.index}; move it behind that"
        )


def _check_received(found: _Found, transfer: Transfer, place: _Place, compute: Compute) -> None:
    (received,) = found.receives[transfer]
    if received.index > place.index:
        raise ScheduleError(
            f"{place}: {compute} needs {transfer}, which is received only at action {received.index}; "
            "move the exchange in front of it"
        )


def _check_pair_order(schedule: Schedule) -> None:
    """Between two ranks, the k-th send is the k-th receive."""
    sends: defaultdict[tuple[int, int], list[tuple[_Place, Transfer]]] = defaultdict(list)
    receives: defaultdict[tuple[int, int], list[tuple[_Place, Transfer]]] = defaultdict(list)
    for place, action in _places(schedule):
        if isinstance(action, Exchange):
            for transfer in action.sends:
                sends[place.rank, schedule.placement[transfer.target]].append((place, transfer))
            for transfer in action.receives:
                receives[schedule.placement[transfer.source], place.rank].append((place, transfer))
    for pair, sent in sends.items():
        for (place, transfer), (other, expected) in zip(sent, receives[pair], strict=True):
            if transfer != expected:
                raise ScheduleError(
                    f"{place} sends {transfer}, but {other} receives {expected} there: channels have no tags; "
                    f"put the sends of rank {pair[0]} and the receives of rank {pair[1]} in one order"
                )
