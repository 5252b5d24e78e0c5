"""Stand-ins for tensors while a graph is captured: shapes and types without memory."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv


@contextmanager
def faked(model: nn.Module, tensors: Sequence[Tensor], device: str) -> Iterator[list[Tensor]]:
    """Let `model` hold fake parameters and buffers on `device`, and give fakes of `tensors`; ties stay ties.

    Sharded parameters and those that were dropped because another rank has them are captured like any other. Tensors
    that are neither, such as plain attributes, stay real: a graph needs their values. A model that was built of fake
    tensors is left as it is.
    """
    mode = _mode_of(model) or FakeTensorMode(shape_env=ShapeEnv(), allow_non_fake_inputs=True)
    fakes: dict[int, Tensor] = {}
    kept: list[tuple[dict[str, Any], str, Tensor]] = []
    for module in model.modules():
        for tensors_of_module in (module._parameters, module._buffers):
            for name, value in tensors_of_module.items():
                if isinstance(value, Tensor) and not _serves(value, device):
                    kept.append((tensors_of_module, name, value))
    try:
        for owner, name, value in kept:
            if id(value) not in fakes:
                fakes[id(value)] = _fake(value, mode, device)
            owner[name] = fakes[id(value)]
        yield [tensor if _serves(tensor, device) else _fake(tensor, mode, device) for tensor in tensors]
    finally:
        for owner, name, value in kept:
            owner[name] = value


def _mode_of(model: nn.Module) -> FakeTensorMode | None:
    return next((p.fake_mode for p in model.parameters() if isinstance(p, FakeTensor)), None)


def _serves(value: Tensor, device: str) -> bool:
    return isinstance(value, FakeTensor) and value.device.type == device


def _fake(value: Tensor, mode: FakeTensorMode, device: str) -> Tensor:
    with mode:
        fake = torch.empty(value.shape, dtype=value.dtype, device=device)
    if isinstance(value, nn.Parameter):
        return nn.Parameter(fake, requires_grad=value.requires_grad)
    return fake
