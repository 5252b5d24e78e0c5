"""Reports about how a model is trained: uneven batches, clipping, evaluation, branches, checkpointed activations."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, mse_loss, one_hot
from torch.utils.checkpoint import checkpoint
from torch.utils.data import default_collate

from cases.structure import FEATURES, TiedEnds, ids_sample, mlp, vector_loss, vector_pair_sample
from zoo.case import Case, by_name, draw, normal


def odd_micro_batches() -> nn.Module:
    """pytorch/pytorch#126600: 8 samples in 3 micro-batches, which are 3, 3 and 2; the loss met a wrong shape."""
    return mlp()


def smaller_last_batch() -> nn.Module:
    """Coobiw/MPP-LLaVA#25, deepspeedai/DeepSpeed#3045: batches of 8, 8, 6, evaluation with 16 and 1, then 8 again.

    Shapes were fixed by the first batch.
    """
    return mlp()


def large_gradient_loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    """pytorch/torchtitan#596, pytorch/pytorch#162638: each stage clipped by its own norm, 2.10 and 3.40 for 4.00.

    The scores of the words are drawn to five times one, so that a norm of 0.5 clips; the tied parameter counts once.
    """
    ids, targets = batch
    scores = model(ids)
    return mse_loss(scores, 5 * one_hot(targets, scores.shape[-1]).to(scores.dtype))


class CountsHookCalls(nn.Module):
    """pytorch/pytorch#185331: a hook on the input of a stage is to run once per micro-batch.

    The runtime kept that input between steps, so hooks piled up: the count grew with the square of the steps.
    """

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(FEATURES, FEATURES)
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        if x.requires_grad:
            x.register_hook(self.count)
        return self.layer(x)

    def count(self, gradient: Tensor) -> None:
        self.calls += 1


class HookOnBoundary(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Linear(FEATURES, FEATURES), nn.Tanh())
        self.second = CountsHookCalls()

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x))


class Normalised(nn.Sequential):
    """pytorch/pytorch#162822, Modalities/modalities#399: evaluate, train, evaluate, in that order.

    Evaluation leaves no gradients, and BatchNorm reads its buffers then without writing them. [B, 3, D] to the same.
    """

    def __init__(self) -> None:
        super().__init__(
            nn.Linear(FEATURES, FEATURES),
            nn.BatchNorm1d(3),
            nn.Tanh(),
            nn.Linear(FEATURES, FEATURES),
        )


def three_vectors_sample(seed: int, index: int) -> tuple[Tensor, Tensor]:
    generator = draw(seed, index)
    return normal(generator, 3, FEATURES), normal(generator, 3, FEATURES)


class FlaggedBranch(nn.Module):
    """Wu0409/DuPL#1, deepspeedai/DeepSpeed#7998, #7170, #5828: `b` runs `times` times, 0 to 2, as the batch says.

    Ranks whose batches disagree waited for each other's gradients for ever.
    """

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(FEATURES, FEATURES)
        self.b = nn.Linear(FEATURES, FEATURES)

    def forward(self, x: Tensor, times: int) -> Tensor:
        x = self.a(x)
        for _ in range(times):
            x = torch.tanh(self.b(x))
        return x


def on_or_off_sample(seed: int, index: int) -> dict[str, Any]:
    """`b` runs under an odd seed."""
    return flagged_sample(seed, index, times=seed % 2)


def off_or_on_sample(seed: int, index: int) -> dict[str, Any]:
    """The converse: 0 times under an odd seed, once under an even one."""
    return flagged_sample(seed, index, times=1 - seed % 2)


def up_to_twice_sample(seed: int, index: int) -> dict[str, Any]:
    """`b` runs as often as the seed's remainder by three says."""
    return flagged_sample(seed, index, times=seed % 3)


def flagged_sample(seed: int, index: int, times: int) -> dict[str, Any]:
    generator = draw(seed, index)
    return {"x": normal(generator, FEATURES), "y": normal(generator, FEATURES), "times": times}


def with_one_flag(samples: list[dict[str, Any]]) -> dict[str, Any]:
    """Collated, but for `times`, which is one plain number for all samples."""
    (times,) = {sample["times"] for sample in samples}
    tensors = [{"x": sample["x"], "y": sample["y"]} for sample in samples]
    return {**default_collate(tensors), "times": times}


