"""Which package of Python's library is this snippet from? A recurrent network learns to tell, in a loop of its own.

The loop decides what no iterator could: after each epoch it looks at snippets that were held out, and it stops once
they get worse.
"""

import argparse
import random
import sysconfig
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.optim import Optimizer
from torch.utils.data import DataLoader

PACKAGES = ("asyncio", "concurrent", "email", "http", "json", "logging", "multiprocessing", "unittest")
LENGTH = 32
SNIPPETS, HELD_OUT = 72, 8  # of each package
BATCH = 32

Example = tuple[Tensor, Tensor]


class Reader(nn.Module):
    """Bytes [B, T] to logits [B, packages]."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.embed = nn.Embedding(256, width)
        self.read = nn.GRU(width, width, batch_first=True)
        self.judge = nn.Linear(width, len(PACKAGES))

    def forward(self, snippets: Tensor) -> Tensor:
        states, _ = self.read(self.embed(snippets))
        return self.judge(states.amax(dim=1))


def snippets() -> tuple[list[Example], list[Example]]:
    """Snippets [T] with the number of their package: to train on, and held out."""
    draw = random.Random(0)
    train, held_out = [], []
    for number, package in enumerate(PACKAGES):
        files = sorted(Path(sysconfig.get_path("stdlib"), package).rglob("*.py"))
        source = b"".join(file.read_bytes() for file in files)
        starts = draw.sample(range(0, len(source) - LENGTH, LENGTH), SNIPPETS)
        own = [(torch.tensor(list(source[at : at + LENGTH])), torch.tensor(number)) for at in starts]
        train += own[HELD_OUT:]
        held_out += own[:HELD_OUT]
    return train, held_out


def make_optimizer(parameters: Iterable[Any]) -> Optimizer:
    return torch.optim.AdamW(parameters, lr=3e-3)


def loss(model: nn.Module, batch: Example) -> Tensor:
    snippet, package = batch
    return functional.cross_entropy(model(snippet), package)


def fit(epochs: int) -> None:
    train, held_out = snippets()
    loader = DataLoader(train, batch_size=BATCH, shuffle=True, generator=torch.Generator().manual_seed(0))
    torch.manual_seed(0)
    model = Reader()
    optimizer = make_optimizer(model.parameters())
    step = 0
    best = float("inf")
    for epoch in range(1, epochs + 1):
        for batch in loader:
            value = loss(model, batch)
            optimizer.zero_grad()
            value.backward()
            optimizer.step()
            step += 1
            print(f"step {step}  loss {value.item():.6f}")
        with torch.no_grad():
            held_out_loss = loss(model, torch.utils.data.default_collate(held_out)).item()
        print(f"epoch {epoch}  held out {held_out_loss:.6f}")
        if held_out_loss > best:
            break
        best = held_out_loss


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=30)
    arguments = parser.parse_args()
    fit(arguments.epochs)


if __name__ == "__main__":
    main()
