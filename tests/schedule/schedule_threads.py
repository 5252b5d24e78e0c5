"""A small runtime of integers: one thread per rank executes its list over in-memory transports.

Integers modulo a prime are exact, and the totals below depend on the order of addition, so a run equals the sequential
evaluation only if every value went where it belongs and every stage worked in the order of the micro-batches.
"""

from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

import torch
from torch import Tensor

from shardwise.schedule import Links, Schedule, in_memory_transports
from shardwise.schedule.actions import Backward, Exchange, Forward, Load, Reduce, Transfer
from shardwise.schedule.transport import InMemoryTransport, Pending

PRIME = 1_000_003
SHAPES = ((3,), (2, 2))  # every transfer carries two tensors
Values = Sequence[Tensor]
Totals = dict[tuple[str, int], list[int]]  # ("forward" or "backward", stage) -> a number per tensor


def run_in_threads(schedule: Schedule) -> Totals:
    """The totals of each stage, computed by one thread per rank. The first error of any rank is raised."""
    transports = in_memory_transports(schedule.placement)
    with ThreadPoolExecutor(len(transports)) as pool:
        runs = [pool.submit(_run_rank, schedule, rank, transport) for rank, transport in enumerate(transports)]
    return {key: total for run in runs for key, total in run.result().items()}


def run_in_sequence(schedule: Schedule) -> Totals:
    """The same totals, micro-batch by micro-batch, with nothing sent."""
    stages = _Stages(schedule.links)
    for micro_batch in range(schedule.micro_batches):
        stages.load(micro_batch)
        for stage in range(schedule.stages):
            stages.forward(stage, micro_batch)
        for stage in reversed(range(schedule.stages) if schedule.trains else ()):
            stages.backward(stage, micro_batch)
    return stages.totals


@dataclass
class _Stages:
    links: Links
    values: dict[Transfer, Values] = field(default_factory=dict)
    batches: dict[int, Values] = field(default_factory=dict)
    outputs: dict[tuple[int, int], Values] = field(default_factory=dict)
    totals: Totals = field(default_factory=dict)

    def load(self, micro_batch: int) -> None:
        self._give(Load(micro_batch), [torch.full(shape, 7 + micro_batch) for shape in SHAPES])

    def forward(self, stage: int, micro_batch: int) -> None:
        compute = Forward(stage, micro_batch)
        start = self.batches[micro_batch] if stage == 0 else [torch.full(shape, stage) for shape in SHAPES]
        output = self._mix(compute, start)
        self.outputs[stage, micro_batch] = output
        self._finish("forward", compute, output)

    def backward(self, stage: int, micro_batch: int) -> None:
        compute = Backward(stage, micro_batch)
        self._finish("backward", compute, self._mix(compute, self.outputs.pop((stage, micro_batch))))

    def _mix(self, compute: Forward | Backward, start: Values) -> Values:
        mixed = list(start)
        for transfer in self.links.inputs(compute):
            mixed = [(31 * m + v) % PRIME for m, v in zip(mixed, self.values.pop(transfer), strict=True)]
        return [(m * (2 * compute.stage + 3) + compute.micro_batch) % PRIME for m in mixed]

    def _finish(self, way: str, compute: Forward | Backward, output: Values) -> None:
        before = self.totals.get((way, compute.stage), [0, 0])
        self.totals[way, compute.stage] = [
            (17 * total + int(value.sum())) % PRIME for total, value in zip(before, output, strict=True)
        ]
        self._give(compute, output)

    def _give(self, producer: Load | Forward | Backward, output: Values) -> None:
        if isinstance(producer, Load):
            self.batches[producer.micro_batch] = output
        for transfer in self.links.outputs(producer):
            self.values[transfer] = [(value + transfer.target) % PRIME for value in output]


def _run_rank(schedule: Schedule, rank: int, transport: InMemoryTransport) -> Totals:
    stages = _Stages(schedule.links)
    under_way: dict[Transfer, Pending] = {}
    with transport:
        for action in schedule.ranks[rank]:
            match action:
                case Load(micro_batch):
                    stages.load(micro_batch)
                case Forward(stage, micro_batch):
                    _wait(schedule.receives_of(action), under_way)
                    stages.forward(stage, micro_batch)
                case Backward(stage, micro_batch):
                    _wait(schedule.receives_of(action), under_way)
                    stages.backward(stage, micro_batch)
                case Exchange(sends, receives):
                    outgoing = {transfer: stages.values.pop(transfer) for transfer in sends}
                    incoming = {transfer: [torch.zeros(s, dtype=torch.int64) for s in SHAPES] for transfer in receives}
                    stages.values |= incoming
                    pending = transport.start(action, outgoing, incoming)
                    under_way |= dict.fromkeys((*sends, *receives), pending)
                case Reduce():
                    pass
        _wait(under_way, under_way)
    assert all(pending.done() for pending in under_way.values())
    return stages.totals


def _wait(transfers: Iterable[Transfer], under_way: Mapping[Transfer, Pending]) -> None:
    for transfer in transfers:
        under_way[transfer].wait(transfer)
