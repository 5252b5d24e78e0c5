"""What export drops or freezes without a word is in the graph all the same, or refused with the user's line.

That what stays in the graph computes the right gradients is shown in `test_pieces`.
"""

import random
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from graph.in_turn import run_backward
from graph.models import Hooked, Reversed, captured, linear, numbers, refusal, tensors_of
from shardwise.graph import Draws, Refusal, capture

DRAWS = Draws(seed=1, step=2, micro_batch=3, device=torch.device("cpu"))


def squares(output: Tensor) -> list[Any]:
    return [output.square().sum()]


def test_a_custom_function_and_a_hook_on_a_tensor_are_ops_that_call_the_users_code():
    assert "opaque_0" in captured(Reversed(), numbers(3, 8)).graph.capture.module.code
    assert "hook_0" in captured(Hooked(), numbers(3, 8)).graph.capture.module.code


def test_a_hook_stays_with_the_op_whose_gradient_it_sees():
    chain = captured(Hooked(), numbers(3, 8))
    assert "after first" not in chain.cuts


def test_a_hook_that_is_removed_again_is_refused():
    def loss(model: nn.Module, x: Tensor) -> list[Any]:
        output = model(x)
        output.register_hook(lambda gradient: gradient).remove()
        return squares(output)

    assert "the loss removes a tensor hook again" in refusal(linear(), numbers(3, 8), loss)


def test_a_backward_hook_on_a_module_is_refused_with_the_modules_name():
    model = nn.Sequential(linear(), linear())
    model[1].register_full_backward_hook(lambda module, inputs, outputs: None)
    assert refusal(model, numbers(3, 8)).startswith("module 1 (Linear) has a backward hook, which a graph would lose")


def test_a_gradient_hook_on_a_parameter_stays_since_pieces_hold_the_parameter_itself():
    plain, hooked = linear(), linear()
    hooked.load_state_dict(plain.state_dict())
    hooked.bias.register_hook(lambda gradient: 2 * gradient)
    for model in (plain, hooked):
        run_backward(captured(model, numbers(3, 8)), [0], tensors_of(model), [numbers(3, 8)], DRAWS)
    assert torch.equal(hooked.bias.grad, 2 * plain.bias.grad)
    assert torch.equal(hooked.weight.grad, plain.weight.grad)


def test_a_backward_pass_inside_the_loss_is_refused_with_its_line():
    def loss(model: nn.Module, x: Tensor) -> list[Any]:
        x = x.requires_grad_()
        (slope,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
        return squares(slope)

    reason = refusal(linear(), numbers(3, 8), loss)
    assert reason.startswith("the loss runs a backward pass of its own")
    assert reason.endswith("(slope,) = torch.autograd.grad(model(x).sum(), x, create_graph=True))")


@pytest.mark.parametrize(
    ("generator", "draw", "line"),
    [
        ("Python's", lambda: random.random(), "random.random()"),
        ("Python's", lambda: random.choice([1.0, 2.0]), "random.choice"),
        ("numpy's", lambda: np.random.random(), "np.random.random()"),
        ("numpy's", lambda: float(np.random.normal()), "np.random.normal()"),
    ],
)
def test_a_number_drawn_in_python_is_refused_with_its_line_and_put_back(generator, draw, line):
    """Only Python's generator was put back: planning on one rank then moved numpy's on that rank alone."""
    before = random.getstate(), np.random.get_state()[1:3]
    reason = refusal(linear(), numbers(3, 8), lambda model, x: squares(model(x) * draw()))
    assert reason.startswith(f"the loss draws from {generator} random generator, whose value a graph would freeze")
    assert line in reason
    assert random.getstate() == before[0]
    torch.testing.assert_close(np.random.get_state()[1:3], before[1], rtol=0, atol=0)


def test_a_generator_is_put_back_also_where_the_capture_stops_for_another_reason():
    def loss(model: nn.Module, x: Tensor) -> list[Any]:
        np.random.random()
        random.random()
        return squares(model(x)) if x.sum() > 0 else [x.sum()]

    before = random.getstate(), np.random.get_state()[2]
    assert "Python asks for the value of a tensor" in refusal(linear(), numbers(3, 8), loss)
    assert (random.getstate(), np.random.get_state()[2]) == before


def test_torchs_own_draws_are_not_refused():
    chain = captured(linear(), numbers(3, 8), lambda model, x: squares(model(x) * torch.rand(())))
    assert [op.draws for op in chain.graph.ops if op.draws] == [1]


def test_a_number_that_forward_notes_for_its_own_later_use_is_no_state():
    class Notes(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(8, 8)

        def forward(self, x):
            self.samples = x.shape[1]
            return self.linear(x).sum() / self.samples

    found = capture(lambda model, batch: model(batch), Notes(), torch.ones(3, 8))
    assert not isinstance(found, Refusal), found


def test_state_that_the_forward_pass_changes_in_python_is_refused_by_name():
    class Counting(nn.Linear):
        calls = 0

        def forward(self, x: Tensor) -> Tensor:
            self.calls = self.calls + 1
            return self.calls * super().forward(x)

    model = nn.Sequential(linear(), Counting(8, 8, dtype=torch.float64))
    model[1].calls = 0
    assert refusal(model, numbers(3, 8)).startswith("the forward pass changes model.1.calls in Python")
