"""What a step takes at least: so that the search need not play what cannot win."""

from shardwise.plan.case import Case, in_flight
from shardwise.plan.loads import State


def least_of_case(case: Case) -> float:
    """No cuts of this case make a step shorter.

        W / (1 - (1 - 1/m)^p)        W: seconds of a micro-batch on one rank, p: ranks of the pipeline, m: micro-batches

    Stage s cannot begin before a micro-batch has come through the stages in front of it, forward, nor can the step end
    before its last one has gone back through them: the step takes t_0 + ... + t_(s-1) + m t_s for every s. These are
    all equal where each stage has (1 - 1/m) of the time of the one before, and any other way to share out W makes one
    of them longer. With several stages on a rank, or ranks of several speeds, only the sum of the work is sure.
    Gathering parameters is part of W, where ranks are alike; where they are not, who gathers need not be who computes.
    """
    p, m = case.ranks, case.micro_batches
    whole = [loads.seconds(0, case.segments) for loads in case.loads]
    if case.recompute == "always":
        again = [loads.forward_seconds(0, case.segments) for loads in case.loads]
        whole = [a + b for a, b in zip(whole, again, strict=True)]
    if min(whole) <= 0:
        return 0.0
    if len(set(whole)) > 1:
        return m / sum(1 / seconds for seconds in whole)
    # In parts it takes longer, and never less.
    gathers = 0.0 if case.overlaps else 3 * case.gather_seconds(case.loads[0].state(0, case.segments).parameters)
    alike = whole[0] + gathers
    return alike / (1 - (1 - 1 / m) ** p) if case.stages_per_rank == 1 else m * alike / p


def least_lack(case: Case) -> int:
    """Bytes that the ranks lack together at least, however the model is cut; 0 or less where they may have enough.

    Each rank holds its share of the state, what enters each of its stages for every micro-batch in flight, and what one
    segment needs for a moment.
    """
    shards = case.sharding.shards
    loads = case.loads[0]
    state = loads.state(0, case.segments)
    needed = (state.parameters + state.gradients + state.optimizer) // shards
    if shards > 1 and case.sharding.mode == "gathered":
        needed += state.parameters + state.gradients
    for own, held in zip(case.loads, in_flight(case), strict=True):
        needed += sum(held) * own.least_entering + own.least_working
    return needed - sum(case.rooms)


def outlook(case: Case) -> float:
    """About what a step takes, if the model could be cut anywhere: no bound, but seldom much more than what comes out.

    All stages take the same time, except for the one with the longest segment, and what is recomputed saves as much for
    its time as the segment that saves most.
    """
    p, v, m, count = case.ranks, case.stages_per_rank, case.micro_batches, case.segments
    busy = 1 / sum(1 / max(loads.seconds(0, count), 1e-30) for loads in case.loads)
    longest = min(loads.longest_seconds for loads in case.loads)
    again = max(_recomputed(case, rank, held) for rank, held in enumerate(in_flight(case)))
    usual = (busy + again) / v
    wire = 2 * case.transfer(case.loads[0].usual_entering) if p > 1 else 0.0
    state = case.loads[0].state(0, count)
    gather = 3 * case.gather_seconds(state.parameters // p)
    rank = max(v * usual, (v - 1) * usual + longest) + gather
    step = m * rank + (p - 1) * (usual + gather / v + wire)
    whole = p * (v * usual + gather) + (p * v - 1) * wire
    rest = case.reduce(state.gradients // (p * v)) + case.update(state.gradients // p // case.sharding.shards)
    return max(step, whole) + rest


def _recomputed(case: Case, rank: int, held: tuple[int, ...]) -> float:
    """Seconds that recompute adds to a micro-batch on this rank, about, with an even share of the segments."""
    loads, p, stages = case.loads[rank], case.ranks, case.stages
    forward = loads.forward_seconds(0, case.segments) / p
    if case.recompute in ("never", "always"):
        return forward if case.recompute == "always" else 0.0
    state = loads.state(0, case.segments)
    own = State(state.parameters // p, state.gradients // p, state.optimizer // p)
    kept = sum(held) * (loads.made(0, case.segments) // stages + loads.least_entering)
    missing = case.sharding.bytes(own, 0) + kept + loads.least_working - case.rooms[rank]
    if missing <= 0:
        return 0.0
    if case.recompute == "all or none":
        return forward
    return min(forward, missing / (max(held) * loads.saved_a_second))
