"""Training that moves between one process and FSDP on two ranks goes on bit for bit."""

from pathlib import Path

import torch
from checkpoint_world import on_ranks
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from shardwise.checkpoint import (
    flatten_optimizer,
    load,
    open_checkpoint,
    open_latest,
    optimizer_skeleton,
    restore_optimizer,
    save,
)

WEIGHT = torch.arange(35.0).reshape(7, 5)


def test_an_fsdp_model_with_its_adamw_goes_on_in_one_process_as_it_would_have_on_two_ranks(tmp_path: Path):
    sharded = on_ranks(2, tmp_path, train_sharded, tmp_path)[0]
    model, optimizer = model_and_optimizer()
    names = {parameter: name for name, parameter in model.named_parameters()}
    checkpoint = open_latest(tmp_path)
    assert checkpoint is not None
    state = {f"model/{name}": value for name, value in model.state_dict().items()}
    flat = optimizer_skeleton(optimizer, names, checkpoint.entries)
    load(checkpoint, state | flat)
    restore_optimizer(optimizer, names, flat)
    train(model, optimizer, steps=2)
    assert all(torch.equal(value, sharded[name]) for name, value in model.state_dict().items())


def test_an_fsdp_run_goes_on_from_a_checkpoint_of_one_process(tmp_path: Path):
    model, optimizer = model_and_optimizer()
    train(model, optimizer, steps=2)
    save_training(tmp_path, model, optimizer)
    train(model, optimizer, steps=2)
    for resumed in on_ranks(2, tmp_path, resume_sharded, tmp_path):
        assert all(torch.equal(value, resumed[name]) for name, value in model.state_dict().items())


def model_and_optimizer() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(6, 9), nn.Tanh(), nn.Linear(9, 1)).double()
    return model, torch.optim.AdamW(model.named_parameters(), lr=0.05)


def sharded_model_and_optimizer() -> tuple[nn.Module, torch.optim.Optimizer]:
    model, _ = model_and_optimizer()
    fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
    return model, torch.optim.AdamW(model.named_parameters(), lr=0.05)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int) -> None:
    """The same batch on every rank: the mean over ranks is then exactly what one process computes."""
    inputs = torch.linspace(-1, 1, 24, dtype=torch.float64).reshape(4, 6)
    for _ in range(steps):
        model(inputs).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def save_training(run: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    names = {parameter: name for name, parameter in model.named_parameters()}
    state = {f"model/{name}": value for name, value in model.state_dict().items()}
    save(run, 2, state | flatten_optimizer(optimizer, names), {})


def train_sharded(rank: int, run: Path) -> dict[str, Tensor]:
    model, optimizer = sharded_model_and_optimizer()
    train(model, optimizer, steps=2)
    save_training(run, model, optimizer)
    train(model, optimizer, steps=2)
    return {name: value.full_tensor() for name, value in model.state_dict().items()}


def resume_sharded(rank: int, run: Path) -> dict[str, Tensor]:
    model, optimizer = sharded_model_and_optimizer()
    names = {parameter: name for name, parameter in model.named_parameters()}
    checkpoint = open_latest(run)
    assert checkpoint is not None
    flat = optimizer_skeleton(optimizer, names, checkpoint.entries)
    load(checkpoint, {f"model/{name}": value for name, value in model.state_dict().items()} | flat)
    restore_optimizer(optimizer, names, flat)
    train(model, optimizer, steps=2)
    return {name: value.full_tensor() for name, value in model.state_dict().items()}


def test_state_shaped_otherwise_than_its_sharded_parameter_comes_back_whole_on_each_rank(tmp_path: Path):
    for rows in on_ranks(2, tmp_path, row_means_through_a_checkpoint, tmp_path):
        assert torch.equal(rows, WEIGHT.mean(1, keepdim=True))


def row_means_through_a_checkpoint(rank: int, run: Path) -> Tensor:
    mesh = init_device_mesh("cpu", (2,))
    weight = nn.Parameter(distribute_tensor(WEIGHT.clone(), mesh, [Shard(0)]))
    optimizer = torch.optim.SGD([weight], lr=0.1)
    optimizer.state[weight]["rows"] = distribute_tensor(WEIGHT.mean(1, keepdim=True), mesh, [Shard(0)])
    save(run, 1, flatten_optimizer(optimizer, {weight: "w"}), {})
    optimizer.state.clear()
    checkpoint = open_checkpoint(run / "checkpoints/step-00000001")
    flat = optimizer_skeleton(optimizer, {weight: "w"}, checkpoint.entries)
    load(checkpoint, flat)
    restore_optimizer(optimizer, {weight: "w"}, flat)
    rows = optimizer.state[weight]["rows"]
    assert isinstance(rows, DTensor)
    return rows.full_tensor()
