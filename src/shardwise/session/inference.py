"""Evaluate and predict: forward only, in evaluation mode, over the same stages."""

from collections.abc import Callable, Iterator, Mapping
from typing import Any, final

import torch
from torch import distributed as dist
from torch.utils import _pytree as pytree

from shardwise.job import Batch, Job, objective
from shardwise.runtime import Engine, Share, Variant, Variants, forward_program
from shardwise.runtime.buffers import first_buffers
from shardwise.runtime.variants import Weighs


@final
class Inference:
    """Runs functions of the model without training it."""

    def __init__(self, engine: Engine, job: Job) -> None:
        self._engine, self._job = engine, job
        self._loss = objective(job.loss)
        self._programs: dict[Any, Variant | Variants] = {}

    def evaluate(self, shares: Iterator[Share]) -> tuple[float, Mapping[str, float], int]:
        """Loss, metrics and number of samples of one pass."""
        program = self._program(self._loss, "weighed")
        loss = weight = 0.0
        samples = 0
        sums: dict[str, float] = {}
        with first_buffers(self._engine.program, self._engine.mesh):
            for share in shares:
                results = self._engine.forward(share, 0, program)
                value, terms, metrics = self._engine.totals(share, results)
                loss, weight, samples = loss + value, weight + terms, samples + share.total
                for name, mean in metrics.items():
                    sums[name] = sums.get(name, 0.0) + mean * share.total
        return loss / weight, {name: total / samples for name, total in sums.items()}, samples

    def predict(self, shares: Iterator[Share], function: Callable[[Any, Batch], Any]) -> list[Any]:
        """The results of each batch, one for each micro-batch in order; on every rank."""
        program = self._program(function, "as it is")
        gathered = []
        with first_buffers(self._engine.program, self._engine.mesh):
            for share in shares:
                results = self._engine.forward(share, 0, program)
                here = [(share.first + at, _to_host(result)) for at, result in results.items()]
                gathered.append(_to_every_rank(here))
        return [[result for _, result in sorted(batch, key=lambda each: each[0])] for batch in gathered]

    def _program(self, function: Callable[[Any, Any], Any], weighs: Weighs) -> Variant | Variants:
        program = self._engine.program
        # Stages with shards are evaluated on gathered copies, which are stale after the next step.
        if function not in self._programs or (program.sharded and program.variants is not None):
            self._programs[function] = forward_program(self._job, program, function, weighs, self._engine.device)
        return self._programs[function]


def _to_host(result: Any) -> Any:
    return pytree.tree_map_only(torch.Tensor, lambda tensor: tensor.cpu(), result)


def _to_every_rank(here: list[Any]) -> list[Any]:
    if not dist.is_initialized():
        return here
    everywhere: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everywhere, here)
    return [each for part in everywhere for each in part]
