"""TensorBoard's event files; needs the package `tensorboard`, which is an optional extra."""

from pathlib import Path
from typing import final

from shardwise.track.report import StepReport


@final
class TensorBoard:
    """Writes each report as scalars into FOLDER/tensorboard; steps after `resume_step` that are there are hidden.

    raises:  ImportError where tensorboard is not installed
    """

    def __init__(self, folder: Path | str, *, resume_step: int = 0) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise ImportError(
                'event files need the package tensorboard: pip install "shardwise[tensorboard]"'
            ) from error
        self._writer = SummaryWriter(Path(folder) / "tensorboard", purge_step=resume_step + 1)

    def record(self, report: StepReport) -> None:
        for name, value in scalars(report).items():
            self._writer.add_scalar(name, value, report.step)

    def close(self) -> None:
        self._writer.close()


def scalars(report: StepReport) -> dict[str, float]:
    """The curves of a report, by tag: "train/..." for what every run has, "metrics/..." for the loss's own."""
    values = {
        "train/loss": report.loss,
        "train/grad_norm": report.grad_norm,
        "train/samples_per_second": report.samples_per_second,
        "train/learning_rate": report.learning_rate,
        "train/seconds": report.seconds,
        "train/memory_bytes": report.memory_bytes,
    } | {f"metrics/{name}": value for name, value in report.metrics.items()}
    return {name: value for name, value in values.items() if value is not None}
