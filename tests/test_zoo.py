"""The yardstick itself: the cases are sound, and the reference does what its contract says."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.utils._pytree
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

import cases
import reference
import zoo
from shardwise.job import Mean
from zoo import Case

ALL = [*zoo.CASES.values(), *cases.CASES.values()]
ROUNDING = 1e-12  # float64 in another order of additions, with gradients of about 1

each_case = pytest.mark.parametrize("case", ALL, ids=lambda case: case.name)
each_case_without_draws = pytest.mark.parametrize(
    "case", [case for case in ALL if not case.random], ids=lambda case: case.name
)
each_zoo_case = pytest.mark.parametrize("case", zoo.CASES.values(), ids=lambda case: case.name)


def sgd(named: reference.NamedParameters) -> torch.optim.Optimizer:
    return torch.optim.SGD([parameter for _, parameter in named], lr=0.1)


def train(case: Case, sizes: list[int], *, seeds: tuple[int, ...] = (0,), **settings: Any) -> reference.Result:
    """One step for each of `seeds`, each over micro-batches of these `sizes`, by the rule that allows recomputation."""
    micro_batches = [case.micro_batches(sizes, seed) for seed in seeds]
    settings = {"random": "torch", "before_step": case.before_step, **settings}
    return reference.run(case.model, case.loss, micro_batches, [sizes] * len(seeds), sgd, **settings)


def test_the_zoo_holds_what_breaks_splitting():
    assert len(zoo.CASES) == 27
    assert {name[:2] for name in cases.CASES} == {f"{number:02}" for number in range(1, 18)} - {"11"}


@each_case
def test_parameters_and_samples_are_float64_and_the_loss_is_finite(case: Case):
    model = case.model()
    result = train(case, [8])
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float64}
    assert {tensor.dtype for tensor in tensors(case.batch(8, 0))} <= {torch.float64, torch.int64}
    assert torch.tensor(result.losses).isfinite().all()


@each_case
def test_every_trained_parameter_but_the_idle_has_a_gradient(case: Case):
    trained = {name for name, parameter in case.model().named_parameters() if parameter.requires_grad}
    gradients = train(case, [8]).gradients[0]
    reached = {name for name, gradient in gradients.items() if gradient is not None and gradient.abs().max() > 1e-9}
    assert case.idle <= trained
    assert reached | case.idle == trained


@each_case
def test_same_seed_gives_same_numbers_to_the_last_bit(case: Case):
    first, again = (train(case, [5, 3], seeds=(0, 1)) for _ in range(2))
    assert_same(first, again, difference=0.0)


@each_case
def test_one_to_eight_samples_make_a_batch(case: Case):
    for samples in range(1, 9):
        assert torch.tensor(train(case, [samples]).losses).isfinite().all()


@each_case_without_draws
def test_micro_batches_of_3_3_2_equal_the_batch_unless_the_loss_couples(case: Case):
    whole, parts = train(case, [8]), train(case, [3, 3, 2])
    if case.couple:
        assert abs(whole.losses[0] - parts.losses[0]) > 1e-6
    else:
        assert_same(whole, parts, difference=ROUNDING)


@each_case
def test_random_says_whether_the_loss_draws(case: Case):
    model, batch = case.model(), case.batch(2, 0)
    before = torch.get_rng_state()
    case.loss(model, batch)
    assert torch.equal(before, torch.get_rng_state()) == (not case.random)


@each_zoo_case
def test_a_zoo_model_can_be_cut_in_four_with_15_percent_of_the_flops_each(case: Case):
    model, batch = case.model(), case.batch(4, 0)
    with OpFlops() as forward:
        case.loss(model, batch)
    stages, stage = 0, 0
    for flops in forward.flops:
        stage += flops
        if stage >= 0.15 * sum(forward.flops):
            stages, stage = stages + 1, 0
    assert stages >= 4


def test_a_padded_scalar_is_right_for_one_batch_only():
    right, scalar = zoo.CASES["padded_loss"], zoo.CASES["padded_loss_scalar"]
    assert_same(train(right, [8]), train(scalar, [8]), difference=ROUNDING)
    assert abs(train(right, [3, 3, 2]).losses[0] - train(scalar, [3, 3, 2]).losses[0]) > 1e-3


def test_warm_up_changes_the_loss_between_steps_and_starts_afresh():
    case = zoo.CASES["kl_warm_up"]
    model, batch = case.model(), case.batch(4, 0)
    losses = []
    for step in (0, 1, 0):
        case.before_step(step)
        torch.manual_seed(0)
        losses.append(case.loss(model, batch).item())
    assert losses[0] < losses[1]
    assert losses[0] == losses[2]


def test_hook_on_a_boundary_is_called_once_a_micro_batch():
    case = cases.CASES["12_hook_on_a_boundary"]
    model = case.model()
    batches = [case.micro_batches([2, 2], seed) for seed in range(5)]
    reference.run(lambda: model, case.loss, batches, [[2, 2]] * 5, sgd)
    assert model.second.calls == 10


def test_reference_over_one_micro_batch_is_the_loop_everyone_writes():
    case = zoo.CASES["gpt_tied"]
    torch.manual_seed(3)
    model = case.model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)
    losses = []
    for step in range(3):
        optimizer.zero_grad()
        loss = case.loss(model, case.batch(4, step))
        loss.backward()
        losses.append(loss.item())
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        scheduler.step()
    result = reference.run(
        case.model,
        case.loss,
        [[case.batch(4, step)] for step in range(3)],
        [[4]] * 3,
        lambda named: torch.optim.AdamW(named, lr=0.01),
        seed=3,
        clip_grad_norm=0.5,
        scheduler=lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5),
    )
    assert result.losses == pytest.approx(losses, abs=ROUNDING)
    assert difference_of(result.parameters, dict(model.named_parameters())) < 1e-9


def test_clipping_counts_a_tied_parameter_once_over_the_whole_model():
    case = cases.CASES["10_clip_across_stages"]
    free = train(case, [4, 4])
    clipped = train(case, [4, 4], clip_grad_norm=0.5)
    assert list(free.gradients[0]) == ["embedding.weight", "middle.weight", "middle.bias"]
    assert free.grad_norms == clipped.grad_norms == [pytest.approx(norm_of(free.gradients[0]))]
    assert free.grad_norms[0] > 0.5
    assert norm_of(clipped.gradients[0]) == pytest.approx(0.5, abs=1e-5)


def test_a_parameter_that_no_micro_batch_uses_has_no_gradient():
    case = cases.CASES["14_branch_per_step"]
    result = train(case, [2, 2], seeds=(0, 1))
    assert [step["b.weight"] is None for step in result.gradients] == [True, False]


def test_micro_batches_that_weigh_nothing_are_refused():
    with pytest.raises(ValueError, match=r"step 0 weigh 0\.0 together"):
        reference.run(
            lambda: nn.Linear(1, 1), lambda model, x: Mean(model(x).sum(), 0), [[torch.ones(1, 1)]], [[1]], sgd
        )


def test_mix_is_the_documented_formula():
    assert reference.mix(0, 0, 0, 0) == 5809880761037817570
    assert reference.mix(1, 2, 3, -1) == 9032616899316498686


MASK = torch.ones(8, 8, dtype=torch.bool).tril()
LSTM = nn.LSTM(16, 4, num_layers=3, dropout=0.5, dtype=torch.float64)
GRU = nn.GRU(16, 4, num_layers=3, dropout=0.5, dtype=torch.float64)

RANDOM_OPS: dict[str, tuple[int, Callable[[Tensor], Tensor]]] = {
    "dropout": (1, lambda x: nn.functional.dropout(x, 0.5)),
    "dropout2d": (1, lambda x: nn.functional.dropout2d(x[None, :, :, None], 0.5)),
    "alpha_dropout": (1, lambda x: nn.functional.alpha_dropout(x, 0.5, training=True)),
    "rrelu": (1, lambda x: nn.functional.rrelu(-x.abs(), training=True)),
    "attention dropout": (1, lambda x: nn.functional.scaled_dot_product_attention(x, x, x, dropout_p=0.5)),
    "attention dropout with a mask": (1, lambda x: nn.functional.scaled_dot_product_attention(x, x, x, MASK, 0.5)),
    "lstm dropout": (2, lambda x: LSTM(x)[0]),
    "gru dropout": (2, lambda x: GRU(x)[0]),
    "randn_like": (1, torch.randn_like),
    "normal_": (1, lambda x: torch.empty_like(x).normal_()),
    "randint": (1, lambda x: torch.randint(1000, x.shape)),
    "randperm": (1, lambda x: torch.randperm(100)),
    "multinomial": (1, lambda x: torch.multinomial(x.abs(), 2)),
    "bernoulli": (1, lambda x: torch.bernoulli(x.sigmoid())),
}


@pytest.mark.parametrize(("occurrences", "op"), RANDOM_OPS.values(), ids=RANDOM_OPS)
def test_under_the_graph_rule_a_random_op_depends_on_its_place_alone(occurrences: int, op: Callable[[Tensor], Tensor]):
    def drawn(before: int, step: int) -> Tensor:
        torch.manual_seed(before)
        with reference.SeededDraws(seed=1, step=step, micro_batch=3) as draws:
            value = op(x)
        assert draws.occurrence == occurrences
        return value

    x = torch.randn(4, 8, 16, dtype=torch.float64)[0].requires_grad_()
    assert torch.equal(drawn(before=1, step=2), drawn(before=2, step=2))
    assert not torch.equal(drawn(before=1, step=2), drawn(before=1, step=4))


def test_under_the_graph_rule_an_op_counts_by_its_tag_even_where_it_draws_nothing():
    """The fused attention of the CPU is tagged, also without dropout; dropout that drops nothing is no op at all."""
    x = torch.randn(1, 2, 8, 16, dtype=torch.float64)
    with reference.SeededDraws(0, 0, 0) as draws:
        nn.functional.scaled_dot_product_attention(x, x, x)
        nn.functional.dropout(x, 0.5, training=False)
    assert draws.occurrence == 1


def test_under_the_graph_rule_random_ops_are_counted_in_forward_order_per_micro_batch():
    def loss(model: nn.Module, x: Tensor) -> Tensor:
        drawn.append((torch.rand(()).item(), torch.rand(()).item()))
        return model(x).mean()

    def by_hand(step: int, micro_batch: int, occurrence: int) -> float:
        return torch.rand(
            (), generator=torch.Generator().manual_seed(reference.mix(5, step, micro_batch, occurrence))
        ).item()

    drawn: list[tuple[float, float]] = []
    x = torch.ones(1, 1)
    reference.run(lambda: nn.Linear(1, 1), loss, [[x, x], [x, x]], [[1, 1], [1, 1]], sgd, seed=5)
    places = [(0, 0), (0, 1), (1, 0), (1, 1)]
    assert drawn == [(by_hand(*place, 0), by_hand(*place, 1)) for place in places]


def test_under_the_torch_rule_each_micro_batch_is_seeded_once():
    case = zoo.CASES["vae"]
    torch.manual_seed(0)
    model = case.model()
    torch.manual_seed(reference.mix(0, 0, 0, -1))
    loss, _ = case.loss(model, case.batch(4, 0))
    assert train(case, [4]).losses == [pytest.approx(loss.item(), abs=ROUNDING)]


def test_recomputed_dropout_equals_kept_dropout_under_the_torch_rule():
    kept, recomputed = cases.CASES["16_dropout_kept"], cases.CASES["16_dropout_recomputed"]
    assert_same(train(kept, [2, 2], seeds=(0, 1)), train(recomputed, [2, 2], seeds=(0, 1)), difference=0.0)


def test_recomputed_dropout_is_refused_under_the_graph_rule_that_would_draw_it_anew():
    with pytest.raises(RuntimeError, match="without activation checkpointing"):
        train(cases.CASES["16_dropout_recomputed"], [2, 2], random="graph")


class OpFlops(TorchDispatchMode):
    """The FLOPs of each op that torch has a formula for, in the order they run."""

    def __init__(self) -> None:
        super().__init__()
        self.flops: list[int] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func.overloadpacket in flop_registry:
            self.flops.append(flop_registry[func.overloadpacket](*args, **(kwargs or {}), out_val=out))
        return out


def tensors(value: Any) -> list[Tensor]:
    return [leaf for leaf in torch.utils._pytree.tree_leaves(value) if isinstance(leaf, Tensor)]


def norm_of(gradients: dict[str, Tensor | None]) -> float:
    return sum(gradient.square().sum().item() for gradient in gradients.values() if gradient is not None) ** 0.5


def difference_of(some: dict[str, Any], others: dict[str, Any]) -> float:
    """The greatest difference between tensors of one name; names, and which of them have no tensor, must agree."""
    assert {name for name in some if some[name] is not None} == {name for name in others if others[name] is not None}
    assert some.keys() == others.keys()
    pairs = [(some[name], others[name]) for name in some if some[name] is not None]
    return max(((one - other).abs().max().item() for one, other in pairs), default=0.0)


def assert_same(first: reference.Result, second: reference.Result, *, difference: float) -> None:
    assert first.losses == pytest.approx(second.losses, rel=0, abs=difference)
    for some, others in zip(first.gradients, second.gradients, strict=True):
        assert difference_of(some, others) <= difference
    assert difference_of(first.parameters, second.parameters) <= difference
    assert difference_of(first.buffers, second.buffers) <= difference
