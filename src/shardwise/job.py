"""What is asked: a model, a loss, an optimizer, and how many samples go into one step."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from shardwise.errors import LossError

Batch: TypeAlias = Any
"""What a DataLoader yields: a tensor, or tuples, lists and dicts of tensors and plain values."""

NamedParameters: TypeAlias = Iterable[tuple[str, nn.Parameter]]
Precision: TypeAlias = Literal["fp32", "bf16", "fp16"]


@dataclass(frozen=True, slots=True)
class Mean:
    """A loss that is a mean: `total / weight`, both summed over all micro-batches of the step before the division.

    total:   scalar tensor with gradient, the sum of the terms
    weight:  how many terms: a number, or a scalar tensor without gradient (say, the count of unmasked tokens)
    """

    total: Tensor
    weight: Tensor | float


LossValue: TypeAlias = Tensor | Mean | tuple[Tensor | Mean, dict[str, Any]]
Loss: TypeAlias = Callable[[Any, Batch], LossValue]


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """One training job, as it would be written for one device.

    model:           builds the module; called after `torch.manual_seed(seed)`, on every machine
    loss:            `loss(model, batch)`: a scalar tensor that is a mean over samples, or a `Mean`, or either with a
                     dict of metrics behind it
    optimizer:       makes the optimizer of the named parameters that it is given: a stage sees only its own
    batch_size:      samples per optimizer step, over the whole cluster
    weights:         folder of safetensors files in the names of the model's state dict; each rank fills its own part
    precision:       type of the forward and backward computation (autocast); parameters keep the type of the model
    clip_grad_norm:  greatest 2-norm of the gradient of the whole model; None clips nothing
    couple:          "batch" forbids splitting a batch into micro-batches (contrastive losses, batch statistics)
    """

    model: Callable[[], nn.Module]
    loss: Loss
    optimizer: Callable[[NamedParameters], Optimizer]
    batch_size: int
    scheduler: Callable[[Optimizer], LRScheduler] | None = None
    weights: Path | str | None = None
    precision: Precision = "fp32"
    clip_grad_norm: float | None = None
    seed: int = 0
    couple: Literal["samples", "batch"] = "samples"

    def __post_init__(self) -> None:
        if not callable(self.model) or isinstance(self.model, nn.Module):
            raise TypeError(
                f"Job.model is {type(self.model).__name__}; give a function that builds the module, "
                "such as model=lambda: Net(config): each rank builds only what it runs"
            )
        if isinstance(self.optimizer, Optimizer):
            raise TypeError(
                "Job.optimizer is an optimizer already; give a function of named parameters, "
                "such as optimizer=lambda named: torch.optim.AdamW(named, lr=3e-4)"
            )
        for name in ("loss", "optimizer"):
            if not callable(getattr(self, name)):
                raise TypeError(f"Job.{name} is {getattr(self, name)!r}; give a function")
        if self.batch_size < 1:
            raise ValueError(f"Job.batch_size is {self.batch_size}; a step needs at least one sample")
        if self.precision not in ("fp32", "bf16", "fp16"):
            raise ValueError(f"Job.precision is {self.precision!r}; use 'fp32', 'bf16' or 'fp16'")
        if self.clip_grad_norm is not None and not self.clip_grad_norm > 0:
            raise ValueError(f"Job.clip_grad_norm is {self.clip_grad_norm}; give a positive number, or None")
        if self.couple not in ("samples", "batch"):
            raise ValueError(f"Job.couple is {self.couple!r}; use 'samples' or 'batch'")

    def build(self) -> nn.Module:
        """The model with its initial weights: the same on every call."""
        torch.manual_seed(self.seed)
        return self.model()


@dataclass(frozen=True, slots=True)
class Terms:
    """What a loss returned, taken apart.

    value:    scalar tensor with gradient: a mean over samples where `weight` is None, else a sum
    weight:   how many terms `value` sums
    metrics:  scalars beside it, by name
    """

    value: Tensor
    weight: Tensor | float | None
    metrics: dict[str, Any]


def terms(value: LossValue) -> Terms:
    """Take apart what a loss returned.

    raises:  LossError where it is of no kind that can be trained on
    """
    metrics: dict[str, Any] = {}
    if isinstance(value, tuple) and len(value) == 2 and isinstance(value[1], dict):
        value, metrics = value
    weight: Tensor | float | None = None
    if isinstance(value, Mean):
        weight, value = value.weight, value.total
        if value.numel() != 1:
            raise LossError(
                f"Mean.total has shape {tuple(value.shape)}; sum it to one number, such as Mean(losses.sum(), n)"
            )
    if not isinstance(value, Tensor):
        raise LossError(
            f"the loss returned {type(value).__name__}; return a scalar tensor, a shardwise.Mean(total, weight), "
            "or either with a dict of metrics: return loss, {'accuracy': accuracy}"
        )
    if value.numel() != 1:
        raise LossError(
            f"the loss returned a tensor of shape {tuple(value.shape)}; reduce it to one number, such as loss.mean(), "
            "or say how it is weighted: shardwise.Mean(loss.sum(), loss.numel())"
        )
    return Terms(value, weight, metrics)


def objective(loss: Loss) -> Callable[[Any, Batch], dict[str, Any]]:
    """`loss` as the function that is captured: its results in a dict of "value", "weight" and "metrics"."""

    def run(model: Any, batch: Batch) -> dict[str, Any]:
        found = terms(loss(model, batch))
        return {"value": found.value, "weight": found.weight, "metrics": found.metrics}

    return run
