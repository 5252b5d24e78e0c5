"""Small models to capture, each with something that a graph may get wrong."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, relu_

from shardwise.graph import Chain, Refusal, capture, chain, read, read_graph

# B batch, T tokens, D features

FEATURES = 8


def sum_of_squares(model: Callable[[Tensor], Tensor], x: Tensor) -> list[Any]:
    return [model(x).square().sum()]


def captured(model: nn.Module, batch: Any, function: Callable[[Any, Any], Any] = sum_of_squares) -> Chain:
    found = capture(function, model, batch)
    assert not isinstance(found, Refusal), found
    return chain(read_graph(found, model, read(batch)[1]))


def refusal(model: nn.Module, batch: Any, function: Callable[[Any, Any], Any] = sum_of_squares) -> str:
    found = capture(function, model, batch)
    assert isinstance(found, Refusal)
    return str(found)


def tensors_of(model: nn.Module) -> dict[str, Tensor]:
    return dict(model.named_parameters()) | dict(model.named_buffers())


def numbers(*shape: int) -> Tensor:
    """In float64, the same on every call."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


def linear(bias: bool = True) -> nn.Linear:
    return nn.Linear(FEATURES, FEATURES, bias=bias, dtype=torch.float64)


class GptBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(FEATURES, dtype=torch.float64)
        self.qkv = nn.Linear(FEATURES, 3 * FEATURES, dtype=torch.float64)
        self.out = linear()
        self.drop = nn.Dropout(0.1)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        query, key, value = self.qkv(self.norm(x)).unflatten(-1, (3, 2, -1)).permute(2, 0, 3, 1, 4)
        mixed = nn.functional.scaled_dot_product_attention(query, key, value, attn_mask=mask)
        return x + self.drop(self.out(mixed.transpose(1, 2).flatten(2)))


class Gpt(nn.Module):
    """Ids [B, T] to logits [B, T, 16], with a mask and positions that every block needs, and a tied head."""

    def __init__(self, blocks: int = 3) -> None:
        super().__init__()
        self.embedding = nn.Embedding(16, FEATURES, dtype=torch.float64)
        self.places = nn.Embedding(12, FEATURES, dtype=torch.float64)
        self.h = nn.ModuleList(GptBlock() for _ in range(blocks))
        self.head = nn.Linear(FEATURES, 16, bias=False, dtype=torch.float64)
        self.head.weight = self.embedding.weight

    def forward(self, ids: Tensor) -> Tensor:
        places = torch.arange(ids.shape[1], device=ids.device)
        mask = places[:, None] >= places
        x = self.embedding(ids) + self.places(places)
        for block in self.h:
            x = block(x, mask)
        return self.head(x)


def next_token(model: Gpt, ids: Tensor) -> list[Any]:
    logits = model(ids[:, :-1])
    return [cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten()), logits.detach().abs().mean()]


def ids(samples: int = 3, tokens: int = 7) -> Tensor:
    return torch.randint(16, (samples, tokens), generator=torch.Generator().manual_seed(samples))


class ResBlock(nn.Module):
    """Convolution and BatchNorm twice, with ops in place."""

    def __init__(self, channels: int = 4) -> None:
        super().__init__()
        self.conv_1 = nn.Conv2d(channels, channels, 3, padding=1, dtype=torch.float64)
        self.norm_1 = nn.BatchNorm2d(channels, dtype=torch.float64)
        self.conv_2 = nn.Conv2d(channels, channels, 3, padding=1, dtype=torch.float64)
        self.norm_2 = nn.BatchNorm2d(channels, dtype=torch.float64)

    def forward(self, x: Tensor) -> Tensor:
        y = relu_(self.norm_1(self.conv_1(x)))
        y = self.norm_2(self.conv_2(y))
        y += x
        return relu_(y)


class ResNet(nn.Module):
    """Images [B, 3, H, W] to [B, D]."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 4, 3, padding=1, dtype=torch.float64)
        self.blocks = nn.Sequential(ResBlock(), ResBlock())
        self.head = nn.Linear(4, FEATURES, dtype=torch.float64)

    def forward(self, images: Tensor) -> Tensor:
        return self.head(self.blocks(self.stem(images)).mean((2, 3)))


class Averaging(nn.Module):
    """Keeps a running mean of what its first layer gives, as codebooks do, and subtracts it behind the second."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = linear(), linear(), linear()
        self.register_buffer("mean", torch.zeros(FEATURES, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        with torch.no_grad():
            self.mean.mul_(0.9).add_(x.mean(0), alpha=0.1)
        return self.third(self.second(x) - self.mean)


class Noisy(nn.Module):
    """Draws twice without a gradient, then drops."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = linear(), linear()

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        with torch.no_grad():
            noise = torch.randn_like(x) + torch.rand_like(x)
        return nn.functional.dropout(self.second(x + noise), 0.5)


class Doubled(torch.autograd.Function):
    """Its backward pass is not that of its forward pass, as in gradient reversal."""

    @staticmethod
    def forward(context: Any, x: Tensor) -> Tensor:
        return 2 * x

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> Tensor:
        return -3 * gradient


class Reversed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = linear(), linear()

    def forward(self, x: Tensor) -> Tensor:
        return self.second(Doubled.apply(self.first(x)))


class FrozenTarget(nn.Module):
    """A custom function below `no_grad`."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = linear(), linear()

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            target = Doubled.apply(self.first(x))
        return self.second(self.first(x)) - target


class Hooked(nn.Module):
    """A hook halves the gradient between its layers."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = linear(), linear()

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        x.register_hook(lambda gradient: gradient / 2)
        return self.second(x)
