"""What an optimizer keeps, found by running it: one step on small copies of the parameters."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias, final

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from shardwise.job import NamedParameters

Factory: TypeAlias = Callable[[NamedParameters], Optimizer]

SIDE = 4  # of a probe: tall enough to tell one value per element from one per row


@final
@dataclass(frozen=True, slots=True)
class OptimizerState:
    """What a probe found.

    bytes_of:     state of each parameter of real size, by name
    elementwise:  whether parts of a matrix are stepped as the whole is, so that parameters may be sharded
    problem:      why it could not be stepped by itself, "" where it could; `bytes_of` then assumes two values each
    """

    bytes_of: Mapping[str, int]
    elementwise: bool
    problem: str = ""


def probe_optimizer(factory: Factory, parameters: Mapping[str, nn.Parameter]) -> OptimizerState:
    """Step the optimizer of `factory` once on a small copy of each parameter, by its real name.

    parameters:  the trained ones, by name; they may be fake, since only sizes and types are used

    No random state is changed.
    """
    if not parameters:
        return OptimizerState({}, elementwise=True)
    with torch.random.fork_rng(devices=[]):
        small = {name: _small(parameter) for name, parameter in parameters.items()}
        try:
            optimizer = _stepped(factory, small.items())
        except (RuntimeError, TypeError, ValueError, NotImplementedError) as error:
            # LBFGS asks for a closure, SAM for two steps, SparseAdam for sparse gradients: not ours to guess.
            assumed = {name: 2 * parameter.nbytes for name, parameter in parameters.items()}
            return OptimizerState(assumed, elementwise=False, problem=f"{type(error).__name__}: {error}")
        found = {name: _state_bytes(optimizer, small[name], parameter) for name, parameter in parameters.items()}
        return OptimizerState(found, _is_elementwise(factory, parameters))


def _small(parameter: nn.Parameter) -> nn.Parameter:
    shape = [min(size, SIDE) for size in parameter.shape]
    small = nn.Parameter(torch.ones(shape, dtype=parameter.dtype))
    small.grad = torch.ones_like(small)
    return small


def _stepped(factory: Factory, named: Iterable[tuple[str, nn.Parameter]]) -> Optimizer:
    optimizer = factory(list(named))
    optimizer.step()
    return optimizer


def _state_bytes(optimizer: Optimizer, small: nn.Parameter, parameter: nn.Parameter) -> int:
    """State in proportion to the elements; what is one number for the whole parameter stays one number."""
    tensors = [value for value in optimizer.state.get(small, {}).values() if isinstance(value, Tensor)]
    ratio = parameter.numel() / small.numel() if small.numel() else 0
    scaled = sum(tensor.nbytes for tensor in tensors if tensor.dim() or not small.dim())
    single = sum(tensor.nbytes for tensor in tensors if not tensor.dim() and small.dim())
    return round(scaled * ratio) + single


def _is_elementwise(factory: Factory, parameters: Mapping[str, nn.Parameter]) -> bool:
    """Step one matrix whole and in halves: as sharding along the first dimension would."""
    name = next((name for name, parameter in parameters.items() if parameter.dim() == 2), None)
    if name is None:
        return True
    generator = torch.Generator().manual_seed(0)
    values, gradients = (torch.randn(2 * SIDE, SIDE, generator=generator, dtype=torch.float64) for _ in range(2))
    whole = _step(factory, name, values, gradients)
    halves = [
        _step(factory, name, part, gradient) for part, gradient in zip(values.chunk(2), gradients.chunk(2), strict=True)
    ]
    return _equal(whole, halves)


def _step(factory: Factory, name: str, value: Tensor, gradient: Tensor) -> Tensor:
    parameter = nn.Parameter(value.clone())
    parameter.grad = gradient.clone()
    _stepped(factory, [(name, parameter)])
    return parameter.detach()


def _equal(whole: Tensor, halves: Sequence[Tensor]) -> bool:
    return torch.allclose(whole, torch.cat(list(halves)), rtol=1e-12, atol=1e-15)
