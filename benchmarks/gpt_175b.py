"""A GPT of 175 billion parameters with a tied head, in plain PyTorch: to be planned, not held.

Width, depth and heads: Brown et al., Language Models are Few-Shot Learners, arXiv:2005.14165, table 2.1.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional

import shardwise

LAYERS, WIDTH, HEADS, VOCABULARY, TOKENS = 96, 12288, 96, 50257, 2048


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.ln_1, self.ln_2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.proj = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.ln_1(x))
        return x + self.down(functional.gelu(self.up(self.ln_2(x))))

    def attention(self, x: Tensor) -> Tensor:
        batch, tokens, _ = x.shape
        q, k, v = (part.view(batch, tokens, HEADS, -1).transpose(1, 2) for part in self.qkv(x).chunk(3, dim=-1))
        y = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.proj(y.transpose(1, 2).reshape(batch, tokens, -1))


class GPT(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.wte, self.wpe = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(TOKENS, WIDTH)
        self.h = nn.ModuleList(Block() for _ in range(LAYERS))
        self.ln_f = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.head.weight = self.wte.weight

    def forward(self, ids: Tensor) -> Tensor:
        x = self.wte(ids) + self.wpe(torch.arange(ids.shape[1], device=ids.device))
        for block in self.h:
            x = block(x)
        return self.head(self.ln_f(x))


def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return functional.cross_entropy(model(batch["ids"]).flatten(0, 1), batch["labels"].flatten())


def make_job() -> shardwise.Job:
    return shardwise.Job(
        model=GPT,
        loss=loss,
        optimizer=lambda named: torch.optim.AdamW(named, lr=6e-5),
        batch_size=1536,
        precision="bf16",
        clip_grad_norm=1.0,
    )


def example() -> dict[str, Tensor]:
    ids = torch.zeros(2, TOKENS, dtype=torch.int64)
    return {"ids": ids, "labels": ids}
