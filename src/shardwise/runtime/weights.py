"""How much a micro-batch weighs where its loss is a scalar: found in the captured loss, checked on each batch."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, final

import torch
from torch import Tensor, fx, nn

from shardwise.errors import CaptureError, LossError
from shardwise.graph import Capture, Refusal, Signature, capture, read
from shardwise.job import Batch, Precision
from shardwise.plan import rewrite, weigh
from shardwise.plan.weighting import check_of_batch, weight_of_batch

MOST_KINDS = 16  # of batches that need a capture each

Fault = Callable[[Sequence[Tensor]], str]
"""What is wrong with a batch of these fields, "" where nothing is."""


def weighed(captured: Capture) -> tuple[Capture, Fault]:
    """The loss as a sum and its weight where that can be told; and a check of each batch where samples weigh it.

    raises:  CaptureError where its micro-batches cannot be weighed
    """
    weighing = weigh(captured)
    if isinstance(weighing, Refusal):
        raise CaptureError(f"the micro-batches of this loss cannot be weighed: {weighing}")
    return rewrite(captured, weighing), check_of_batch(captured, weighing.guards)


@final
@dataclass
class BatchWeights:
    """Weighs micro-batches of a loss that runs as it is: the loss is captured for this alone.

    A batch of another kind is captured again.
    """

    function: Callable[[Any, Batch], Mapping[str, Any]]
    model: nn.Module
    precision: Precision
    device: torch.device
    _known: list[tuple[Capture, fx.GraphModule | None, Fault]] = field(default_factory=list)

    def apply(self, batch: Batch, results: Mapping[str, Any]) -> Mapping[str, Any]:
        """`results` of the function on `batch`, with the loss as a sum and its weight.

        raises:  LossError where the batch has labels that make samples the wrong weight
        """
        if results["weight"] is not None:
            return results
        signature, tensors = read(batch)
        module, fault = self._find(signature, tensors, batch)
        wrong = fault(tensors)
        if wrong:
            raise LossError(wrong)
        if module is None:
            return results
        with torch.no_grad():
            (weight,) = module(*tensors)
        # A mean of nothing is not a number; as a sum it is zero.
        value = results["value"] * weight if float(weight) else torch.zeros_like(results["value"])
        return {**results, "value": value, "weight": weight}

    def _find(
        self, signature: Signature, tensors: Sequence[Tensor], batch: Batch
    ) -> tuple[fx.GraphModule | None, Fault]:
        for known, module, fault in self._known:
            if known.accepts(signature, tensors):
                return module, fault
        if len(self._known) >= MOST_KINDS:
            raise CaptureError(
                f"batches came in more than {MOST_KINDS} kinds whose loss must be captured to weigh it; pad them to "
                "few sizes, or return shardwise.Mean(total, weight) from the loss, which needs no capture"
            )
        captured = capture(self.function, self.model, batch, precision=self.precision, device=self.device.type)
        if isinstance(captured, Refusal):
            raise CaptureError(f"the micro-batches of this loss cannot be weighed: {captured}")
        rewritten, fault = weighed(captured)
        module = weight_of_batch(rewritten) if rewritten is not captured else None
        if rewritten is not captured and module is None:
            raise CaptureError("the weight of this loss comes out of the model; return shardwise.Mean(total, weight)")
        self._known.append((captured, module, fault))
        return module, fault
