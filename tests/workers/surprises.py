"""What export drops or freezes without a word, each as a case: the rest of them are in the zoo."""

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss
from torch.utils.checkpoint import checkpoint

from zoo.case import Case, by_name, draw, normal

FEATURES = 8


def layers() -> nn.Sequential:
    """[B, D] to [B, D]."""
    hidden = [layer for _ in range(3) for layer in (nn.Linear(FEATURES, FEATURES), nn.Tanh())]
    return nn.Sequential(*hidden, nn.Linear(FEATURES, FEATURES)).double()


def pair_sample(seed: int, index: int) -> tuple[Tensor, Tensor]:
    generator = draw(seed, index)
    return normal(generator, FEATURES), normal(generator, FEATURES)


def distance(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    x, targets = batch
    return mse_loss(model(x), targets)


def half_of_what_comes_back() -> nn.Module:
    """A backward hook on the third layer halves the gradient of its input."""
    model = layers()
    model[2].register_full_backward_hook(lambda module, inputs, outputs: tuple(0.5 * each for each in inputs))
    return model


def half_of_a_parameters_gradient() -> nn.Module:
    """Hooks on a weight of each half; the runtime builds its parameters anew, and lost them without a word."""
    model = layers()
    for at in (2, 6):
        model[at].weight.register_hook(lambda gradient: 0.5 * gradient)
    return model


def by_chance(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    """The loss, doubled for about every other micro-batch."""
    if random.random() < 0.5:
        return 2 * distance(model, batch)
    return distance(model, batch)


def by_numpy_chance(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    if np.random.random() < 0.5:
        return 2 * distance(model, batch)
    return distance(model, batch)


class Reentrant(nn.Module):
    """Export took all that follows a reentrant checkpoint for computed without gradients, and no error told."""

    def __init__(self) -> None:
        super().__init__()
        self.lower = layers()
        self.middle = layers()
        self.upper = layers()

    def forward(self, x: Tensor) -> Tensor:
        return self.upper(checkpoint(self.middle, self.lower(x), use_reentrant=True))


class Nested(nn.Module):
    """The outer checkpoint holds an inner one: for export, gradients ended there as for `Reentrant`."""

    def __init__(self) -> None:
        super().__init__()
        self.lower = layers()
        self.upper = layers()

    def forward(self, x: Tensor) -> Tensor:
        return self.upper(checkpoint(self.outer, x, use_reentrant=False))

    def outer(self, x: Tensor) -> Tensor:
        return torch.tanh(checkpoint(self.lower, x, use_reentrant=False))


def penalised(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    """The loss and a tenth of the squared gradient of the outputs with respect to the inputs (1704.00028)."""
    x, targets = batch
    x = x.clone().requires_grad_()
    out = model(x)
    (slope,) = torch.autograd.grad(out.sum(), x, create_graph=True)
    return mse_loss(out, targets) + 0.1 * slope.square().sum(-1).mean()


def surprise(name: str, model: Callable[[], nn.Module], loss: Callable[[Any, Any], Tensor], **more: Any) -> Case:
    return Case(name=name, model=model, loss=loss, sample=pair_sample, **more)


CASES = by_name(
    surprise("module_backward_hook", half_of_what_comes_back, distance),
    surprise("parameter_hook", half_of_a_parameters_gradient, distance),
    surprise("python_random_branch", layers, by_chance, before_step=random.seed),
    surprise("numpy_random_branch", layers, by_numpy_chance, before_step=np.random.seed),
    surprise("nested_checkpoint", lambda: Nested().double(), distance),
    surprise("reentrant_checkpoint", lambda: Reentrant().double(), distance),
    surprise("gradient_penalty", layers, penalised),
)
