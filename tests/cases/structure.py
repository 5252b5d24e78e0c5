"""Reports about what a model is made of: ties, skips, frozen parts, values that are no single tensor."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, l1_loss, max_pool2d, mse_loss, relu

from zoo.case import Case, by_name, draw, integers, normal
from zoo.vision import double_size, image_loss, image_pair_sample

FEATURES = 8


class TiedEnds(nn.Module):
    """pytorch/pytorch#51931, pytorch/PiPPy#32: an embedding and a head are one parameter, on the first and last stage.

    Each stage trained its own copy with its own part of the gradient, and no error told.
    With 7 words of 4 features it is pytorch/pytorch#176076 and huggingface/accelerate#4171: a tied parameter that
    neither 2 nor 3 ranks can share evenly.
    """

    def __init__(self, words: int, features: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(words, features)
        self.middle = nn.Linear(features, features)
        self.head = nn.Linear(features, words, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(torch.tanh(self.middle(self.embedding(ids))))


def tie_of_first_and_third() -> nn.Module:
    """Of four stages on two ranks, those of the first rank share a weight."""
    model = nn.Sequential(*(nn.Linear(FEATURES, FEATURES) for _ in range(4)))
    model[2].weight = model[0].weight
    return model


def ids_sample(seed: int, index: int) -> tuple[Tensor, Tensor]:
    """Five ids of 12, and five to be guessed."""
    generator = draw(seed, index)
    return integers(generator, 12, 5), integers(generator, 12, 5)


def all_words_sample(seed: int, index: int) -> tuple[Tensor, Tensor]:
    """All seven ids, so that every row of the table has a gradient."""
    return torch.arange(7), integers(draw(seed, index), 7, 7)


def token_loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    ids, targets = batch
    return cross_entropy(model(ids).flatten(0, 1), targets.flatten())


class Skip(nn.Module):
    """pytorch/pytorch#127964, #110775: a value of the first stage is used by the second and by the third.

    The runtime refused it, or lost one of the two gradients.
    """

    def __init__(self, first: nn.Module) -> None:
        super().__init__()
        self.a = first
        self.b = nn.Linear(FEATURES, FEATURES)
        self.c = nn.Linear(FEATURES, FEATURES)

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        return self.c(relu(self.b(h))) + h


def vector_pair_sample(seed: int, index: int) -> tuple[Tensor, Tensor]:
    generator = draw(seed, index)
    return normal(generator, FEATURES), normal(generator, FEATURES)


def id_and_vector_sample(seed: int, index: int) -> tuple[Tensor, Tensor]:
    generator = draw(seed, index)
    return integers(generator, 10), normal(generator, FEATURES)


def vector_loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    x, targets = batch
    return mse_loss(model(x), targets)


class NestedSkips(nn.Module):
    """hpcaitech/ColossalAI#2490: a U-Net, whose inner skip lies within its outer one, could not be cut at all.

    Images [B, 1, 16, 16] to images.
    """

    def __init__(self) -> None:
        super().__init__()
        self.enc_1 = nn.Conv2d(1, 4, 3, padding=1)
        self.enc_2 = nn.Conv2d(4, 8, 3, padding=1)
        self.mid = nn.Conv2d(8, 8, 3, padding=1)
        self.dec_2 = nn.Conv2d(16, 4, 3, padding=1)
        self.dec_1 = nn.Conv2d(8, 1, 3, padding=1)

    def forward(self, images: Tensor) -> Tensor:
        skip_1 = relu(self.enc_1(images))
        skip_2 = relu(self.enc_2(max_pool2d(skip_1, 2)))
        x = relu(self.mid(max_pool2d(skip_2, 2)))
        x = relu(self.dec_2(torch.cat([double_size(x), skip_2], dim=1)))
        return self.dec_1(torch.cat([double_size(x), skip_1], dim=1))


class SignBranch(nn.Module):
    """pytorch/pytorch#93579, huggingface/accelerate#3151: the branch depends on the value of a tensor.

    A capture either stops there or keeps the branch of its example for ever.
    """

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(FEATURES, FEATURES)
        self.last = nn.Linear(FEATURES, FEATURES)

    def forward(self, x: Tensor) -> Tensor:
        if x.sum() > 0:
            return self.last(self.first(x))
        return -self.last(self.first(x))


def signed_sample(seed: int, index: int) -> tuple[Tensor, Tensor]:
    """Positive under an even seed, negative under an odd one, so that all parts of a batch take one branch."""
    generator = draw(seed, index)
    sign = 1 - 2 * (seed % 2)
    return sign * normal(generator, FEATURES).abs(), normal(generator, FEATURES)


class FrozenStart(nn.Module):
    """tdrussell/qlora-pipe#56: nothing in the first stage trains, and the second holds a frozen base and an adapter.

    The first stage had no gradient to send, and the optimizer held parameters that never change. The third value
    that is passed on, the mask, needs no gradient.
    """

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Linear(FEATURES, FEATURES), nn.Tanh()).requires_grad_(False)
        self.base = nn.Linear(FEATURES, FEATURES).requires_grad_(False)
        self.narrow = nn.Linear(FEATURES, 2, bias=False)
        self.widen = nn.Linear(2, FEATURES, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        h, mask = self.first(x), (x > 0).to(x.dtype)
        return (self.base(h) + self.widen(self.narrow(h))) * mask


class DictBlock(nn.Module):
    """pytorch/pytorch#159711, Modalities/modalities#399: a dict with a tensor and a scalar passes between stages."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(FEATURES, FEATURES)

    def forward(self, state: dict[str, Tensor]) -> dict[str, Tensor]:
        h = torch.tanh(self.layer(state["h"]))
        return {"h": h, "aux": state["aux"] + h.square().mean()}


