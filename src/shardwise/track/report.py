"""What one step came to."""

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True, kw_only=True)
class StepReport:
    """One optimizer step over the whole cluster, equal on all ranks."""

    step: int  # counts from 1
    loss: float
    grad_norm: float | None  # of the whole model, before clipping; None where nobody asked for it
    samples_per_second: float
    learning_rate: float  # of the first group, as this step used it
    seconds: float  # from the end of the step before to the end of this one
    memory_bytes: int | None  # the most that the device of rank 0 has held; on the CPU, its whole process
    metrics: Mapping[str, float] = field(default_factory=dict)  # what the loss returned beside the loss
