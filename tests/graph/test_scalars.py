"""The Python numbers that a capture may freeze are found again: where they stand, and what they are."""

from typing import Any

from torch import Tensor, nn

from graph.models import linear
from shardwise.graph import scalars

SCALE = 0.5


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = linear()
        self.factor = 2.0

    def forward(self, x: Tensor) -> Tensor:
        return self.factor * SCALE * self.layer(x)


def test_attributes_closures_defaults_and_named_globals_are_found():
    beta = 0.1

    def loss(model: Scaled, x: Tensor, gamma: float = 3.0) -> Any:
        return beta * gamma * model(x).sum()

    found = scalars(loss, Scaled())
    assert found["model.factor"] == 2.0
    assert found["loss: beta"] == 0.1
    assert found["loss: default 0"] == 3.0
    assert found[f"{__name__}.SCALE"] == 0.5


def test_a_number_that_changed_shows_under_its_name():
    schedule = {"beta": 0.1}

    def loss(model: nn.Module, x: Tensor) -> Any:
        return schedule["beta"] * model(x).sum()

    before = scalars(loss, Scaled())
    schedule["beta"] = 0.2
    after = scalars(loss, Scaled())
    assert [name for name in before if before[name] != after[name]] == ["loss: schedule['beta']"]


def test_functions_that_the_loss_calls_are_followed():
    temperature = 4.0

    def soften(x: Tensor) -> Tensor:
        return x / temperature

    def loss(model: nn.Module, x: Tensor) -> Any:
        return soften(model(x)).sum()

    assert 4.0 in scalars(loss, linear()).values()
