"""What a step takes at least: so that the search need not play what cannot win."""

from shardwise.plan.case import Case
from shardwise.schedule import StageCosts


def least_of_case(case: Case) -> float:
    """No cuts of this case make a step shorter.

        W / (1 - (1 - 1/m)^p)        W: seconds of a micro-batch on one rank, p: ranks of the pipeline, m: micro-batches

    Stage s cannot begin before a micro-batch has come through the stages in front of it, forward, nor can the step end
    before its last one has gone back through them: the step takes t_0 + ... + t_(s-1) + m t_s for every s. These are
    all equal where each stage has (1 - 1/m) of the time of the one before, and any other way to share out W makes one
    of them longer. With several stages on a rank, or ranks of several speeds, only the sum of the work is sure.
    """
    p, m = case.ranks, case.micro_batches
    whole = [loads.seconds(0, case.segments) for loads in case.loads]
    if case.recompute == "always":
        again = [loads.forward_seconds(0, case.segments) for loads in case.loads]
        whole = [a + b for a, b in zip(whole, again, strict=True)]
    if min(whole) <= 0:
        return 0.0
    if case.stages_per_rank == 1 and len(set(whole)) == 1:
        return whole[0] / (1 - (1 - 1 / m) ** p)
    return m / sum(1 / seconds for seconds in whole)


def least_of_stages(case: Case, costs: StageCosts) -> float:
    """No order of actions makes a step of these stages shorter, with t = f + b of each stage and w of each wire:

    before its own m micro-batches a stage waits for the first one to come, and behind them for the last one to go
        sum of t, 2w before s  +  m t_s
    in 1F1B, F(m - 1) of a stage that runs k - 1 forwards ahead has only k - 1 backwards behind it, and all stages that
    follow still to go through
        sum of all t, 2w  +  (m - 1) f_s  +  (m - k) b_s
    and F(i + k) follows B(i), which comes back through all stages that follow
        sum of t, 2w before s  +  (q + 1) (sum of t, 2w from s on)  +  (m - 1 - q k) b_s        q: (m - 1) // k
    """
    m = case.micro_batches
    times = [f + b for f, b in zip(costs.forwards, costs.backwards, strict=True)]
    wires = [2 * _wire_seconds(costs, stage) for stage in range(1, len(times))]
    whole = sum(times) + sum(wires)
    if case.stages_per_rank > 1:
        busy = [sum(times[rank :: case.ranks]) for rank in range(case.ranks)]
        return max(m * max(busy), whole)
    least, before = 0.0, 0.0
    for stage, time in enumerate(times):
        least = max(least, before + m * time)
        if case.schedule == "1f1b":
            k = min(m, case.ranks - stage)
            rounds, rest = divmod(m - 1, k)
            f, b = costs.forwards[stage], costs.backwards[stage]
            ahead = whole + (m - 1) * f + (m - k) * b
            back = before + (rounds + 1) * (whole - before) + rest * b
            least = max(least, ahead, back)
        before += time + (wires[stage] if stage < len(wires) else 0.0)
    return max(least, whole)


def _wire_seconds(costs: StageCosts, stage: int) -> float:
    """From the stage before to `stage`."""
    size = costs.link_bytes.get(("activation", stage - 1, stage), 0)
    return costs.latency_seconds + size / costs.bytes_per_second
