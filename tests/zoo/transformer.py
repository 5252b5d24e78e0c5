"""The transformer block that several models of the zoo are built from."""

from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

# B batch, T tokens, D features, H heads


class Attention(nn.Module):
    """Self-attention of [B, T, D]; `mask` is True where a token may be seen, and broadcasts to [B, H, T, T].

    The projection to queries, keys and values has no bias: a key's bias has a zero gradient whatever the data.
    """

    def __init__(self, features: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(features, 3 * features, bias=False)
        self.out = nn.Linear(features, features)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        query, key, value = (self.split_heads(part) for part in self.qkv(x).chunk(3, dim=-1))
        mixed = scaled_dot_product_attention(query, key, value, attn_mask=mask)
        return self.out(mixed.transpose(1, 2).flatten(2))

    def split_heads(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (self.heads, -1)).transpose(1, 2)


class Mlp(nn.Sequential):
    def __init__(self, features: int) -> None:
        super().__init__(nn.Linear(features, 4 * features), nn.GELU(), nn.Linear(4 * features, features))


class Block(nn.Module):
    """Pre-norm attention and MLP, each added to what came in."""

    def __init__(self, features: int, heads: int = 2) -> None:
        super().__init__()
        self.norm_1 = nn.LayerNorm(features)
        self.attention = Attention(features, heads)
        self.norm_2 = nn.LayerNorm(features)
        self.mlp = Mlp(features)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        x = x + self.attention(self.norm_1(x), mask)
        return x + self.mlp(self.norm_2(x))
