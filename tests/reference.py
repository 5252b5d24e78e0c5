"""The reference of a plan: one process that runs the plan's micro-batches in global order, in plain PyTorch.

It is the yardstick of the exactness tests and shares no code with what it measures, except the type `Mean`.
"""

import hashlib
import math
import struct
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils._python_dispatch import TorchDispatchMode

from shardwise.job import Mean

Random: TypeAlias = Literal["torch", "graph"]
NamedParameters: TypeAlias = list[tuple[str, nn.Parameter]]


@dataclass(frozen=True, kw_only=True)
class Result:
    """What a run left behind; per step or by the name that `named_parameters` and `named_buffers` give.

    losses:      weighted mean over the micro-batches of each step
    grad_norms:  2-norm of the gradient of all parameters of each step, before clipping
    gradients:   of each step, as the optimizer saw them: divided by the weight, then clipped; None where none came
    parameters:  after the last step
    buffers:     after the last step, those that are in no state dict too
    """

    losses: list[float]
    grad_norms: list[float]
    gradients: list[dict[str, Tensor | None]]
    parameters: dict[str, Tensor]
    buffers: dict[str, Tensor]


def run(
    factory: Callable[[], nn.Module],
    loss: Callable[[Any, Any], Any],
    micro_batches: Sequence[Sequence[Any]],
    samples: Sequence[Sequence[int]],
    optimizer: Callable[[NamedParameters], Optimizer],
    *,
    seed: int = 0,
    clip_grad_norm: float | None = None,
    scheduler: Callable[[Optimizer], LRScheduler] | None = None,
    random: Random = "graph",
    precision: Literal["fp32", "bf16"] = "fp32",
    before_step: Callable[[int], None] = lambda step: None,
) -> Result:
    """Train the module that `factory` builds, one step for each entry of `micro_batches`.

    micro_batches:  for each step, the plan's micro-batches in global order
    samples:        for each step, the number of samples of each micro-batch: the weight of a scalar loss
    optimizer:      makes the optimizer of the named parameters that require a gradient
    random:         who seeds the draws of a loss: "graph" each random op, "torch" each micro-batch (see `mix`)
    precision:      "bf16" runs each loss under autocast; autocast leaves float64 alone
    before_step:    called with the number of each step, from 0, before it
    """
    torch.manual_seed(seed)
    model = factory()
    trained = [(name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad]
    optimize = optimizer(trained)
    schedule = None if scheduler is None else scheduler(optimize)
    losses, grad_norms, gradients = [], [], []
    for step, (batches, sizes) in enumerate(zip(micro_batches, samples, strict=True)):
        before_step(step)
        optimize.zero_grad(set_to_none=True)
        losses.append(_accumulate(model, loss, batches, sizes, (seed, step), random, precision))
        grad_norms.append(_clip(model, clip_grad_norm))
        gradients.append(_gradients(model))
        optimize.step()
        if schedule is not None:
            schedule.step()
    return Result(
        losses=losses,
        grad_norms=grad_norms,
        gradients=gradients,
        parameters={name: parameter.detach().clone() for name, parameter in model.named_parameters()},
        buffers={name: buffer.clone() for name, buffer in model.named_buffers()},
    )


def mix(seed: int, step: int, micro_batch: int, occurrence: int) -> int:
    """The seed of one draw, from 0 to 2**63 - 1: the first 8 bytes of BLAKE2b over four little-endian int64.

    seed:         of the job
    step:         optimizer steps before this one
    micro_batch:  its place in the global order of the step
    occurrence:   random ops before this one in the forward of that micro-batch; -1 for the micro-batch as a whole
    """
    message = struct.pack("<4q", seed, step, micro_batch, occurrence)
    return int.from_bytes(hashlib.blake2b(message, digest_size=8).digest(), "little") >> 1


class SeededDraws(TorchDispatchMode):
    """Seeds torch's CPU generator before each random op, by how many came before it.

    A random op is one that torch tags so once composite ops are taken apart: dropout is the `bernoulli_` inside it,
    and an LSTM of three layers with dropout between them is two. The CPU's fused attention bears the tag with or
    without dropout, so it counts either way; the unfused counts where it drops.
    """

    def __init__(self, seed: int, step: int, micro_batch: int) -> None:
        super().__init__()
        self.key = (seed, step, micro_batch)
        self.occurrence = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if torch.Tag.nondeterministic_seeded in func.tags:
            torch.default_generator.manual_seed(mix(*self.key, self.occurrence))
            self.occurrence += 1
        return func(*args, **(kwargs or {}))


class NoDraws(TorchDispatchMode):
    """Refuses random ops: in a backward they would be a recomputed forward, drawn anew instead of repeated."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if torch.Tag.nondeterministic_seeded in func.tags:
            raise RuntimeError(
                f"{func} runs in the backward, where the rule 'graph' does not seed it; "
                "give the reference the model without activation checkpointing"
            )
        return func(*args, **(kwargs or {}))


def _accumulate(
    model: nn.Module,
    loss: Callable[[Any, Any], Any],
    batches: Sequence[Any],
    sizes: Sequence[int],
    key: tuple[int, int],
    random: Random,
    precision: Literal["fp32", "bf16"],
) -> float:
    """Leave in `.grad` the gradient of the mean over all micro-batches, and return that mean."""
    total, weight = 0.0, 0.0
    for number, (batch, size) in enumerate(zip(batches, sizes, strict=True)):
        with _forward_draws(random, *key, number), _autocast(precision):
            mean = _weighted(loss(model, batch), size)
        with _backward_draws(random):
            mean.total.backward()
        total, weight = total + mean.total.item(), weight + float(mean.weight)
    if not weight > 0:
        raise ValueError(f"the micro-batches of step {key[1]} weigh {weight} together; a mean needs a positive weight")
    for parameter in model.parameters():
        if parameter.grad is not None:
            parameter.grad.div_(weight)
    return total / weight


def _weighted(value: Any, samples: int) -> Mean:
    """What a loss returned as total and weight, without its metrics; a scalar weighs as much as its samples."""
    if isinstance(value, tuple):
        value, _ = value
    return value if isinstance(value, Mean) else Mean(value * samples, samples)


@contextmanager
def _forward_draws(random: Random, seed: int, step: int, micro_batch: int) -> Iterator[None]:
    if random == "graph":
        with SeededDraws(seed, step, micro_batch):
            yield
    else:
        torch.manual_seed(mix(seed, step, micro_batch, -1))
        yield


def _backward_draws(random: Random) -> AbstractContextManager[Any]:
    return NoDraws() if random == "graph" else nullcontext()


def _autocast(precision: Literal["fp32", "bf16"]) -> AbstractContextManager[Any]:
    return nullcontext() if precision == "fp32" else torch.autocast("cpu", torch.bfloat16)


def _clip(model: nn.Module, greatest: float | None) -> float:
    """Scale the gradient of all parameters, each counted once, to a 2-norm of at most `greatest`; return the norm."""
    return float(nn.utils.clip_grad_norm_(model.parameters(), math.inf if greatest is None else greatest))


def _gradients(model: nn.Module) -> dict[str, Tensor | None]:
    return {
        name: None if parameter.grad is None else parameter.grad.clone() for name, parameter in model.named_parameters()
    }
