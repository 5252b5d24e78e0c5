"""The task of counting what is reduced over replicas, on one rank."""

from typing import Any

from torch import Tensor
from torch import distributed as dist

from workers.layouts import CASES, job_of
from workers.training import Training, engine_of, share_of


def count_reductions(training: Training) -> list[int]:
    """How many elements of gradients each step reduces over replicas, each as often as it is reduced."""
    case = CASES[training.case]
    engine = engine_of(training, job_of(case, training.clip_grad_norm))
    counts = []
    reduce = dist.all_reduce

    def counted(tensor: Tensor, op: Any = dist.ReduceOp.SUM, group: Any = None, async_op: bool = False) -> Any:
        if group is engine.mesh.data and tensor.is_floating_point():
            counts[-1] += tensor.numel()
        return reduce(tensor, op, group, async_op)

    dist.all_reduce = counted
    try:
        for step in range(len(training.batches)):
            counts.append(0)
            engine.step(share_of(training, engine, step), step)
    finally:
        dist.all_reduce = reduce
    return counts
