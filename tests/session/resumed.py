"""A small job for whole runs: trains to the step that it is told, and writes its parameters at the end."""

import argparse
import os
import signal

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import shardwise

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, required=True)
parser.add_argument("--pipeline", type=int, default=1)
parser.add_argument("--kill", default="", help="RANK:STEP, by SIGKILL")
options = parser.parse_args()


def build() -> nn.Module:
    blocks = [nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Dropout(0.1)) for _ in range(4)]
    return nn.Sequential(*blocks, nn.Linear(8, 1)).double()


def loss(model: nn.Module, batch: list[torch.Tensor]) -> torch.Tensor:
    inputs, targets = batch
    return (model(inputs).squeeze(1) - targets).pow(2).mean()


job = shardwise.Job(
    model=build,
    loss=loss,
    optimizer=lambda named: torch.optim.AdamW(named, lr=1e-2),
    scheduler=lambda optimizer: torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 20),
    batch_size=8,
    seed=1,
)
data = TensorDataset(
    torch.randn(26, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(0)), torch.ones(26).double()
)
loader = DataLoader(data, batch_size=8, shuffle=True, drop_last=True)
plan = shardwise.make_plan(job, "2x cpu", next(iter(loader)), pipeline=options.pipeline, micro_batches=2)
rank, step = map(int, options.kill.split(":")) if options.kill else (-1, -1)

with shardwise.parallelize(job, plan, data=loader) as session:
    for done in session.steps(options.steps):
        print(f"rank {session.rank} step {done.step} loss {done.loss!r}", flush=True)
        if (session.rank, done.step) == (rank, step):
            os.kill(os.getpid(), signal.SIGKILL)