def dict_loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    x, targets = batch
    state = model({"h": x, "aux": x.new_zeros(())})
    return mse_loss(state["h"], targets) + 0.1 * state["aux"]


def mlp() -> nn.Module:
    """Four linear layers of 8 features, for the reports that are not about the model."""
    layers = [layer for _ in range(3) for layer in (nn.Linear(FEATURES, FEATURES), nn.Tanh())]
    return nn.Sequential(*layers, nn.Linear(FEATURES, FEATURES)).double()


def two_target_loss(model: nn.Module, batch: dict[str, Any]) -> Tensor:
    """pytorch/pytorch#129732, #128115: the loss needs the model's input, and two targets in a dict.

    The loss ran on the last rank alone, which never saw the input.
    """
    x, target = batch["x"], batch["target"]
    out = model(x)
    return mse_loss(out, target["y"]) + l1_loss(out, target["x"])


def two_target_sample(seed: int, index: int) -> dict[str, Any]:
    generator = draw(seed, index)
    x = normal(generator, FEATURES)
    return {"x": x, "target": {"y": normal(generator, FEATURES), "x": x}}


CASES = by_name(
    Case(name="01_tied_embedding", model=lambda: TiedEnds(12, 8).double(), loss=token_loss, sample=ids_sample),
    Case(name="01_tie_on_one_rank", model=lambda: tie_of_first_and_third().double(), loss=vector_loss,
         sample=vector_pair_sample),
    Case(name="02_skip_over_a_stage", model=lambda: Skip(nn.Linear(FEATURES, FEATURES)).double(), loss=vector_loss,
         sample=vector_pair_sample),
    Case(name="02_skip_from_an_embedding", model=lambda: Skip(nn.Embedding(10, FEATURES)).double(), loss=vector_loss,
         sample=id_and_vector_sample),
    Case(name="03_nested_skips", model=lambda: NestedSkips().double(), loss=image_loss, sample=image_pair_sample),
    Case(name="04_branch_on_a_value", model=lambda: SignBranch().double(), loss=vector_loss, sample=signed_sample),
    Case(name="05_frozen_first_stage", model=lambda: FrozenStart().double(), loss=vector_loss,
         sample=vector_pair_sample),
    Case(name="06_dict_between_stages", model=lambda: nn.Sequential(*(DictBlock() for _ in range(4))).double(),
         loss=dict_loss, sample=vector_pair_sample),
    Case(name="09_two_targets_and_the_input", model=mlp, loss=two_target_loss, sample=two_target_sample),
    Case(name="17_tied_and_uneven", model=lambda: TiedEnds(7, 4).double(), loss=token_loss, sample=all_words_sample),
)  # fmt: skip
