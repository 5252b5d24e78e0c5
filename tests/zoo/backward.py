"""Models whose backward is not the derivative of their forward: gradient reversal, and a hook that scales."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from zoo.case import Case, by_name, draw, integers, normal
from zoo.transformer import Block

FEATURES = 16
TOKENS = 6
CLASSES = 5


class Reverse(torch.autograd.Function):
    """The identity, with a gradient of `-strength` times what comes back (Ganin and Lempitsky, 1409.7495)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, strength: float) -> Tensor:
        ctx.strength = strength
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return -ctx.strength * gradients[0], None


class Adversary(nn.Module):
    """[B, T, D] to class logits and, past a reversal, to domain logits."""

    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(*(Block(FEATURES) for _ in range(4)))
        self.classes = nn.Linear(FEATURES, CLASSES)
        self.domains = nn.Sequential(nn.Linear(FEATURES, FEATURES), nn.ReLU(), nn.Linear(FEATURES, 2))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        features = self.features(x).mean(1)
        return self.classes(features), self.domains(Reverse.apply(features, 0.7))


def domain_sample(seed: int, index: int) -> dict[str, Tensor]:
    generator = draw(seed, index)
    return {
        "x": normal(generator, TOKENS, FEATURES),
        "kind": integers(generator, CLASSES),
        "domain": integers(generator, 2),
    }


def adversarial_loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    kinds, domains = model(batch["x"])
    return cross_entropy(kinds, batch["kind"]) + cross_entropy(domains, batch["domain"])


class Hooked(nn.Module):
    """Four blocks; what comes back into the second is multiplied by 0.5 by a hook on its output."""

    def __init__(self) -> None:
        super().__init__()
        self.lower = nn.Sequential(*(Block(FEATURES) for _ in range(2)))
        self.upper = nn.Sequential(*(Block(FEATURES) for _ in range(2)))
        self.head = nn.Linear(FEATURES, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = self.lower(x)
        if x.requires_grad:
            x.register_hook(lambda gradient: 0.5 * gradient)
        return self.head(self.upper(x).mean(1))


def class_sample(seed: int, index: int) -> tuple[Tensor, Tensor]:
    generator = draw(seed, index)
    return normal(generator, TOKENS, FEATURES), integers(generator, CLASSES)


def class_loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    sequences, labels = batch
    return cross_entropy(model(sequences), labels)


CASES = by_name(
    Case(name="gradient_reversal", model=lambda: Adversary().double(), loss=adversarial_loss, sample=domain_sample),
    Case(name="hooks", model=lambda: Hooked().double(), loss=class_loss, sample=class_sample),
)
