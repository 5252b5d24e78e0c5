"""Compare a plan with its reference on the user's own model: one process, plain PyTorch, the same micro-batches."""

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, final

import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch.distributed.tensor import DTensor

from shardwise.graph import WHOLE, Draws, autocast, mix, seeding
from shardwise.job import Batch
from shardwise.runtime.engine import Engine
from shardwise.runtime.program import weighed_loss
from shardwise.runtime.share import Share

# Of the largest gradient of the model. A sum of many terms in another order differs by a few units of the last place.
TOLERANCE = {torch.float64: 1e-11, torch.float32: 1e-4, torch.bfloat16: 5e-2, torch.float16: 1e-2}


@final
@dataclass(frozen=True, slots=True)
class Difference:
    """Of one gradient: the largest absolute difference, as a share of the largest gradient of the model."""

    name: str
    error: float


@final
@dataclass(frozen=True, slots=True)
class Verdict:
    """A plan against its reference, on one step.

    differences:  of every gradient, the largest first
    tolerance:    what `differences` may be for the type of the parameters, and the precision
    """

    loss: float
    reference_loss: float
    differences: tuple[Difference, ...]
    tolerance: float

    @property
    def equal(self) -> bool:
        worst = max((each.error for each in self.differences), default=0.0)
        scale = max(abs(self.reference_loss), 1e-30)
        return worst <= self.tolerance and abs(self.loss - self.reference_loss) <= self.tolerance * scale


def verify(engine: Engine, share: Share, batches: Sequence[Batch], samples: Sequence[int]) -> Verdict | None:
    """One step's gradients of `engine` against the reference; nothing is updated. Every rank calls it.

    batches:  all micro-batches of the step in global order, with their samples; used on rank 0
    returns:  on rank 0 the verdict, else None
    """
    loss, _, _ = engine.gradients(share, 0)
    gathered = _gather(engine)
    engine.forget()
    if gathered is None:
        return None
    wanted_loss, wanted = reference(engine, batches, samples)
    largest = max((float(gradient.abs().max()) for gradient in wanted.values() if gradient.numel()), default=1.0)
    differences = [
        Difference(name, _error(gathered.get(name), wanted.get(name), largest)) for name in {**wanted, **gathered}
    ]
    dtype = {"fp32": next(iter(wanted.values())).dtype, "bf16": torch.bfloat16, "fp16": torch.float16}[
        engine.job.precision
    ]
    ordered = sorted(differences, key=lambda each: -each.error)
    return Verdict(loss, wanted_loss, tuple(ordered), TOLERANCE[dtype])


def reference(engine: Engine, batches: Sequence[Batch], samples: Sequence[int]) -> tuple[float, Mapping[str, Tensor]]:
    """Loss and gradients of the first step as one process computes them, micro-batch by micro-batch."""
    job, device = engine.job, engine.device
    model = job.build().to(device)
    loss = weighed_loss(job, engine.plan, model, device)
    total = weight = 0.0
    for number, (batch, size) in enumerate(zip(batches, samples, strict=True)):
        with ExitStack() as stack:
            if engine.program.whole is not None:
                torch.manual_seed(mix(job.seed, 0, number, WHOLE))
            else:
                stack.enter_context(seeding(Draws(job.seed, 0, number, device)))
            stack.enter_context(autocast(job.precision, device.type))
            found = loss(model, _to_device(batch, device))
        factor = size if found["weight"] is None else 1
        (found["value"] * factor).backward()
        total += float(found["value"].detach()) * factor
        weight += size if found["weight"] is None else float(found["weight"])
    return total / weight, {name: p.grad / weight for name, p in model.named_parameters() if p.grad is not None}


def _gather(engine: Engine) -> dict[str, Tensor] | None:
    """Every gradient by name, on rank 0."""
    here = {name: _full(p).cpu() for name, p in engine.program.parameters.items() if p.grad is not None}
    if not dist.is_initialized():
        return here
    first = engine.mesh.data_rank == 0
    everywhere: list[Any] = [None] * dist.get_world_size()
    dist.gather_object(here if first else {}, everywhere if dist.get_rank() == 0 else None, dst=0)
    if dist.get_rank():
        return None
    return {name: gradient for part in everywhere for name, gradient in part.items()}


def _full(parameter: nn.Parameter) -> Tensor:
    assert parameter.grad is not None
    gradient = parameter.grad
    return gradient.full_tensor() if isinstance(gradient, DTensor) else gradient


def _error(mine: Tensor | None, wanted: Tensor | None, largest: float) -> float:
    if mine is None or wanted is None:
        present = mine if mine is not None else wanted
        assert present is not None
        return float(present.abs().max()) / largest
    return float((mine - wanted.cpu()).abs().max()) / largest if wanted.numel() else 0.0


def _to_device(batch: Batch, device: torch.device) -> Batch:
    return torch.utils._pytree.tree_map_only(Tensor, lambda tensor: tensor.to(device), batch)
