import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from shardwise.cost import probe_optimizer

SHAPES = {"weight": (64, 32), "bias": (64,), "scale": (), "kernel": (16, 8, 3, 3)}


def parameters(dtype: torch.dtype = torch.float32) -> dict[str, nn.Parameter]:
    return {name: nn.Parameter(torch.zeros(shape, dtype=dtype)) for name, shape in SHAPES.items()}


def stepped_state_bytes(factory, real):
    """The slow way: step the optimizer on the parameters themselves."""
    for parameter in real.values():
        parameter.grad = torch.ones_like(parameter)
    optimizer = factory(list(real.items()))
    optimizer.step()
    return {
        name: sum(v.nbytes for v in optimizer.state.get(p, {}).values() if isinstance(v, torch.Tensor))
        for name, p in real.items()
    }


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "factory",
    [
        lambda named: torch.optim.SGD(named, lr=0.1),
        lambda named: torch.optim.SGD(named, lr=0.1, momentum=0.9),
        lambda named: torch.optim.AdamW(named, lr=0.1),
        lambda named: torch.optim.Adam(named, lr=0.1, amsgrad=True),
    ],
    ids=["sgd", "momentum", "adamw", "amsgrad"],
)
def test_a_small_step_tells_the_state_of_the_real_parameters(factory, dtype):
    found = probe_optimizer(factory, parameters(dtype))
    assert found.bytes_of == stepped_state_bytes(factory, parameters(dtype))
    assert (found.elementwise, found.problem) == (True, "")


def test_fake_parameters_of_any_size_are_probed_without_memory():
    with FakeTensorMode():
        huge = {"weight": nn.Parameter(torch.empty(10**6, 10**6))}
    state = probe_optimizer(lambda named: torch.optim.AdamW(named), huge)
    assert state.bytes_of == {"weight": 8 * 10**12 + 4}


def test_each_parameter_is_probed_by_its_name():
    def mixed(named):
        named = list(named)
        moving = [parameter for name, parameter in named if name == "weight"]
        still = [parameter for name, parameter in named if name != "weight"]
        return torch.optim.SGD([{"params": moving, "momentum": 0.9}, {"params": still}], lr=0.1)

    only_weight = {name: parameter for name, parameter in parameters().items() if name in ("weight", "bias")}
    assert probe_optimizer(mixed, only_weight).bytes_of == {"weight": 64 * 32 * 4, "bias": 0}


def test_what_steps_rows_together_is_not_elementwise():
    muon = probe_optimizer(lambda named: torch.optim.Muon(named, lr=0.1), {"weight": parameters()["weight"]})
    adafactor = probe_optimizer(lambda named: torch.optim.Adafactor(named), parameters())
    assert not muon.elementwise
    assert not adafactor.elementwise


def test_an_optimizer_that_asks_for_a_closure_is_named_as_a_problem():
    state = probe_optimizer(lambda named: torch.optim.LBFGS([p for _, p in named]), {"bias": parameters()["bias"]})
    assert "closure" in state.problem
    assert not state.elementwise
    assert state.bytes_of == {"bias": 2 * 64 * 4}


def test_probing_changes_no_random_state():
    before = torch.get_rng_state()
    probe_optimizer(lambda named: torch.optim.AdamW(named), parameters())
    assert torch.equal(before, torch.get_rng_state())
