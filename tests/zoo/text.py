"""Language models: GPT with a tied head, BERT, T5, Llama, and a mixture of experts."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, gelu, scaled_dot_product_attention, silu
from transformers import T5Config, T5ForConditionalGeneration
from transformers.models.t5.modeling_t5 import T5LayerNorm

from shardwise.job import Mean
from zoo.case import Case, by_name, draw, integers
from zoo.transformer import Attention, Block

# B batch, T tokens, D features, V vocabulary, H heads, E experts

VOCABULARY = 20
FEATURES = 16
TOKENS = 8
PADDING = 0


class Gpt(nn.Module):
    """Token ids [B, T] to logits [B, T, V]; the head's weight is the embedding's."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, FEATURES)
        self.position = nn.Embedding(TOKENS, FEATURES)
        self.blocks = nn.ModuleList(Block(FEATURES) for _ in range(4))
        self.norm = nn.LayerNorm(FEATURES)
        self.head = nn.Linear(FEATURES, VOCABULARY, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, ids: Tensor) -> Tensor:
        places = torch.arange(ids.shape[1], device=ids.device)
        past = places[:, None] >= places
        x = self.embedding(ids) + self.position(places)
        for block in self.blocks:
            x = block(x, past)
        return self.head(self.norm(x))


def text_sample(seed: int, index: int) -> Tensor:
    return integers(draw(seed, index), VOCABULARY, TOKENS + 1)


def next_token_loss(model: nn.Module, ids: Tensor) -> Tensor:
    logits = model(ids[:, :-1])
    return cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())


class Bert(nn.Module):
    """Padded token ids [B, T] to logits [B, T, V]; padding is not seen by any token."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, FEATURES, padding_idx=PADDING)
        self.position = nn.Parameter(torch.randn(TOKENS, FEATURES))
        self.blocks = nn.ModuleList(Block(FEATURES) for _ in range(4))
        self.head = nn.Sequential(nn.Linear(FEATURES, FEATURES), nn.GELU(), nn.Linear(FEATURES, VOCABULARY))

    def forward(self, ids: Tensor) -> Tensor:
        seen = (ids != PADDING)[:, None, None, :]
        x = self.embedding(ids) + self.position
        for block in self.blocks:
            x = block(x, seen)
        return self.head(x)


def masked_sample(seed: int, index: int) -> dict[str, Tensor]:
    """Ids of 4 to 8 tokens and padding; the first and about a third of the others are masked and to be guessed."""
    generator = draw(seed, index)
    length = 4 + int(integers(generator, 5))
    places = torch.arange(TOKENS)
    ids = torch.where(places < length, 2 + integers(generator, VOCABULARY - 2, TOKENS), PADDING)
    guessed = (places < length) & ((places == 0) | (integers(generator, 3, TOKENS) == 0))
    return {"ids": torch.where(guessed, 1, ids), "labels": torch.where(guessed, ids, -100)}


def masked_loss(model: nn.Module, batch: dict[str, Tensor]) -> Mean:
    labels = batch["labels"].flatten()
    total = cross_entropy(model(batch["ids"]).flatten(0, 1), labels, ignore_index=-100, reduction="sum")
    return Mean(total, (labels != -100).sum())


def t5() -> nn.Module:
    """Encoder and decoder of two layers each, with a tied embedding at three places.

    T5's own norm computes in float32; torch's RMSNorm is the same formula in float64.
    """
    config = T5Config(
        vocab_size=VOCABULARY, d_model=FEATURES, d_kv=8, d_ff=32, num_layers=2, num_heads=2, dropout_rate=0.0,
        decoder_start_token_id=0, use_cache=False, attn_implementation="sdpa",
    )  # fmt: skip
    model = T5ForConditionalGeneration(config).train()
    for path, module in list(model.named_modules()):
        if isinstance(module, T5LayerNorm):
            model.set_submodule(path, nn.RMSNorm(FEATURES, eps=module.variance_epsilon))
    return model.double()


def translation_sample(seed: int, index: int) -> dict[str, Tensor]:
    generator = draw(seed, index)
    return {"input_ids": integers(generator, VOCABULARY, TOKENS), "labels": integers(generator, VOCABULARY, TOKENS - 2)}


def translation_loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return model(**batch).loss


class RotaryAttention(nn.Module):
    """Causal attention with rotary positions, where each key head serves two query heads."""

    def __init__(self, heads: int = 4, key_heads: int = 2) -> None:
        super().__init__()
        self.width = FEATURES // heads
        self.query = nn.Linear(FEATURES, heads * self.width, bias=False)
        self.key = nn.Linear(FEATURES, key_heads * self.width, bias=False)
        self.value = nn.Linear(FEATURES, key_heads * self.width, bias=False)
        self.out = nn.Linear(heads * self.width, FEATURES, bias=False)

    def forward(self, x: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
        query, key, value = (
            layer(x).unflatten(-1, (-1, self.width)).transpose(1, 2) for layer in (self.query, self.key, self.value)
        )
        query, key = rotate(query, cosine, sine), rotate(key, cosine, sine)
        mixed = scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
        return self.out(mixed.transpose(1, 2).flatten(2))


def rotate(x: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
    """Turn each pair (x[i], x[i + half]) of [B, H, T, width] by the angle of its position: Su et al., 2104.09864."""
    left, right = x.chunk(2, dim=-1)
    return torch.cat([left * cosine - right * sine, right * cosine + left * sine], dim=-1)


class LlamaBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm_1 = nn.RMSNorm(FEATURES)
        self.attention = RotaryAttention()
        self.norm_2 = nn.RMSNorm(FEATURES)
        self.gate = nn.Linear(FEATURES, 2 * FEATURES, bias=False)
        self.up = nn.Linear(FEATURES, 2 * FEATURES, bias=False)
        self.down = nn.Linear(2 * FEATURES, FEATURES, bias=False)

    def forward(self, x: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
        x = x + self.attention(self.norm_1(x), cosine, sine)
        inner = self.norm_2(x)
        return x + self.down(silu(self.gate(inner)) * self.up(inner))


class Llama(nn.Module):
    """Token ids [B, T] to logits [B, T, V]; the rotary table is made of a buffer that is in no state dict."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, FEATURES)
        self.blocks = nn.ModuleList(LlamaBlock() for _ in range(4))
        self.norm = nn.RMSNorm(FEATURES)
        self.head = nn.Linear(FEATURES, VOCABULARY, bias=False)
        self.register_buffer("frequencies", 100.0 ** -torch.linspace(0, 1, 2), persistent=False)

    def forward(self, ids: Tensor) -> Tensor:
        angles = torch.arange(ids.shape[1], device=ids.device)[:, None] * self.frequencies
        x = self.embedding(ids)
        for block in self.blocks:
            x = block(x, angles.cos(), angles.sin())
        return self.head(self.norm(x))


