"""Small jobs to plan, and a plan to edit."""

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, mse_loss

from shardwise.job import Job
from shardwise.plan import Plan, Stage

FEATURES = 16
CLASSES = 8


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(FEATURES, 4 * FEATURES)
        self.norm = nn.LayerNorm(4 * FEATURES)
        self.down = nn.Linear(4 * FEATURES, FEATURES)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.norm(self.up(x)).tanh().exp())


class Net(nn.Module):
    """[B, D] to [B, C], in four equal blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(4))
        self.head = nn.Linear(FEATURES, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def batch(samples: int = 8) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {
        "x": torch.randn(samples, FEATURES, generator=generator),
        "label": torch.randint(CLASSES, (samples,), generator=generator),
        "mask": torch.rand(samples, generator=generator) > 0.5,
        "target": torch.randn(samples, CLASSES, generator=generator),
    }


def squares(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return mse_loss(model(batch["x"]), batch["target"])


def labels(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return cross_entropy(model(batch["x"]), batch["label"])


def job(
    model: Callable[[], nn.Module] = Net, loss: Callable[[Any, Any], Any] = squares, batch_size: int = 16, **rest: Any
) -> Job:
    given = {"optimizer": lambda named: torch.optim.AdamW(named), **rest}
    return Job(model=model, loss=loss, batch_size=batch_size, **given)


PLAN = Plan(
    cluster="4x cpu",
    devices=4,
    replicas=2,
    stages=(
        Stage(begins="", ends="blocks.1.down", rank=0, flops=600, memory_bytes=3 * 2**30, bytes_sent=4096),
        Stage(
            begins="before blocks.2", ends="head", rank=1, recompute=(0, 1), flops=200, memory_bytes=99, bytes_sent=0
        ),
    ),
    schedule="1f1b",
    micro_batches=4,
    precision="fp32",
    batch_size=16,
    weighting="samples",
    fingerprint="abc",
    notes=("a note",),
    step_seconds=0.25,
)


def changed(**fields: Any) -> Plan:
    return dataclasses.replace(PLAN, **fields)
