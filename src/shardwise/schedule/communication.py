"""Add the communication to the order in which ranks compute, so that no group of transfers can wait in a circle.

The order is played once in units of time: a forward takes 4, a backward 8, a transfer 1. Every transfer gets the *slot*
at which its producer finishes. Fields of the batch, which nothing has to compute, go with the activation that stage 0
gives the same stage; where it gives none, one forward and one transfer before their use. Each rank starts one Exchange
per slot, with all the transfers of that slot in which it takes part, behind what it has finished by then and in front
of what it is still computing:

    stage 0    F0--F1--          B0------    B1------
    stage 1         F0--B0------F1--B1------
    slots          4   8        17          29

    stage 0: Load 0, F0, [4: send F0], Load 1, F1, [8: send F1], [17: receive B0], B0, [29: receive B1], B1
    stage 1: [4: receive F0], [8: receive F1], F0, B0, [17: send B0], F1, B1, [29: send B1]

Why nothing waits for ever, with channels that neither buffer nor tag and one queue of groups per rank: slots are one
order for all ranks. Take the lowest slot with a group that is not complete. All ranks with a part in it have completed
their groups of lower slots. Each of them does get to start this one, because what it computes first has *finished* by
this slot in the play, so began before it, so needs only transfers of lower slots. Both ends of every transfer of the
slot are then active, and the slot completes. Only the order counts: it holds however long the real forwards, backwards
and transfers take.

Why a transfer takes time in the play: without it, stage 1 would finish F0 at the slot of F1, and open the receive of F1
only behind F0; the next forward would wait for the whole of the next transfer, instead of computing beside it. Opening
early costs nothing, because groups never pass each other.
"""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence

from shardwise.errors import ScheduleError
from shardwise.schedule.actions import Action, Backward, Compute, Exchange, Forward, Load, Reduce, Transfer
from shardwise.schedule.lists import Links, Schedule, producer_of

FORWARD_UNITS = 4
BACKWARD_UNITS = 8
TRANSFER_UNITS = 1


def with_communication(
    name: str, orders: Sequence[Sequence[Compute]], *, placement: tuple[int, ...], links: Links
) -> Schedule:
    """The schedule that computes in these `orders`, one per rank, with Load, Exchange and Reduce added.

    raises:  ScheduleError where the orders wait for each other, whatever the communication
    """
    finish = _play(orders, placement, links)
    slots = _slots(finish, placement, links)
    return Schedule(
        name=name,
        stages=len(placement),
        micro_batches=1 + max(compute.micro_batch for order in orders for compute in order),
        placement=placement,
        links=links,
        ranks=tuple(
            tuple(_with_loads(_merge(order, finish, _exchanges(rank, slots, placement))))
            for rank, order in enumerate(orders)
        ),
    )


def _play(orders: Sequence[Sequence[Compute]], placement: tuple[int, ...], links: Links) -> dict[Compute, int]:
    """When each compute finishes, in units, if transfers never wait for each other."""
    finish: dict[Compute, int] = {}
    todo = [list(reversed(order)) for order in orders]
    clocks = [0] * len(orders)
    advanced = True
    while advanced:
        advanced = False
        for rank, order in enumerate(todo):
            while order and (ready := _ready(order[-1], finish, placement, links)) is not None:
                compute = order.pop()
                clocks[rank] = finish[compute] = max(clocks[rank], ready) + _units(compute)
                advanced = True
    if any(todo):
        stuck = "; ".join(f"rank {rank} stands at {order[-1]}" for rank, order in enumerate(todo) if order)
        raise ScheduleError(f"the orders of the ranks wait for each other: {stuck}; move what these need to the front")
    return finish


def _ready(compute: Compute, finish: Mapping[Compute, int], placement: tuple[int, ...], links: Links) -> int | None:
    """When everything that `compute` needs is there; None where something is not computed yet."""
    needed: dict[Compute, int] = {}  # the units between its end and this start
    if isinstance(compute, Backward):
        needed[Forward(compute.stage, compute.micro_batch)] = 0
    for transfer in links.inputs(compute):
        producer = producer_of(transfer)
        if not isinstance(producer, Load):
            needed[producer] = 0 if placement[transfer.source] == placement[transfer.target] else TRANSFER_UNITS
    if not needed.keys() <= finish.keys():
        return None
    return max((finish[producer] + units for producer, units in needed.items()), default=0)


def _units(compute: Compute) -> int:
    return FORWARD_UNITS if isinstance(compute, Forward) else BACKWARD_UNITS


def _slots(finish: Mapping[Compute, int], placement: tuple[int, ...], links: Links) -> dict[Transfer, int]:
    slots: dict[Transfer, int] = {}
    for compute, finished in finish.items():
        for transfer in links.inputs(compute):
            if placement[transfer.source] == placement[transfer.target]:
                continue
            producer = producer_of(transfer)
            if not isinstance(producer, Load):
                slots[transfer] = finish[producer]
            elif (0, transfer.target) in links.activations:
                slots[transfer] = finish[Forward(0, transfer.micro_batch)]
            else:
                slots[transfer] = max(0, finished - _units(compute) - FORWARD_UNITS - TRANSFER_UNITS)
    return slots


def _exchanges(rank: int, slots: Mapping[Transfer, int], placement: tuple[int, ...]) -> dict[int, Exchange]:
    """The groups in which `rank` takes part, by slot."""
    sends: defaultdict[int, list[Transfer]] = defaultdict(list)
    receives: defaultdict[int, list[Transfer]] = defaultdict(list)
    for transfer in sorted(slots):
        if placement[transfer.source] == rank:
            sends[slots[transfer]].append(transfer)
        if placement[transfer.target] == rank:
            receives[slots[transfer]].append(transfer)
    return {slot: Exchange(tuple(sends[slot]), tuple(receives[slot])) for slot in sorted({*sends, *receives})}


def _merge(order: Sequence[Compute], finish: Mapping[Compute, int], exchanges: Mapping[int, Exchange]) -> list[Action]:
    """Exchanges behind what is finished by their slot; a reduction behind the exchange that others wait for."""
    last_backward = {compute.stage: compute for compute in order if isinstance(compute, Backward)}
    timed: list[tuple[int, int, Action]] = [(finish[compute], 0, compute) for compute in order]
    timed += [(slot, 1, exchange) for slot, exchange in exchanges.items()]
    timed += [(finish[backward], 2, Reduce(stage)) for stage, backward in last_backward.items()]
    return [action for _, _, action in sorted(timed, key=lambda entry: entry[:2])]


def _with_loads(actions: Sequence[Action]) -> Iterator[Action]:
    """Each micro-batch is loaded once, just before its first use: a forward of stage 0, or a transfer of the batch."""
    loaded: set[int] = set()
    for action in actions:
        match action:
            case Forward(0, micro_batch):
                uses = [micro_batch]
            case Exchange(sends, _):
                uses = [transfer.micro_batch for transfer in sends if transfer.kind == "batch"]
            case _:
                uses = []
        yield from (Load(micro_batch) for micro_batch in sorted(set(uses) - loaded))
        loaded.update(uses)
        yield action
