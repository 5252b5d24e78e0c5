"""Models with several ways in: CLIP with its two towers, DLRM with its tables."""

import math

import torch
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits, cross_entropy, normalize

from zoo.case import Case, by_name, draw, integers, normal
from zoo.transformer import Block

FEATURES = 16
TOKENS = 6


class Clip(nn.Module):
    """Image patches [B, T, D] and token ids [B, T] to the table [B, B] of how well each fits each."""

    def __init__(self) -> None:
        super().__init__()
        self.image_tower = nn.Sequential(*(Block(FEATURES) for _ in range(3)), nn.LayerNorm(FEATURES))
        self.embedding = nn.Embedding(20, FEATURES)
        self.text_tower = nn.Sequential(*(Block(FEATURES) for _ in range(3)), nn.LayerNorm(FEATURES))
        self.log_scale = nn.Parameter(torch.tensor(math.log(5.0)))

    def forward(self, patches: Tensor, ids: Tensor) -> Tensor:
        image = normalize(self.image_tower(patches)[:, 0], dim=-1)
        text = normalize(self.text_tower(self.embedding(ids))[:, 0], dim=-1)
        return self.log_scale.exp() * image @ text.T


def captioned_sample(seed: int, index: int) -> tuple[Tensor, Tensor]:
    generator = draw(seed, index)
    return normal(generator, TOKENS, FEATURES), integers(generator, 20, TOKENS)


def contrastive_loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    """Each image is to find its text among the batch, and each text its image (Radford et al., 2103.00020)."""
    fits = model(*batch)
    right = torch.arange(len(fits), device=fits.device)
    return (cross_entropy(fits, right) + cross_entropy(fits.T, right)) / 2


class ClickModel(nn.Module):
    """Dense features and bags of ids to the logit of a click, by way of all products of pairs (Naumov, 1906.00091)."""

    def __init__(self, width: int = 8, tables: int = 3) -> None:
        super().__init__()
        self.tables = nn.ModuleList(nn.EmbeddingBag(10, width, mode="sum") for _ in range(tables))
        self.bottom = nn.Sequential(
            nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, width), nn.ReLU()
        )
        pairs = (tables + 1) * tables // 2
        self.top = nn.Sequential(
            nn.Linear(width + pairs, 16), nn.ReLU(), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 1)
        )

    def forward(self, dense: Tensor, bags: Tensor) -> Tensor:
        bottom = self.bottom(dense)
        features = torch.stack([bottom, *(table(bags[:, n]) for n, table in enumerate(self.tables))], dim=1)
        products = features @ features.transpose(1, 2)
        row, column = torch.tril_indices(*products.shape[1:], offset=-1)
        return self.top(torch.cat([bottom, products[:, row, column]], dim=1)).squeeze(1)


def click_sample(seed: int, index: int) -> dict[str, Tensor]:
    """Three bags of four ids each."""
    generator = draw(seed, index)
    return {
        "dense": normal(generator, 8),
        "bags": integers(generator, 10, 3, 4),
        "clicked": integers(generator, 2).double(),
    }


def click_loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return binary_cross_entropy_with_logits(model(batch["dense"], batch["bags"]), batch["clicked"])


CASES = by_name(
    Case(name="clip", model=lambda: Clip().double(), loss=contrastive_loss, sample=captioned_sample, couple=True,
         notes="the other samples of the batch are the wrong answers; one sample alone has loss 0"),
    Case(name="dlrm", model=lambda: ClickModel().double(), loss=click_loss, sample=click_sample),
)  # fmt: skip
