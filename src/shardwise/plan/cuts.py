"""Where to cut: so that the slowest stage is as fast as can be, and by name, as a plan writes it."""

import difflib
from collections.abc import Sequence
from itertools import accumulate

from shardwise.errors import PlanError
from shardwise.graph import Chain
from shardwise.plan.plan import Plan


def place_cuts(chain: Chain, speeds: Sequence[float]) -> tuple[int, ...]:
    """Give each stage consecutive segments; returns the positions where stages begin, the first one 0.

    The slowest stage is as fast as can be; of the ways to reach that, the one where fewest bytes cross.

    speeds:  of each stage's device, in work per second on any one scale

    raises:  PlanError where there are fewer segments than stages
    """
    segments = chain.segments
    if len(speeds) > len(segments):
        raise PlanError(
            f"{len(speeds)} stages were asked for, but the model has {len(segments)} segments; "
            f"use at most {len(segments)} stages"
        )
    work = [0, *accumulate(segment.work for segment in segments)]
    crossing = [segment.bytes_in for segment in segments]
    first = least_bytes(work, crossing, speeds, slowest_stage(work, speeds))
    return tuple(segments[at].ops.start for at in first)


def slowest_stage(work: Sequence[int], speeds: Sequence[float]) -> float:
    """The least time of the slowest stage, over all ways to share out the segments; `work` is cumulative, from 0."""
    count = len(work) - 1
    best = [work[end] / speeds[0] for end in range(count + 1)]
    for stage, speed in enumerate(speeds[1:], 1):
        reached = [float("inf")] * (count + 1)
        for end in range(stage + 1, count + 1):
            for start in range(end - 1, stage - 1, -1):
                own = (work[end] - work[start]) / speed
                if own >= reached[end]:
                    break  # it grows with every segment that is added in front
                reached[end] = min(reached[end], max(best[start], own))
        best = reached
    return best[count]


def least_bytes(work: Sequence[int], crossing: Sequence[int], speeds: Sequence[float], limit: float) -> list[int]:
    """The first segment of each stage, no stage slower than `limit`, with fewest bytes crossing the cuts.

    crossing:  bytes that cross the start of each segment
    """
    count = len(work) - 1
    best = [0.0 if work[end] / speeds[0] <= limit else float("inf") for end in range(count + 1)]
    choices: list[list[int]] = []
    for stage, speed in enumerate(speeds[1:], 1):
        reached, chosen = [float("inf")] * (count + 1), [0] * (count + 1)
        for end in range(stage + 1, count + 1):
            for start in range(end - 1, stage - 1, -1):
                if (work[end] - work[start]) / speed > limit:
                    break
                total = best[start] + crossing[start]
                if total < reached[end]:
                    reached[end], chosen[end] = total, start
        best = reached
        choices.append(chosen)
    starts, end = [], count
    for chosen in reversed(choices):
        end = chosen[end]
        starts.append(end)
    return [0, *reversed(starts)]


def positions(plan: Plan, chain: Chain) -> list[int]:
    """Where each stage of `plan` begins in `chain`, the first one at 0: what `graph.cut` takes as bounds.

    raises:  PlanError for a name that is not in the chain, with those nearest to it
    """
    return named_positions([stage.begins for stage in plan.stages[1:]], chain)


def named_positions(names: Sequence[str], chain: Chain) -> list[int]:
    """As `positions`, from the names of the cuts."""
    found = [0]
    for name in names:
        if name not in chain.cuts:
            raise PlanError(f'the model has no cut "{name}"; {_nearest(name, chain)}')
        if chain.cuts[name] <= found[-1]:
            raise PlanError(f'the cut "{name}" does not come after the one before it; order cuts as the model runs')
        found.append(chain.cuts[name])
    return found


def _nearest(name: str, chain: Chain) -> str:
    near = difflib.get_close_matches(name, chain.cuts, n=3, cutoff=0.5)
    if near:
        return "the nearest are " + ", ".join(f'"{other}"' for other in near)
    first = list(chain.cuts)[:3]
    return "cuts are named like " + ", ".join(f'"{other}"' for other in first) if first else "it cannot be cut at all"
