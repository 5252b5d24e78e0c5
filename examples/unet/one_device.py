"""Segment pages of Python source with a small U-Net: which pixels are comments, strings, keywords, names?

A page is what an editor shows as its minimap: one pixel for each character, as bright as its code. The masks come from
Python's own tokenizer, the pages from its standard library.
"""

import argparse
import io
import keyword
import sysconfig
import tokenize
from collections.abc import Iterable, Iterator
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.optim import Optimizer
from torch.utils.data import DataLoader

HEIGHT, WIDTH = 32, 64
CLASSES = ("blank", "name", "keyword", "string", "comment", "other")
PAGES, HELD_OUT = 1_500, 64
BATCH = 16

Example = tuple[Tensor, Tensor]


class Convolutions(nn.Sequential):
    def __init__(self, channels_in: int, channels: int) -> None:
        layers = []
        for first in (channels_in, channels):
            layers += [nn.Conv2d(first, channels, 3, padding=1), nn.GroupNorm(4, channels), nn.ReLU()]
        super().__init__(*layers)


class UNet(nn.Module):
    """Pages [B, 1, H, W] to logits [B, classes, H, W]."""

    def __init__(self, channels: tuple[int, ...] = (16, 32, 64)) -> None:
        super().__init__()
        pairs = list(pairwise(channels))
        self.first = Convolutions(1, channels[0])
        self.down = nn.ModuleList(Convolutions(few, many) for few, many in pairs)
        self.up = nn.ModuleList(nn.ConvTranspose2d(many, few, 2, stride=2) for few, many in reversed(pairs))
        self.merge = nn.ModuleList(Convolutions(2 * few, few) for few, _ in reversed(pairs))
        self.last = nn.Conv2d(channels[0], len(CLASSES), 1)

    def forward(self, page: Tensor) -> Tensor:
        skips = [self.first(page)]
        for down in self.down:
            skips.append(down(functional.max_pool2d(skips[-1], 2)))
        x = skips.pop()
        for up, merge in zip(self.up, self.merge, strict=True):
            x = merge(torch.cat([up(x), skips.pop()], dim=1))
        return self.last(x)


@cache
def pages() -> list[Example]:
    """Pages [1, H, W] of numbers from 0 to 1, each with its mask [H, W] of classes."""
    found: list[Example] = []
    for file in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")):
        text = file.read_text(encoding="utf-8", errors="replace").expandtabs()
        found += _pages_of(text)
        if len(found) >= PAGES:
            break
    return found[:PAGES]


def _pages_of(text: str) -> Iterator[Example]:
    lines = text.splitlines()
    page, mask = torch.zeros(len(lines) + 1, WIDTH), torch.zeros(len(lines) + 1, WIDTH, dtype=torch.long)
    for row, line in enumerate(lines):
        codes = [0 if character == " " else min(ord(character), 127) for character in line[:WIDTH]]
        page[row, : len(codes)] = torch.tensor(codes, dtype=torch.float32) / 127
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        (first, start), (last, end) = token.start, token.end
        for row in range(first, last + 1):
            mask[row - 1, start if row == first else 0 : end if row == last else WIDTH] = _class_of(token)
    mask[page == 0] = 0
    for top in range(0, len(lines) - HEIGHT, HEIGHT):
        yield page[None, top : top + HEIGHT], mask[top : top + HEIGHT]


def _class_of(token: tokenize.TokenInfo) -> int:
    if token.type == tokenize.NAME:
        return CLASSES.index("keyword" if keyword.iskeyword(token.string) else "name")
    named = {tokenize.STRING: "string", tokenize.COMMENT: "comment"}
    return CLASSES.index(named.get(token.type, "other"))


def make_loader() -> DataLoader[Example]:
    return DataLoader(pages()[HELD_OUT:], batch_size=BATCH, shuffle=True, generator=torch.Generator().manual_seed(0))


def make_optimizer(parameters: Iterable[Any]) -> Optimizer:
    return torch.optim.Adam(parameters, lr=2e-3)


def loss(model: nn.Module, batch: Example) -> tuple[Tensor, dict[str, Tensor]]:
    """Over all pixels; beside it, how many of those that are not blank get the right class."""
    page, mask = batch
    logits = model(page)
    inked = mask > 0
    right = ((logits.argmax(dim=1) == mask) & inked).sum(dim=(1, 2)) / inked.sum(dim=(1, 2)).clamp(min=1)
    return functional.cross_entropy(logits, mask), {"accuracy": right.mean()}


def train(steps: int) -> UNet:
    torch.manual_seed(0)
    model = UNet()
    optimizer = make_optimizer(model.parameters())
    for step, batch in zip(range(1, steps + 1), make_loader(), strict=False):
        value, metrics = loss(model, batch)
        optimizer.zero_grad()
        value.backward()
        optimizer.step()
        print(f"step {step}  loss {value.item():.6f}  accuracy {metrics['accuracy'].item():.3f}")
    return model.eval()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=100)
    arguments = parser.parse_args()
    model = train(arguments.steps)
    with torch.no_grad():
        value, metrics = loss(model, torch.utils.data.default_collate(pages()[:HELD_OUT]))
    print(f"held out: loss {value.item():.6f}  accuracy {metrics['accuracy'].item():.3f}")


if __name__ == "__main__":
    main()
