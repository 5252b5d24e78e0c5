"""Sums and norms of gradients that lie in this process."""

import pytest
import torch
from torch import nn

from shardwise.runtime.gradients import square


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_a_norm_has_room_for_the_scale_of_the_loss_in_every_type(dtype):
    """A norm in float16 would end at 65504."""
    parameters = [nn.Parameter(torch.zeros(size, dtype=dtype)) for size in (3, 0, 5)]
    for parameter in parameters[:2]:
        parameter.grad = torch.full_like(parameter, 2.0**15)
    assert float(square(parameters, torch.device("cpu"))) == pytest.approx(3 * 2.0**30)


def test_gradients_of_several_types_count_together():
    parameters = [nn.Parameter(torch.zeros(4, dtype=dtype)) for dtype in (torch.float16, torch.float64)]
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    assert float(square(parameters, torch.device("cpu"))) == 8.0
