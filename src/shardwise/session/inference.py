"""Evaluate and predict: forward only, in evaluation mode, over the same stages."""

from collections.abc import Callable, Iterator, Mapping
from typing import Any, final

import torch
from torch import distributed as dist
from torch.utils import _pytree as pytree

from shardwise.job import Batch, Job, objective
from shardwise.runtime import Engine, Share, forward_program


@final
class Inference:
    """Runs functions of the model without training it."""

    def __init__(self, engine: Engine, job: Job) -> None:
        self._engine, self._job = engine, job
        self._evaluation = forward_program(job, engine.program, objective(job.loss), engine.device)
        self._functions: dict[Any, Any] = {}

    def evaluate(self, shares: Iterator[Share]) -> tuple[float, Mapping[str, float], int]:
        """Loss, metrics and number of samples of one pass."""
        loss = weight = 0.0
        samples = 0
        sums: dict[str, float] = {}
        for share in shares:
            results = self._engine.forward(share, 0, self._evaluation)
            value, terms, metrics = self._engine.totals(share, results)
            loss, weight, samples = loss + value, weight + terms, samples + share.total
            for name, mean in metrics.items():
                sums[name] = sums.get(name, 0.0) + mean * share.total
        return loss / weight, {name: total / samples for name, total in sums.items()}, samples

    def predict(self, shares: Iterator[Share], function: Callable[[Any, Batch], Any]) -> list[Any]:
        """On rank 0, the results of each batch, one for each micro-batch in order."""
        if function not in self._functions:
            self._functions[function] = forward_program(self._job, self._engine.program, function, self._engine.device)
        program = self._functions[function]
        gathered = []
        for share in shares:
            results = self._engine.forward(share, 0, program)
            here = [(share.first + at, _to_host(result)) for at, result in results.items()]
            gathered.append(_to_first_rank(here))
        return [[result for _, result in sorted(batch, key=lambda each: each[0])] for batch in gathered if batch]


def _to_host(result: Any) -> Any:
    return pytree.tree_map_only(torch.Tensor, lambda tensor: tensor.cpu(), result)


def _to_first_rank(here: list[Any]) -> list[Any]:
    if not dist.is_initialized():
        return here
    everywhere: list[Any] = [None] * dist.get_world_size()
    dist.gather_object(here, everywhere if dist.get_rank() == 0 else None, dst=0)
    return [each for part in everywhere if part for each in part]
