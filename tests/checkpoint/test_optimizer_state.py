"""An optimizer's state by parameter name: there and back, before and after the first step, under other groups."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from shardwise.checkpoint import (
    Entry,
    flatten_optimizer,
    load,
    open_checkpoint,
    optimizer_skeleton,
    restore_optimizer,
    save,
)
from shardwise.errors import CheckpointError

FACTORIES: dict[str, Callable[[Any], Optimizer]] = {
    "adamw": lambda named: torch.optim.AdamW(named, lr=0.1, betas=(0.8, 0.95)),
    "adamw_amsgrad": lambda named: torch.optim.AdamW(named, lr=0.1, amsgrad=True),
    "adamw_tensor_lr": lambda named: torch.optim.AdamW(named, lr=torch.tensor(0.1)),
    "sgd": lambda named: torch.optim.SGD(named, lr=0.1),
    "sgd_momentum": lambda named: torch.optim.SGD(named, lr=0.1, momentum=0.9, nesterov=True),
    "adafactor": lambda named: torch.optim.Adafactor(named, lr=0.1),
    "adagrad": lambda named: torch.optim.Adagrad(named, lr=0.1),
    "nadam": lambda named: torch.optim.NAdam(named, lr=0.1),
    "radam": lambda named: torch.optim.RAdam(named, lr=0.1),
    "rmsprop": lambda named: torch.optim.RMSprop(named, lr=0.1, momentum=0.5, centered=True),
    "asgd": lambda named: torch.optim.ASGD(named, lr=0.1),
    "rprop": lambda named: torch.optim.Rprop(named, lr=0.1),
}


def model_and(factory: Callable[[Any], Optimizer]) -> tuple[nn.Module, Optimizer]:
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 2))
    return model, factory(list(model.named_parameters()))


def names_of(model: nn.Module) -> dict[Tensor, str]:
    return {parameter: name for name, parameter in model.named_parameters()}


def train(model: nn.Module, optimizer: Optimizer, steps: int) -> None:
    inputs = torch.linspace(-1, 1, 20).reshape(5, 4)
    for _ in range(steps):
        optimizer.zero_grad()
        model(inputs).square().mean().backward()
        optimizer.step()


def save_training(run: Path, model: nn.Module, optimizer: Optimizer) -> None:
    state = {f"model/{name}": value for name, value in model.state_dict().items()}
    save(run, 1, state | flatten_optimizer(optimizer, names_of(model)), {})


def resume(run: Path, model: nn.Module, optimizer: Optimizer) -> None:
    checkpoint = open_checkpoint(run / "checkpoints/step-00000001")
    flat = optimizer_skeleton(optimizer, names_of(model), checkpoint.entries)
    load(checkpoint, {f"model/{name}": value for name, value in model.state_dict().items()} | flat)
    restore_optimizer(optimizer, names_of(model), flat)


@pytest.mark.parametrize("name", FACTORIES)
@pytest.mark.parametrize("steps", [0, 3])
def test_a_fresh_optimizer_goes_on_bit_for_bit(tmp_path: Path, name: str, steps: int):
    model, optimizer = model_and(FACTORIES[name])
    train(model, optimizer, steps)
    save_training(tmp_path, model, optimizer)
    other, resumed = model_and(FACTORIES[name])
    resume(tmp_path, other, resumed)
    train(model, optimizer, 3)
    train(other, resumed, 3)
    assert all(torch.equal(value, other.state_dict()[key]) for key, value in model.state_dict().items())


@pytest.mark.parametrize("name", FACTORIES)
def test_an_optimizer_that_stepped_elsewhere_goes_on_bit_for_bit(tmp_path: Path, name: str):
    model, optimizer = model_and(FACTORIES[name])
    train(model, optimizer, 3)
    save_training(tmp_path, model, optimizer)
    other, resumed = model_and(FACTORIES[name])
    train(other, resumed, 7)
    resume(tmp_path, other, resumed)
    train(model, optimizer, 3)
    train(other, resumed, 3)
    assert all(torch.equal(value, other.state_dict()[key]) for key, value in model.state_dict().items())


def test_flat_keys_are_one_device_names():
    model, optimizer = model_and(FACTORIES["adamw"])
    train(model, optimizer, 1)
    assert sorted(flatten_optimizer(optimizer, names_of(model)))[:4] == [
        "optimizer/0.bias/exp_avg",
        "optimizer/0.bias/exp_avg_sq",
        "optimizer/0.bias/hyperparameters:json",
        "optimizer/0.bias/step",
    ]


def test_state_saved_before_the_first_step_empties_an_optimizer_that_stepped():
    model, optimizer = model_and(FACTORIES["adamw"])
    flat = flatten_optimizer(optimizer, names_of(model))
    train(model, optimizer, 2)
    restore_optimizer(optimizer, names_of(model), flat)
    assert not optimizer.state


def test_a_parameter_without_gradient_has_no_state_and_gets_none():
    model, optimizer = model_and(FACTORIES["adamw"])
    model.get_parameter("2.bias").requires_grad_(False)
    train(model, optimizer, 2)
    flat = flatten_optimizer(optimizer, names_of(model))
    other, resumed = model_and(FACTORIES["adamw"])
    restore_optimizer(resumed, names_of(other), flat)
    assert other.get_parameter("2.bias") not in resumed.state
    assert len(resumed.state) == 3


def test_hyperparameters_come_back_by_parameter_whatever_the_number_of_the_group():
    model, _ = model_and(FACTORIES["sgd"])
    weights = [p for n, p in model.named_parameters() if n.endswith("weight")]
    biases = [p for n, p in model.named_parameters() if n.endswith("bias")]
    optimizer = torch.optim.SGD([{"params": weights, "lr": 0.3}, {"params": biases, "lr": 0.7, "momentum": 0.5}], lr=1)
    optimizer.param_groups[0]["initial_lr"] = 0.4  # as a scheduler leaves it
    flat = flatten_optimizer(optimizer, names_of(model))
    swapped = torch.optim.SGD([{"params": biases}, {"params": weights}], lr=1.0)
    restore_optimizer(swapped, names_of(model), flat)
    assert [(g["lr"], g["momentum"], g.get("initial_lr")) for g in swapped.param_groups] == [
        (0.7, 0.5, None),
        (0.3, 0, 0.4),
    ]


def test_tuples_stay_tuples_and_a_tensor_learning_rate_stays_that_tensor():
    model, optimizer = model_and(FACTORIES["adamw_tensor_lr"])
    rate = optimizer.param_groups[0]["lr"]
    rate.fill_(0.25)
    flat = flatten_optimizer(optimizer, names_of(model))
    rate.fill_(0.5)
    restore_optimizer(optimizer, names_of(model), flat)
    assert optimizer.param_groups[0]["lr"] is rate
    assert rate.item() == 0.25
    assert optimizer.param_groups[0]["betas"] == (0.9, 0.999)


def test_how_a_step_is_computed_belongs_to_the_device_and_is_not_restored():
    model, _ = model_and(FACTORIES["sgd"])
    looped = torch.optim.SGD(model.parameters(), lr=0.3, foreach=False)
    batched = torch.optim.SGD(model.parameters(), lr=0.1, foreach=True)
    restore_optimizer(batched, names_of(model), flatten_optimizer(looped, names_of(model)))
    assert (batched.param_groups[0]["lr"], batched.param_groups[0]["foreach"]) == (0.3, True)


def test_parameters_with_different_pasts_in_one_group_are_refused():
    model, optimizer = model_and(FACTORIES["sgd"])
    first, *rest = model.parameters()
    grouped = torch.optim.SGD([{"params": [first], "lr": 0.3}, {"params": rest}], lr=0.1)
    with pytest.raises(
        CheckpointError, match=r"one group .* '0\.weight', saved with .*0\.3.* and '0\.bias', saved .*0\.1"
    ):
        restore_optimizer(optimizer, names_of(model), flatten_optimizer(grouped, names_of(model)))


def test_plain_numbers_and_none_keep_their_type(tmp_path: Path):
    model, optimizer = model_and(FACTORIES["sgd"])
    plain = {"count": 3, "scale": 0.1, "seen": True, "buffer": None}
    for parameter in model.parameters():
        optimizer.state[parameter] = dict(plain)
    save_training(tmp_path, model, optimizer)
    other, resumed = model_and(FACTORIES["sgd"])
    resume(tmp_path, other, resumed)
    for parameter in other.parameters():
        restored = resumed.state[parameter]
        assert restored == plain
        assert {key: type(value) for key, value in restored.items()} == {k: type(v) for k, v in plain.items()}


def test_state_in_another_type_than_its_parameter_is_not_cast(tmp_path: Path):
    weight = nn.Parameter(torch.ones(3, dtype=torch.bfloat16))
    optimizer = torch.optim.SGD([("w", weight)], lr=0.1)
    moment = torch.tensor([0.1, 0.2, 0.3])
    optimizer.state[weight]["momentum_buffer"] = moment
    save(tmp_path, 1, flatten_optimizer(optimizer, {weight: "w"}), {})
    optimizer.state.clear()
    checkpoint = open_checkpoint(tmp_path / "checkpoints/step-00000001")
    flat = optimizer_skeleton(optimizer, {weight: "w"}, checkpoint.entries)
    load(checkpoint, flat)
    restore_optimizer(optimizer, {weight: "w"}, flat)
    assert torch.equal(optimizer.state[weight]["momentum_buffer"], moment)


def test_state_that_is_there_is_filled_in_place_and_not_doubled():
    model, optimizer = model_and(FACTORIES["adamw"])
    train(model, optimizer, 1)
    flat = flatten_optimizer(optimizer, names_of(model))
    entries = {key: Entry(tuple(value.shape), value.dtype) for key, value in flat.items()}
    skeleton = optimizer_skeleton(optimizer, names_of(model), entries)
    weight = model.get_parameter("0.weight")
    assert skeleton["optimizer/0.weight/exp_avg"] is optimizer.state[weight]["exp_avg"]
    assert skeleton.keys() == flat.keys()


def test_a_parameter_that_was_not_saved_is_named_on_load(tmp_path: Path):
    model, optimizer = model_and(FACTORIES["adamw"])
    flat = flatten_optimizer(optimizer, names_of(model))
    save(tmp_path, 1, {key: value for key, value in flat.items() if "/2.bias/" not in key}, {})
    checkpoint = open_checkpoint(tmp_path / "checkpoints/step-00000001")
    with pytest.raises(CheckpointError, match=r"'optimizer/2\.bias/hyperparameters:json' is not in it"):
        load(checkpoint, optimizer_skeleton(optimizer, names_of(model), checkpoint.entries))


def test_what_cannot_be_named_or_saved_is_refused():
    model, optimizer = model_and(FACTORIES["sgd"])
    weight = model.get_parameter("0.weight")
    with pytest.raises(ValueError, match=r"names lacks a parameter of shape \(3,\) in group 0"):
        flatten_optimizer(optimizer, {weight: "0.weight"})
    optimizer.state[weight]["history"] = [torch.zeros(1)]
    with pytest.raises(CheckpointError, match=r"keeps 'history' of '0\.weight' as list"):
        flatten_optimizer(optimizer, names_of(model))
    optimizer.state.clear()
    optimizer.state["global"]["count"] = 1
    with pytest.raises(CheckpointError, match="state under 'global', which is no parameter"):
        flatten_optimizer(optimizer, names_of(model))
