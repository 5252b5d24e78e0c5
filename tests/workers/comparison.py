"""Compare what the ranks of a plan hold with the reference of that plan."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, final

import torch
from torch import Tensor, nn

import reference
from workers.layouts import CASES, SEED, adamw
from workers.pool import Pool
from workers.training import Trained, Training, train

LOSS = 1e-11
GRADIENT = 1e-11  # of the largest gradient in the model
PARAMETER = 1e-10
BUFFER = 1e-10

# By the name of a case, the one that says in plain PyTorch what its plans are to compute.
STANDS_FOR = {
    "padded_loss_scalar": "padded_loss",  # the mean over all labels of the step, where the plan rewrites the loss
    "16_dropout_recomputed": "16_dropout_kept",  # draws are by occurrence, which recomputing does not raise
}


@final
@dataclass(frozen=True, kw_only=True)
class Errors:
    """The greatest difference between a plan and its reference.

    gradient:  as a share of the largest gradient in the model at that step
    unlike:    parameters of which two ranks hold different bits
    """

    loss: float
    grad_norm: float
    gradient: float
    parameter: float
    buffer: float
    unlike: tuple[str, ...] = ()

    @property
    def largest(self) -> float:
        return max(self.loss, self.grad_norm, self.gradient, self.parameter, self.buffer)

    @property
    def equal(self) -> bool:
        numbers = asdict(self)
        limits = {"loss": LOSS, "grad_norm": LOSS, "gradient": GRADIENT, "parameter": PARAMETER, "buffer": BUFFER}
        # Not `>`: a NaN is no equality.
        return not self.unlike and all(numbers[name] <= limit for name, limit in limits.items())


def errors_of(training: Training, ranks: Sequence[Trained]) -> Errors:
    """How far the `ranks` are from the reference.

    raises:  AssertionError where a parameter, a buffer or a gradient is nowhere, or ranks report different steps
    """
    expected = reference_of(training)
    for rank in ranks:
        assert (rank.losses, rank.grad_norms) == (ranks[0].losses, ranks[0].grad_norms), "a step is equal on all ranks"
    parameters = _copies(rank.parameters for rank in ranks)
    buffers = _copies(rank.buffers for rank in ranks if rank.data_rank == 0)
    assert parameters.keys() == expected.parameters.keys()
    assert buffers.keys() == expected.buffers.keys()
    return Errors(
        loss=_largest(abs(x - y) for x, y in zip(ranks[0].losses, expected.losses, strict=True)),
        grad_norm=_largest(abs(x / y - 1) for x, y in zip(ranks[0].grad_norms, expected.grad_norms, strict=True)),
        gradient=_gradient_error(ranks, expected.gradients),
        parameter=_largest(_apart(parameters, expected.parameters)),
        buffer=_largest(_apart(buffers, expected.buffers)),
        unlike=tuple(name for name, held in parameters.items() if any(not torch.equal(held[0], one) for one in held)),
    )


def assert_equal(pool: Pool, training: Training) -> list[Trained]:
    """Train, and return what the ranks hold, which equals the reference."""
    ranks = pool.run(training.plan.devices, train, training)
    errors = errors_of(training, ranks)
    assert errors.equal, errors
    return ranks


def evaluation_of(training: Training, samples: int, seed: int) -> float:
    """The loss of one process on so many samples in evaluation mode, once it has trained."""
    case = CASES[training.case]
    after = reference_of(training)
    model = case.model()
    with torch.no_grad():
        for name, tensor in (*model.named_parameters(), *model.named_buffers()):
            tensor.copy_({**after.parameters, **after.buffers}[name])
        value = case.loss(model.eval(), case.batch(samples, seed))
    assert isinstance(value, Tensor)
    return value.item()


def reference_of(training: Training) -> reference.Result:
    """The reference of the plan, in plain PyTorch; buffers are those of the first data rank."""
    whole = len(training.plan.stages) == 1
    case = CASES[training.case]
    stands_for = CASES[STANDS_FOR.get(training.case, training.case)]
    steps = range(len(training.batches))
    micro_batches = [training.micro_batches(step) for step in steps]
    own = {id(batch) for step in steps for batch in micro_batches[step][: len(training.shares(step)[0])]}
    return reference.run(
        case.model if whole else stands_for.model,
        _keeping_buffers(stands_for.loss, own),
        micro_batches,
        [training.sizes(step) for step in steps],
        adamw,
        seed=SEED,
        clip_grad_norm=training.clip_grad_norm,
        random="torch" if whole else "graph",
        before_step=case.before_step,
    )


def _keeping_buffers(loss: Callable[[Any, Any], Any], own: set[int]) -> Callable[[Any, Any], Any]:
    """`loss`, which leaves the buffers as they were except where the batch is one of `own`, told by identity.

    So that those of BatchNorm are the ones of one replica, while the parameters learn from all.
    """

    def run(model: nn.Module, batch: Any) -> Any:
        before = [buffer.clone() for buffer in model.buffers()]
        value = loss(model, batch)
        if id(batch) not in own:
            for buffer, kept in zip(model.buffers(), before, strict=True):
                buffer.data.copy_(kept)  # autograd holds it for the backward pass, where BatchNorm does not read it
        return value

    return run


def _copies(ranks: Iterable[Mapping[str, Tensor]]) -> dict[str, list[Tensor]]:
    """By name, what each rank holds."""
    copies: dict[str, list[Tensor]] = {}
    for rank in ranks:
        for name, tensor in rank.items():
            copies.setdefault(name, []).append(tensor)
    return copies


def _gradient_error(ranks: Sequence[Trained], expected: Sequence[Mapping[str, Tensor | None]]) -> float:
    """None counts as zero: which of the two it is shows in the parameters, since AdamW decays only what has one."""
    errors = []
    for step, gradients in enumerate(expected):
        scale = max(gradient.abs().max().item() for gradient in gradients.values() if gradient is not None)
        held: dict[str, list[Tensor | None]] = {}
        for rank in ranks:
            for name, gradient in rank.gradients[step].items():
                held.setdefault(name, []).append(gradient)
        assert held.keys() >= {name for name, gradient in gradients.items() if gradient is not None}
        for name, copies in held.items():
            errors += [_difference(copy, gradients[name]) / scale for copy in copies]
    return _largest(errors)


def _difference(one: Tensor | None, other: Tensor | None) -> float:
    if one is None or other is None:
        present = other if one is None else one
        return 0.0 if present is None else present.abs().max().item()
    return (one - other).abs().max().item()


def _apart(copies: Mapping[str, Sequence[Tensor]], expected: Mapping[str, Tensor]) -> list[float]:
    return [
        (copy.double() - expected[name].double()).abs().max().item() for name, held in copies.items() for copy in held
    ]


def _largest(errors: Iterable[float]) -> float:
    """NaN where one is NaN, which `max` would pass over."""
    return torch.tensor([0.0, *errors], dtype=torch.float64).max().item()
