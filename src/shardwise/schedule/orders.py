"""In which order a rank computes: GPipe, 1F1B, interleaved 1F1B, and forward only.

All training orders are one: run some forwards ahead, then one forward and one backward by turns, then the backwards
left over. They differ in how many forwards run ahead, which is also what a rank holds in memory.
"""

from collections.abc import Sequence
from itertools import chain, pairwise, zip_longest

from shardwise.schedule.actions import Backward, Compute, Forward
from shardwise.schedule.communication import with_communication
from shardwise.schedule.lists import Links, Schedule


def gpipe(*, stages: int, micro_batches: int, links: Links | None = None) -> Schedule:
    """All forwards, then all backwards. A rank holds every micro-batch at once.

    links:   without them, a plain chain
    Source:  Huang et al., GPipe, arXiv:1811.06965. Backwards run in the order of the forwards here, so that every
             schedule adds gradients up in the same order.
    """
    _check(stages, micro_batches)
    orders = training_orders("gpipe", stages=stages, ranks=stages, micro_batches=micro_batches)
    return with_communication("gpipe", orders, placement=tuple(range(stages)), links=links or Links.chain(stages))


def one_f_one_b(*, stages: int, micro_batches: int, links: Links | None = None) -> Schedule:
    """One forward, one backward by turns, once the pipeline is full. Stage s of p holds at most p - s micro-batches.

    links:   without them, a plain chain
    Source:  Narayanan et al., PipeDream-Flush, arXiv:2006.09503, section 2.2.
    """
    _check(stages, micro_batches)
    orders = training_orders("1f1b", stages=stages, ranks=stages, micro_batches=micro_batches)
    return with_communication("1f1b", orders, placement=tuple(range(stages)), links=links or Links.chain(stages))


def interleaved_one_f_one_b(*, stages: int, ranks: int, micro_batches: int, links: Links | None = None) -> Schedule:
    """1F1B with several stages a rank: stage s on rank s % ranks. More messages for a smaller bubble.

    Micro-batches go in groups of at least `ranks` through the first stages of all ranks, then through the second
    stages, and so on. Groups differ by one micro-batch at most: a last group of just the remainder would be too small
    to keep all ranks busy until it comes round again.

    links:   without them, a plain chain
    raises:  ValueError where `stages` is not a multiple of `ranks`, at least two each
    Source:  Narayanan et al., Megatron-LM, arXiv:2104.04473, section 2.2, where the ranks divide the micro-batches.
    """
    _check(stages, micro_batches)
    if ranks < 1 or stages % ranks or stages < 2 * ranks:
        raise ValueError(
            f"{stages} stages cannot interleave on {ranks} ranks; give each rank the same number of stages, two or "
            "more, or use one_f_one_b"
        )
    orders = training_orders("interleaved-1f1b", stages=stages, ranks=ranks, micro_batches=micro_batches)
    placement = tuple(stage % ranks for stage in range(stages))
    return with_communication("interleaved-1f1b", orders, placement=placement, links=links or Links.chain(stages))


def training_schedule(name: str, *, stages: int, ranks: int, micro_batches: int, links: Links) -> Schedule:
    """The schedule that plans call `name`: one place for what the planner simulates and the runtime runs.

    raises:  ValueError where there is none of that name
    """
    match name:
        case "gpipe":
            return gpipe(stages=stages, micro_batches=micro_batches, links=links)
        case "1f1b":
            return one_f_one_b(stages=stages, micro_batches=micro_batches, links=links)
        case "interleaved-1f1b":
            return interleaved_one_f_one_b(stages=stages, ranks=ranks, micro_batches=micro_batches, links=links)
    raise ValueError(f"there is no schedule {name!r}; use 'gpipe', '1f1b' or 'interleaved-1f1b'")


def training_orders(name: str, *, stages: int, ranks: int, micro_batches: int) -> list[list[Compute]]:
    """What each rank computes in `training_schedule`, and so what it holds, without the messages."""
    match name:
        case "gpipe":
            return [_order_of_one_stage(stage, micro_batches, ahead=micro_batches) for stage in range(stages)]
        case "1f1b":
            return [_order_of_one_stage(stage, micro_batches, ahead=stages - 1 - stage) for stage in range(stages)]
        case "interleaved-1f1b":
            return [_interleaved_order(rank, ranks, stages // ranks, micro_batches) for rank in range(ranks)]
    raise ValueError(f"there is no schedule {name!r}; use 'gpipe', '1f1b' or 'interleaved-1f1b'")


def forward_only(*, stages: int, micro_batches: int, ranks: int | None = None, links: Links | None = None) -> Schedule:
    """Evaluation: each rank runs forwards only, stage s on rank s % ranks. The gradients of `links` are left out.

    ranks:   without them, one rank per stage
    links:   without them, a plain chain
    """
    _check(stages, micro_batches)
    ranks = stages if ranks is None else ranks
    if not 1 <= ranks <= stages:
        raise ValueError(f"{stages} stages do not fill {ranks} ranks; give each rank at least one stage")
    links = links or Links.chain(stages)
    links = Links(activations=links.activations, gradients=frozenset(), batch=links.batch)
    orders = [
        [
            Forward(stage, micro_batch)
            for group in _groups(micro_batches, ranks)
            for stage in range(rank, stages, ranks)
            for micro_batch in group
        ]
        for rank in range(ranks)
    ]
    placement = tuple(stage % ranks for stage in range(stages))
    return with_communication("forward-only", orders, placement=placement, links=links)


def _check(stages: int, micro_batches: int) -> None:
    if stages < 1 or micro_batches < 1:
        raise ValueError(f"{stages} stages and {micro_batches} micro-batches; a step needs at least one of each")


def _order_of_one_stage(stage: int, micro_batches: int, *, ahead: int) -> list[Compute]:
    forwards = [Forward(stage, micro_batch) for micro_batch in range(micro_batches)]
    backwards = [Backward(stage, micro_batch) for micro_batch in range(micro_batches)]
    return _by_turns(forwards, backwards, ahead)


def _interleaved_order(rank: int, ranks: int, stages_a_rank: int, micro_batches: int) -> list[Compute]:
    groups = _groups(micro_batches, ranks)
    stages = range(rank, ranks * stages_a_rank, ranks)
    forwards = [Forward(stage, micro_batch) for group in groups for stage in stages for micro_batch in group]
    backwards = [
        Backward(stage, micro_batch) for group in groups for stage in reversed(stages) for micro_batch in group
    ]
    ahead = 2 * (ranks - 1 - rank) + (stages_a_rank - 1) * len(groups[0])
    return _by_turns(forwards, backwards, ahead)


def _groups(micro_batches: int, ranks: int) -> list[range]:
    """Consecutive micro-batches, at least `ranks` a group where there are that many, the larger groups first."""
    count = max(1, micro_batches // ranks)
    size, larger = divmod(micro_batches, count)
    starts = [group * size + min(group, larger) for group in range(count + 1)]
    return [range(start, end) for start, end in pairwise(starts)]


def _by_turns(forwards: Sequence[Forward], backwards: Sequence[Backward], ahead: int) -> list[Compute]:
    turns = chain.from_iterable(zip_longest(forwards[ahead:], backwards))
    return [*forwards[:ahead], *(compute for compute in turns if compute is not None)]