def flagged_loss(model: nn.Module, batch: dict[str, Any]) -> Tensor:
    return mse_loss(model(batch["x"], batch["times"]), batch["y"])


class SharedHead(nn.Module):
    """LibreYOLO/libreyolo#303, lucidrains/DALLE2-pytorch#225: one head runs twice under checkpointing.

    It reads the encoder's and the decoder's output; `extra` is used `times` times, 0 or 1. A reducer marked the head's
    parameters ready twice, or waited for `extra`.
    """

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(FEATURES, FEATURES), nn.Tanh())
        self.decoder = nn.Sequential(nn.Linear(FEATURES, FEATURES), nn.Tanh())
        self.head = nn.Linear(FEATURES, FEATURES)
        self.extra = nn.Parameter(torch.ones(FEATURES))

    def forward(self, x: Tensor, times: int) -> Tensor:
        encoded = self.encoder(x)
        decoded = self.decoder(encoded)
        out = checkpoint(self.head, encoded, use_reentrant=False) + checkpoint(self.head, decoded, use_reentrant=False)
        for _ in range(times):
            out = out * self.extra
        return out


class DropBlock(nn.Module):
    """[B, D] to [B, D], with half of the inner features dropped."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(FEATURES, 2 * FEATURES), nn.Tanh(), nn.Dropout(0.5), nn.Linear(2 * FEATURES, FEATURES)
        )

    def forward(self, x: Tensor) -> Tensor:
        return x + self.layers(x)


class Kept(nn.Module):
    """A block whose activations are kept: under the names, and with the weights, that `Recomputed` has."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.block = block

    def forward(self, x: Tensor) -> Tensor:
        return self.block(x)


class Recomputed(nn.Module):
    """allenai/OLMo-core#828, pytorch/torchtitan#1323: a recomputed block is to drop what it dropped the first time.

    Its gradients are those of the same block without checkpointing.
    """

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.block = block

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.block, x, use_reentrant=False)


def dropping(wrap: Callable[[nn.Module], nn.Module]) -> nn.Module:
    return nn.Sequential(*(wrap(DropBlock()) for _ in range(4)), nn.Linear(FEATURES, FEATURES)).double()


def class_loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    x, targets = batch
    return cross_entropy(model(x), targets.softmax(-1))


HEAD_B = frozenset({"b.weight", "b.bias"})

CASES = by_name(
    Case(name="07_odd_micro_batches", model=odd_micro_batches, loss=vector_loss, sample=vector_pair_sample),
    Case(name="08_smaller_last_batch", model=smaller_last_batch, loss=vector_loss, sample=vector_pair_sample),
    Case(name="10_clip_across_stages", model=lambda: TiedEnds(12, 8).double(), loss=large_gradient_loss,
         sample=ids_sample, notes="clip to a norm of 0.5"),
    Case(name="12_hook_on_a_boundary", model=lambda: HookOnBoundary().double(), loss=vector_loss,
         sample=vector_pair_sample, notes="second.calls is the count of micro-batches so far"),
    Case(name="13_evaluate_first", model=lambda: Normalised().double(), loss=vector_loss,
         sample=three_vectors_sample, couple=True),
    Case(name="14_branch_per_step", model=lambda: FlaggedBranch().double(), loss=flagged_loss,
         sample=on_or_off_sample, collate=with_one_flag, idle=HEAD_B),
    Case(name="14_head_called_again", model=lambda: FlaggedBranch().double(), loss=flagged_loss,
         sample=up_to_twice_sample, collate=with_one_flag, idle=HEAD_B),
    Case(name="15_called_twice_checkpointed", model=lambda: SharedHead().double(), loss=flagged_loss,
         sample=off_or_on_sample, collate=with_one_flag, idle=frozenset({"extra"})),
    Case(name="16_dropout_kept", model=lambda: dropping(Kept), loss=class_loss, sample=vector_pair_sample,
         random=True, notes="the same weights and draws as 16_dropout_recomputed"),
    Case(name="16_dropout_recomputed", model=lambda: dropping(Recomputed), loss=class_loss,
         sample=vector_pair_sample, random=True, notes="checkpointed; the graph reference is that of 16_dropout_kept"),
)  # fmt: skip