class Experts(nn.Module):
    """Four experts, each run on all tokens and weighed by the router: zero for all but the best two of a token."""

    def __init__(self, experts: int = 4) -> None:
        super().__init__()
        self.router = nn.Linear(FEATURES, experts, bias=False)
        self.up = nn.Parameter(torch.randn(experts, FEATURES, 2 * FEATURES) / FEATURES**0.5)
        self.down = nn.Parameter(torch.randn(experts, 2 * FEATURES, FEATURES) / FEATURES**0.5)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """What the experts made of [B, T, D], and how unevenly they were used (1 is even)."""
        chances = self.router(x).softmax(-1)
        best, chosen = chances.topk(2, dim=-1)
        gates = torch.zeros_like(chances).scatter(-1, chosen, best / best.sum(-1, keepdim=True))
        inner = gelu(torch.einsum("btd,edh->bteh", x, self.up))
        mixed = torch.einsum("bteh,ehd,bte->btd", inner, self.down, gates)
        used = (gates > 0).to(x.dtype).mean((0, 1)) / 2
        return mixed, len(self.up) * (used * chances.mean((0, 1))).sum()


class MoeBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm_1 = nn.LayerNorm(FEATURES)
        self.attention = Attention(FEATURES, heads=2)
        self.norm_2 = nn.LayerNorm(FEATURES)
        self.experts = Experts()

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x = x + self.attention(self.norm_1(x))
        mixed, unevenness = self.experts(self.norm_2(x))
        return x + mixed, unevenness


class Moe(nn.Module):
    """Token ids [B, T] to logits [B, T, V] and the load-balance loss of all blocks (Fedus et al., 2101.03961)."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, FEATURES)
        self.blocks = nn.ModuleList(MoeBlock() for _ in range(4))
        self.head = nn.Linear(FEATURES, VOCABULARY)

    def forward(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        x = self.embedding(ids)
        balance = x.new_zeros(())
        for block in self.blocks:
            x, unevenness = block(x)
            balance = balance + unevenness
        return self.head(x), balance


def balanced_loss(model: nn.Module, ids: Tensor) -> tuple[Tensor, dict[str, Any]]:
    logits, balance = model(ids[:, :-1])
    guess = cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())
    return guess + 0.1 * balance, {"balance": balance.detach()}


CASES = by_name(
    Case(name="gpt_tied", model=lambda: Gpt().double(), loss=next_token_loss, sample=text_sample),
    Case(name="bert", model=lambda: Bert().double(), loss=masked_loss, sample=masked_sample,
         notes="samples have different numbers of terms; padding is never seen"),
    Case(name="t5", model=t5, loss=translation_loss, sample=translation_sample,
         notes="one embedding read at three places; the encoder's output feeds each decoder block"),
    Case(name="llama", model=lambda: Llama().double(), loss=next_token_loss, sample=text_sample),
    Case(name="moe", model=lambda: Moe().double(), loss=balanced_loss, sample=text_sample, couple=True,
         notes="the load-balance loss is a product of means over the batch"),
)  # fmt: skip
