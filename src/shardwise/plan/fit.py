"""Fit the stages of a rank into its memory, with as little computed twice as can be."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias, final

from shardwise.plan.loads import Loads, State
from shardwise.plan.plan import ShardMode

Recompute: TypeAlias = Literal["as needed", "never", "always", "all or none"]

TRIES = 2_000  # of sets of units to recompute: the first is greedy, and few of many equal units need more


@final
@dataclass(frozen=True, slots=True)
class Stretch:
    """One stage of a rank: segments `first` to `last`, and how many micro-batches it holds at once."""

    loads: Loads
    first: int
    last: int
    in_flight: int


@final
@dataclass(frozen=True, slots=True)
class Sharding:
    shards: int = 1
    mode: ShardMode = "gathered"

    def bytes(self, state: State, largest: int) -> int:
        """Of a stage on one rank; `largest` is the most that is gathered at a time."""
        own = sum(-(-size // self.shards) for size in (state.parameters, state.gradients, state.optimizer))
        if self.shards == 1:
            return own
        if self.mode == "regathered":
            return own + 3 * largest  # the one in use, the next one on its way, and the gradient of the one in use
        return own + state.parameters + state.gradients


@final
@dataclass(frozen=True, slots=True)
class Fit:
    """How a rank holds its stages.

    regions:  for each stage, what runs its forward pass again in the backward pass: stretches of segments
    seconds:  for each stage, what that adds to the backward pass of one micro-batch
    bytes:    at the peak; more than there is where nothing fits
    """

    regions: tuple[tuple[range, ...], ...]
    seconds: tuple[float, ...]
    bytes: int


def fit(stages: Sequence[Stretch], room: int, sharding: Sharding, recompute: Recompute) -> Fit:
    """The fit into `room` bytes that costs least time; where none fits, the one that is short by least."""
    state = sum(sharding.bytes(one.loads.state(one.first, one.last), _largest(one)) for one in stages)
    kept = sum(one.in_flight * (_enters(one, one.first) + one.loads.made(one.first, one.last)) for one in stages)
    working = max(one.loads.working(one.first, one.last) for one in stages)
    nothing = Fit(((),) * len(stages), (0.0,) * len(stages), state + kept + working)
    if recompute == "never" or (recompute != "always" and nothing.bytes <= room):
        return nothing
    fits = [nothing] if recompute != "always" else []
    for size in _unit_sizes(stages):
        units = [unit for number in range(len(stages)) for unit in _units(stages[number], number, size)]
        chosen = _cheapest(units, nothing.bytes - room, working) if recompute == "as needed" else units
        fits.append(_with(stages, nothing.bytes, working, chosen))
    return min(fits, key=lambda found: (max(0, found.bytes - room), sum(found.seconds)))


@final
@dataclass(frozen=True, slots=True)
class _Unit:
    """Segments that are recomputed together, or not.

    saving:   bytes that are not kept, of all micro-batches in flight
    working:  bytes while they run again
    """

    stage: int
    segments: range
    saving: int
    seconds: float
    working: int


def _enters(stage: Stretch, at: int) -> int:
    return stage.loads.each[at].enters


def _largest(stage: Stretch) -> int:
    return stage.loads.largest(stage.first, stage.last)


def _unit_sizes(stages: Sequence[Stretch]) -> Iterator[int]:
    size, longest = 1, max(one.last - one.first for one in stages)
    while size < longest:
        yield size
        size *= 2
    yield longest


def _units(stage: Stretch, number: int, size: int) -> Iterator[_Unit]:
    for first in range(stage.first, stage.last, size):
        last = min(first + size, stage.last)
        made = stage.loads.made(first, last)
        # What enters the stage is held in any case.
        saving = made - (_enters(stage, first) if first > stage.first else 0)
        if saving > 0:
            yield _Unit(
                stage=number,
                segments=range(first, last),
                saving=stage.in_flight * saving,
                seconds=stage.loads.forward_seconds(first, last),
                working=made + stage.loads.working(first, last),
            )


def _cheapest(units: Sequence[_Unit], needed: int, working: int) -> Sequence[_Unit]:
    """The units that save `needed` bytes in least time; all of them where that is not enough.

    working:  bytes that are needed for a moment in any case

    A search in depth that takes or leaves one unit after the other, those first that save most for their time; a branch
    ends where even parts of units could not make it better than the best so far.
    """
    order = sorted(units, key=lambda unit: (-unit.saving / max(unit.seconds, 1e-12), unit.segments.start))
    best: tuple[float, tuple[_Unit, ...]] = float("inf"), tuple(order)
    tries = 0
    waiting: list[tuple[int, tuple[_Unit, ...]]] = [(0, ())]
    while waiting and tries < TRIES:
        at, taken = waiting.pop()
        tries += 1
        seconds = sum(unit.seconds for unit in taken)
        most = max((unit.working for unit in taken), default=0)
        missing = needed + max(0, most - working) - sum(unit.saving for unit in taken)
        if missing <= 0:
            if seconds < best[0]:
                best = seconds, taken
            continue
        if at == len(order) or seconds + _at_least(order[at:], missing) >= best[0]:
            continue
        unit = order[at]
        # Of equal units the first ones are taken: to leave one is to leave all that follow.
        alike = next((k for k in range(at, len(order)) if not _alike(order[k], unit)), len(order))
        waiting.append((alike, taken))
        waiting.append((at + 1, (*taken, unit)))
    return best[1]


def _at_least(units: Sequence[_Unit], missing: int) -> float:
    """Seconds to save `missing` bytes, if units could be taken in part."""
    seconds = 0.0
    for unit in units:
        if unit.saving >= missing:
            return seconds + unit.seconds * missing / unit.saving
        seconds, missing = seconds + unit.seconds, missing - unit.saving
    return float("inf")


def _alike(one: _Unit, other: _Unit) -> bool:
    return (one.saving, one.seconds, one.working) == (other.saving, other.seconds, other.working)


def _with(stages: Sequence[Stretch], without: int, working: int, chosen: Sequence[_Unit]) -> Fit:
    """`chosen` recomputed; `without` is the peak where nothing is."""
    own = [sorted((unit for unit in chosen if unit.stage == number), key=_start) for number in range(len(stages))]
    most = max((unit.working for unit in chosen), default=0)
    return Fit(
        tuple(tuple(unit.segments for unit in units) for units in own),
        tuple(sum(unit.seconds for unit in units) for units in own),
        without - sum(unit.saving for unit in chosen) + max(0, most - working),
    )


def _start(unit: _Unit) -> int:
    return unit.segments.start
