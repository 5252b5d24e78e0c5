"""Train a small GPT, byte by byte, on the source of Python's standard library, and let it write some of its own."""

import argparse
import sysconfig
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.optim import Optimizer
from torch.utils.data import DataLoader

BYTES = 256
CONTEXT = 64
BATCH = 32


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.before_attention, self.before_mlp = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.attended = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attend(self.before_attention(x))
        return x + self.mlp(self.before_mlp(x))

    def attend(self, x: Tensor) -> Tensor:
        q, k, v = (part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in self.qkv(x).chunk(3, dim=-1))
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.attended(mixed.transpose(1, 2).flatten(2))


class GPT(nn.Module):
    """Tokens [B, T] to logits [B, T, vocabulary]; one matrix embeds the tokens and reads them out again."""

    def __init__(self, width: int = 96, layers: int = 4, heads: int = 4, context: int = CONTEXT) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(BYTES, width), nn.Embedding(context, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, BYTES, bias=False)
        nn.init.normal_(self.tokens.weight, std=0.02)
        nn.init.normal_(self.places.weight, std=0.02)
        self.head.weight = self.tokens.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens) + self.places(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def windows() -> Tensor:
    """The library's modules one behind the other, cut into windows of a context and the byte that follows it."""
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    source = torch.frombuffer(bytearray(b"".join(file.read_bytes() for file in files)), dtype=torch.uint8)
    return source.unfold(0, CONTEXT + 1, CONTEXT)


def make_loader() -> DataLoader[Tensor]:
    return DataLoader(windows(), batch_size=BATCH, shuffle=True, generator=torch.Generator().manual_seed(0))


def make_optimizer(parameters: Iterable[Any]) -> Optimizer:
    return torch.optim.AdamW(parameters, lr=2e-3)


def loss(model: nn.Module, batch: Tensor) -> Tensor:
    tokens = batch.long()
    return functional.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())


def last_logits(model: nn.Module, tokens: Tensor) -> Tensor:
    return model(tokens)[:, -1]


def write(ask: Callable[[Tensor], Tensor], start: str = "def ", length: int = 400) -> str:
    """Draw one byte after the other. `ask` gives the logits [1, 256] of the next one for a window of bytes."""
    text, generator = bytearray(start.encode()), torch.Generator().manual_seed(0)
    for _ in range(length):
        window = torch.tensor(list(text[-CONTEXT:].rjust(CONTEXT, b"\n")))
        probabilities = (ask(window) / 0.7).softmax(dim=-1)
        text.append(int(torch.multinomial(probabilities, 1, generator=generator)))
    return text.decode(errors="replace")


def train(steps: int) -> GPT:
    torch.manual_seed(0)
    model = GPT()
    optimizer = make_optimizer(model.parameters())
    for step, batch in zip(range(1, steps + 1), make_loader(), strict=False):
        value = loss(model, batch)
        optimizer.zero_grad()
        value.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        print(f"step {step}  loss {value.item():.6f}")
    return model.eval()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=400)
    arguments = parser.parse_args()
    model = train(arguments.steps)
    with torch.no_grad():
        print(write(lambda window: last_logits(model, window[None])))


if __name__ == "__main__":
    main()
