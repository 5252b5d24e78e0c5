"""Of all ways to arrange the devices and to cut the model, the one with the shortest step.

Where there are few ways to cut, each is tried, best promise first, until what is promised is worse than what was
found: then the answer is the best there is. Where there are too many, cuts are placed so that the slowest stage is as
fast as can be, and moved one segment at a time as long as that helps; and cases whose outlook is far from the best that
was found are left alone.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from math import comb, inf
from typing import Generic, TypeVar, final

from shardwise.plan.bounds import least_lack, least_of_case, outlook
from shardwise.plan.case import Case, Split, fit_rank, least_seconds, split, step_seconds
from shardwise.plan.fit import Fit

Name = TypeVar("Name")

FEW = 4_000  # ways to cut that are all looked at
MOVES = 200  # of one cut by one segment, at most
PLAYED = 300  # forwards of a step, at most, for it to be played with all its messages
UNSURE = 0.05  # an outlook is seldom further above what comes out
NEAR = 0.02  # of the best step: no estimate is finer, so the simplest of those that are as near is the one to take


@final
@dataclass(frozen=True, slots=True)
class Found(Generic[Name]):
    """The best of one case.

    seconds:  of a step, played; of one with very many actions and where it does not fit, what it takes at least
    """

    name: Name
    split: Split
    seconds: float

    @property
    def fits(self) -> bool:
        return self.split.short_by[0] <= 0


@final
@dataclass(frozen=True, slots=True)
class Searched(Generic[Name]):
    """What a search has seen.

    found:    the best of each case that was looked at, in the order of the cases
    slower:   seconds that a step takes at least, of each case that cannot come near the best
    lacking:  bytes that are missing at least, all ranks together, of each case that was left alone for that
    """

    found: tuple[Found[Name], ...]
    slower: Mapping[Name, float]
    lacking: Mapping[Name, int]

    @property
    def best(self) -> Found[Name] | None:
        """The fastest of those that fit; of equals the first."""
        return min((one for one in self.found if one.fits), key=lambda one: one.seconds, default=None)

    @property
    def simplest(self) -> Found[Name] | None:
        """The first that fits and is near the best, as the cases are in order of what they ask of the reader."""
        best = self.best
        return next((one for one in self.found if best and one.fits and _near(one.seconds, best.seconds)), None)


def search(
    cases: Mapping[Name, Case], bounds: Callable[[Case], Sequence[tuple[int, ...]]] | None = None
) -> Searched[Name]:
    """Look at the cases, most promising first.

    bounds:  gives the cuts to look at, where they are not to be chosen
    """
    order = {name: at for at, name in enumerate(cases)}
    lacks = {name: least_lack(case) for name, case in cases.items()}
    lacking = {name: lack for name, lack in sorted(lacks.items(), key=lambda entry: entry[1]) if lack > 0}
    promises = {name: _promise(cases[name]) for name in cases if name not in lacking}
    known: dict[object, Fit] = {}
    found: list[Found[Name]] = []
    slower: dict[Name, float] = {}
    best = inf
    for name in sorted(promises, key=lambda name: promises[name]):
        if not _near(promises[name], best):
            slower[name] = promises[name]
            continue
        case = cases[name]
        one = _best_cuts(name, case, best, known, None if bounds is None else bounds(case))
        if one is None:
            slower[name] = max(promises[name], best * (1 + NEAR))
            continue
        found.append(one)
        if one.fits:
            best = min(best, one.seconds)
    if not found and lacking:  # what is short by least says what is missing
        name = next(iter(lacking))
        del lacking[name]
        case = cases[name]
        found += filter(None, [_best_cuts(name, case, inf, known, None if bounds is None else bounds(case))])
    return Searched(tuple(sorted(found, key=lambda one: order[one.name])), slower, lacking)


def _promise(case: Case) -> float:
    """What a step takes at least; with many ways to cut, about so."""
    least = least_of_case(case)
    return least if _few(case) else max(least, outlook(case) * (1 - UNSURE))


def _few(case: Case) -> bool:
    return comb(case.segments - 1, case.stages - 1) <= FEW


def _best_cuts(
    name: Name, case: Case, best: float, known: dict[object, Fit], given: Sequence[tuple[int, ...]] | None
) -> Found[Name] | None:
    """The best cuts of a case; None where it fits but cannot come near `best`."""
    if given is None:
        given = _all_cuts(case) if _few(case) else _good_cuts(case, best, known)
    fitting: list[tuple[float, Split]] = []
    short: list[tuple[int, float, Split]] = []
    for bounds in given:
        one = split(case, bounds, known)
        if one.short_by[0] > 0:
            short.append((one.short_by[0], least_seconds(one), one))
        else:
            fitting.append((least_seconds(one), one))
    if not fitting:
        _, least, one = min(short, key=lambda entry: entry[:2])
        return Found(name, one, least)
    winner: Found[Name] | None = None
    for least, one in sorted(fitting, key=lambda entry: entry[0]):
        if not _near(least, best) or (winner is not None and least >= winner.seconds):
            break
        seconds = step_seconds(one) if case.stages * min(case.micro_batches, 3 * case.ranks) <= PLAYED else least
        if winner is None or seconds < winner.seconds:
            winner = Found(name, one, seconds)
    return winner


def _near(seconds: float, best: float) -> bool:
    return seconds <= best * (1 + NEAR)


def _all_cuts(case: Case) -> list[tuple[int, ...]]:
    inner = combinations(range(1, case.segments), case.stages - 1)
    return [(0, *cuts, case.segments) for cuts in inner]


def balanced(case: Case, known: dict[object, Fit]) -> tuple[int, ...]:
    """Cuts by which the slowest stage is as fast as can be, each rank within its memory; even ones where none fit.

    Each stage takes as many segments as it can do within a limit, and the limit is halved and halved again: whatever a
    stage can do, it can do with a segment less.
    """
    low, high = 0.0, 2 * max(loads.seconds(0, case.segments) for loads in case.loads)
    cuts = _within(case, high, known)
    if cuts is None:
        return tuple(round(stage * case.segments / case.stages) for stage in range(case.stages + 1))
    while high - low > 1e-3 * high:
        middle = (low + high) / 2
        tighter = _within(case, middle, known)
        if tighter is None:
            low = middle
        else:
            high, cuts = middle, tighter
    return cuts


def _within(case: Case, limit: float, known: dict[object, Fit]) -> tuple[int, ...] | None:
    """Cuts by which no stage takes longer than `limit`; None where there are none."""
    cuts = [0]
    for stage in range(case.stages):
        first, most = cuts[-1], case.segments - (case.stages - 1 - stage)
        # The first place at which it is too much, by halves.
        low, high = first, most + 1
        while high - low > 1:
            middle = (low + high) // 2
            if _can(case, stage, first, middle, limit, known):
                low = middle
            else:
                high = middle
        if low == first:
            return None
        cuts.append(low)
    return tuple(cuts) if cuts[-1] == case.segments else None


def _can(case: Case, stage: int, first: int, last: int, limit: float, known: dict[object, Fit]) -> bool:
    """Whether `stage` can do these segments within `limit`; where a rank has several stages, as for memory, perhaps."""
    rank = case.rank_of(stage)
    seconds = case.loads[rank].seconds(first, last)
    if seconds > limit or case.stages_per_rank > 1:
        return seconds <= limit
    fitted = fit_rank(case, rank, [(first, last)], known)
    return fitted.bytes <= case.rooms[rank] and seconds + fitted.seconds[0] <= limit


def _good_cuts(case: Case, best: float, known: dict[object, Fit]) -> list[tuple[int, ...]]:
    """Balanced cuts, and better ones where those fit and come near `best`: most cases are far from it."""
    start = balanced(case, known)
    one = split(case, start, known)
    if one.short_by[0] > 0 or not _near(least_seconds(one), best):
        return [start]
    return _moved(case, start, known)


def _moved(case: Case, start: tuple[int, ...], known: dict[object, Fit]) -> list[tuple[int, ...]]:
    """`start`, and where one comes from it by moving one cut by one segment as long as that helps."""

    def worth(bounds: tuple[int, ...]) -> tuple[int, float]:
        one = split(case, bounds, known)
        return max(0, one.short_by[0]), least_seconds(one)

    best, value, tries, idle = start, worth(start), 0, 0
    steps = [(at, by) for at in range(1, case.stages) for by in (-1, 1)]
    while steps and idle < len(steps) and tries < MOVES:
        at, by = steps[tries % len(steps)]
        tries, idle = tries + 1, idle + 1
        moved = best[at] + by
        if not best[at - 1] < moved < best[at + 1]:
            continue
        other = (*best[:at], moved, *best[at + 1 :])
        found = worth(other)
        if found < value:
            best, value, idle = other, found, 0
    return [start, best]
