"""Reports for tests: everything but the step may be left to its default."""

from typing import Any

from shardwise.track import StepReport


def report(step: int, **others: Any) -> StepReport:
    values = {
        "loss": 2.0 / step,
        "grad_norm": 1.5,
        "samples_per_second": 3412.4,
        "learning_rate": 3e-4,
        "seconds": 0.5,
        "memory_bytes": 3 * 2**29,
    }
    return StepReport(step=step, **(values | others))
