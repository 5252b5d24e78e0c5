"""Models that use a module more than once, or train only part of themselves."""

from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from zoo.case import Case, by_name, draw, integers, normal
from zoo.transformer import Attention, Block, Mlp

FEATURES = 16
TOKENS = 6
CLASSES = 5


class OneNorm(nn.Module):
    """Four blocks of attention and MLP around one LayerNorm, the same module each time."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(FEATURES)
        self.attentions = nn.ModuleList(Attention(FEATURES, heads=2) for _ in range(4))
        self.mlps = nn.ModuleList(Mlp(FEATURES) for _ in range(4))
        self.head = nn.Linear(FEATURES, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        for attention, mlp in zip(self.attentions, self.mlps, strict=True):
            x = x + attention(self.norm(x))
            x = x + mlp(self.norm(x))
        return self.head(self.norm(x).mean(1))


class OneBlockTwice(nn.Module):
    """Five applications of four blocks: the second block is also the last."""

    def __init__(self) -> None:
        super().__init__()
        self.first = Block(FEATURES)
        self.shared = Block(FEATURES)
        self.third = Block(FEATURES)
        self.fourth = Block(FEATURES)
        self.head = nn.Linear(FEATURES, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        for block in (self.first, self.shared, self.third, self.fourth, self.shared):
            x = block(x)
        return self.head(x.mean(1))


class Adapted(nn.Module):
    """A frozen linear layer and a trainable product of two thin matrices (Hu et al., 2106.09685).

    The second matrix does not start at zero, as it does in the paper: the first would have no gradient in one step.
    """

    def __init__(self, frozen: nn.Linear, rank: int = 2) -> None:
        super().__init__()
        self.frozen = frozen.requires_grad_(False)
        self.narrow = nn.Linear(frozen.in_features, rank, bias=False)
        self.widen = nn.Linear(rank, frozen.out_features, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.frozen(x) + self.widen(self.narrow(x))


class AdaptedBase(nn.Module):
    """Five frozen blocks; the queries, keys and values of all but the first have an adapter, and the head trains."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(FEATURES).requires_grad_(False) for _ in range(5))
        for block in self.blocks[1:]:
            block.attention.qkv = Adapted(block.attention.qkv)
        self.head = nn.Linear(FEATURES, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x.mean(1))


def sequence_sample(seed: int, index: int) -> tuple[Tensor, Tensor]:
    generator = draw(seed, index)
    return normal(generator, TOKENS, FEATURES), integers(generator, CLASSES)


def class_loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    sequences, labels = batch
    return cross_entropy(model(sequences), labels)


CASES = by_name(
    Case(name="shared_layer_norm", model=lambda: OneNorm().double(), loss=class_loss, sample=sequence_sample),
    Case(name="shared_block", model=lambda: OneBlockTwice().double(), loss=class_loss, sample=sequence_sample),
    Case(name="adapters", model=lambda: AdaptedBase().double(), loss=class_loss, sample=sequence_sample,
         notes="nothing before the second block needs a gradient"),
)  # fmt: skip
