"""Losses that are easy to weigh wrongly: an auxiliary head, padding, and samples packed end to end."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, mse_loss

from shardwise.job import Mean
from zoo.case import Case, by_name, draw, integers, normal
from zoo.transformer import Block

# B batch, T tokens, D features, V vocabulary, N tokens of all samples of a batch

FEATURES = 16
VOCABULARY = 20
TOKENS = 8
IGNORED = -100


class TwoHeads(nn.Module):
    """[B, T, D] to one number per sequence at the end, and to class logits [B, 4] half-way."""

    def __init__(self) -> None:
        super().__init__()
        self.lower = nn.Sequential(*(Block(FEATURES) for _ in range(2)))
        self.auxiliary = nn.Linear(FEATURES, 4)
        self.upper = nn.Sequential(*(Block(FEATURES) for _ in range(2)))
        self.head = nn.Linear(FEATURES, 1)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        half_way = self.lower(x)
        return {
            "auxiliary": self.auxiliary(half_way.mean(1)),
            "main": self.head(self.upper(half_way).mean(1)).squeeze(-1),
        }


def two_target_sample(seed: int, index: int) -> dict[str, Tensor]:
    generator = draw(seed, index)
    return {
        "x": normal(generator, TOKENS, FEATURES),
        "number": normal(generator),
        "kind": integers(generator, 4),
    }


def two_losses(model: nn.Module, batch: dict[str, Tensor]) -> tuple[Tensor, dict[str, Any]]:
    out = model(batch["x"])
    main, auxiliary = mse_loss(out["main"], batch["number"]), cross_entropy(out["auxiliary"], batch["kind"])
    return main + 0.3 * auxiliary, {"main": main.detach(), "auxiliary": auxiliary.detach()}


class Tagger(nn.Module):
    """Token ids [B, T] to logits [B, T, V]."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, FEATURES)
        self.blocks = nn.Sequential(*(Block(FEATURES) for _ in range(4)))
        self.head = nn.Linear(FEATURES, VOCABULARY)

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.blocks(self.embedding(ids)))


def padded_sample(seed: int, index: int) -> dict[str, Tensor]:
    """1 to 8 labels and then none, so that samples weigh very differently."""
    generator = draw(seed, index)
    length = 1 + int(integers(generator, TOKENS))
    labels = torch.where(torch.arange(TOKENS) < length, integers(generator, VOCABULARY, TOKENS), IGNORED)
    return {"ids": integers(generator, VOCABULARY, TOKENS), "labels": labels}


def padded_loss(model: nn.Module, batch: dict[str, Tensor]) -> Mean:
    labels = batch["labels"].flatten()
    total = cross_entropy(model(batch["ids"]).flatten(0, 1), labels, ignore_index=IGNORED, reduction="sum")
    return Mean(total, (labels != IGNORED).sum())


def padded_loss_scalar(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return cross_entropy(model(batch["ids"]).transpose(1, 2), batch["labels"], ignore_index=IGNORED)


class PackedNet(nn.Module):
    """Values [N, D] and offsets [B] to one number per sample; a token sees only the tokens of its own sample.

    Ids [N] are summed per sample by an EmbeddingBag that reads the same offsets.
    """

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(FEATURES) for _ in range(4))
        self.bag = nn.EmbeddingBag(VOCABULARY, FEATURES, mode="sum")
        self.head = nn.Linear(FEATURES, 1)

    def forward(self, values: Tensor, ids: Tensor, offsets: Tensor) -> Tensor:
        owner = torch.searchsorted(offsets, torch.arange(len(values), device=offsets.device), right=True) - 1
        own = owner[:, None] == owner
        x = values[None]
        for block in self.blocks:
            x = block(x, own)
        sums = torch.zeros(len(offsets), FEATURES, dtype=x.dtype).index_add(0, owner, x[0])
        return self.head(sums + self.bag(ids, offsets)).squeeze(-1)


def packed_sample(seed: int, index: int) -> dict[str, Tensor]:
    """2 to 6 tokens and one target."""
    generator = draw(seed, index)
    length = 2 + int(integers(generator, 5))
    return {
        "values": normal(generator, length, FEATURES),
        "ids": integers(generator, VOCABULARY, length),
        "target": normal(generator),
    }


def pack(samples: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    """The samples end to end, with the place where each starts."""
    lengths = torch.tensor([len(sample["ids"]) for sample in samples])
    return {
        "values": torch.cat([sample["values"] for sample in samples]),
        "ids": torch.cat([sample["ids"] for sample in samples]),
        "offsets": lengths.cumsum(0) - lengths,
        "targets": torch.stack([sample["target"] for sample in samples]),
    }


def packed_loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return mse_loss(model(batch["values"], batch["ids"], batch["offsets"]), batch["targets"])


CASES = by_name(
    Case(name="two_losses", model=lambda: TwoHeads().double(), loss=two_losses, sample=two_target_sample),
    Case(name="padded_loss", model=lambda: Tagger().double(), loss=padded_loss, sample=padded_sample),
    Case(name="padded_loss_scalar", model=lambda: Tagger().double(), loss=padded_loss_scalar, sample=padded_sample,
         couple=True, notes="divides by the count of labels; the right whole-batch loss is that of padded_loss"),
    Case(name="packed_offsets", model=lambda: PackedNet().double(), loss=packed_loss, sample=packed_sample,
         collate=pack, notes="no tensor has a sample dimension but offsets and targets"),
)  # fmt: skip
