"""Models that read a sequence step by step: LSTM, GRU, Mamba."""

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, mse_loss, silu, softplus

from zoo.case import Case, by_name, draw, integers, normal

# B batch, T steps, D features, N states

FEATURES = 12
STEPS = 8


class Recurrent(nn.Module):
    """[B, T, D] to one number per sequence, by way of four recurrent layers that pass on the whole sequence."""

    def __init__(self, kind: type[nn.LSTM] | type[nn.GRU]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(kind(FEATURES, FEATURES, batch_first=True) for _ in range(4))
        self.head = nn.Linear(FEATURES, 1)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x, _ = layer(x)
        return self.head(x[:, -1]).squeeze(-1)


def series_sample(seed: int, index: int) -> tuple[Tensor, Tensor]:
    generator = draw(seed, index)
    return normal(generator, STEPS, FEATURES), normal(generator)


def series_loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    series, targets = batch
    return mse_loss(model(series), targets)


class MambaBlock(nn.Module):
    """Selective scan, one step at a time (Gu and Dao, 2312.00752, algorithm 2)."""

    def __init__(self, states: int = 4) -> None:
        super().__init__()
        self.states = states
        self.norm = nn.LayerNorm(FEATURES)
        self.enter = nn.Linear(FEATURES, 2 * FEATURES, bias=False)
        self.conv = nn.Conv1d(FEATURES, FEATURES, kernel_size=3, padding=2, groups=FEATURES)
        self.select = nn.Linear(FEATURES, 2 * states, bias=False)
        self.pace = nn.Linear(FEATURES, FEATURES)
        self.log_decay = nn.Parameter(torch.arange(1.0, states + 1).log().repeat(FEATURES, 1))
        self.through = nn.Parameter(torch.ones(FEATURES))
        self.leave = nn.Linear(FEATURES, FEATURES, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        inner, gate = self.enter(self.norm(x)).chunk(2, dim=-1)
        inner = silu(self.conv(inner.transpose(1, 2))[..., : x.shape[1]].transpose(1, 2))
        return x + self.leave(self.scan(inner) * silu(gate))

    def scan(self, x: Tensor) -> Tensor:
        write, read = self.select(x).chunk(2, dim=-1)
        pace = softplus(self.pace(x))
        keep = torch.exp(pace[..., None] * -self.log_decay.exp())
        put = (pace * x)[..., None] * write[:, :, None, :]
        state, outputs = x.new_zeros(x.shape[0], FEATURES, self.states), []
        for step in range(x.shape[1]):
            state = keep[:, step] * state + put[:, step]
            outputs.append((state * read[:, step, None, :]).sum(-1))
        return torch.stack(outputs, dim=1) + self.through * x


class Mamba(nn.Module):
    """Token ids [B, T] to logits of the next token [B, T, 10]."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(10, FEATURES)
        self.blocks = nn.Sequential(*(MambaBlock() for _ in range(4)))
        self.head = nn.Linear(FEATURES, 10)

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.blocks(self.embedding(ids)))


def token_sample(seed: int, index: int) -> Tensor:
    return integers(draw(seed, index), 10, STEPS + 1)


def next_token_loss(model: nn.Module, ids: Tensor) -> Tensor:
    return cross_entropy(model(ids[:, :-1]).transpose(1, 2), ids[:, 1:])


CASES = by_name(
    Case(name="lstm", model=lambda: Recurrent(nn.LSTM).double(), loss=series_loss, sample=series_sample),
    Case(name="gru", model=lambda: Recurrent(nn.GRU).double(), loss=series_loss, sample=series_sample),
    Case(name="mamba", model=lambda: Mamba().double(), loss=next_token_loss, sample=token_sample),
)
