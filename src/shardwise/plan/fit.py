"""Fit the stages of a rank into its memory, with as little computed twice as can be."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias, final

from shardwise.plan.loads import Loads, State
from shardwise.plan.plan import ShardMode

Recompute: TypeAlias = Literal["as needed", "never", "always", "all or none"]

TRIES = 500  # of sets of units to recompute: the first is greedy, and few kinds of units need more


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

    A search in depth over the kinds of units, those first that save most for their time: of each as many as it can use,
    then one less and so on. A branch ends where even parts of units could not make it better than the best so far.
    """
    kinds = _kinds(units)
    best, chosen = float("inf"), tuple(len(kind) for kind in kinds)
    waiting: list[tuple[float, int, int, tuple[int, ...]]] = [(0.0, needed, working, ())]
    tries = 0
    while waiting and tries < TRIES:
        seconds, missing, most, taken = waiting.pop()
        tries += 1
        if missing <= 0:
            if seconds < best:
                best, chosen = seconds, taken
            continue
        at = len(taken)
        if seconds + _at_least(kinds[at:], missing) >= best:
            continue
        unit, count = kinds[at][0], len(kinds[at])
        grown = max(most, unit.working)
        enough = -(-(missing + grown - most) // unit.saving)
        waiting.append((seconds, missing, most, (*taken, 0)))
        waiting += [
            (seconds + k * unit.seconds, missing + grown - most - k * unit.saving, grown, (*taken, k))
            for k in range(1, min(count, enough) + 1)
        ]
    return [unit for kind, count in zip(kinds, chosen, strict=False) for unit in kind[:count]]


def _kinds(units: Sequence[_Unit]) -> list[list[_Unit]]:
    """Units by what they save and take, in the order of the model; the kinds that save most for their time first."""
    found: dict[tuple[int, float, int], list[_Unit]] = {}
    for unit in units:
        found.setdefault((unit.saving, unit.seconds, unit.working), []).append(unit)
    return sorted(found.values(), key=lambda kind: -kind[0].saving / max(kind[0].seconds, 1e-12))


def _at_least(kinds: Sequence[Sequence[_Unit]], missing: int) -> float:
    """Seconds to save `missing` bytes, if units could be taken in part."""
    seconds = 0.0
    for kind in kinds:
        unit, count = kind[0], len(kind)
        if count * unit.saving >= missing:
            return seconds + unit.seconds * missing / unit.saving
        seconds, missing = seconds + count * unit.seconds, missing - count * unit.saving
    return float("inf")


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
