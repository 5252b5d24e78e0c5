"""The pieces of a graph, run one after the other, compute what the model computes, wherever it is cut."""

import copy
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from graph.in_turn import run_backward
from graph.models import (
    Averaging,
    FrozenTarget,
    Gpt,
    Hooked,
    Noisy,
    ResNet,
    Reversed,
    captured,
    ids,
    next_token,
    numbers,
    sum_of_squares,
    tensors_of,
)
from reference import SeededDraws
from shardwise.graph import Chain, Draws, cut, read, seeding

Function = Callable[[Any, Any], list[Any]]

ROUNDING = 1e-11
DRAWS = Draws(seed=1, step=2, micro_batch=3, device=torch.device("cpu"))

CASES: dict[str, tuple[Callable[[], nn.Module], Function, Tensor]] = {
    "gpt": (Gpt, next_token, ids()),
    "resnet": (ResNet, sum_of_squares, numbers(3, 3, 6, 6)),
    "averaging": (Averaging, sum_of_squares, numbers(3, 8)),
    "noisy": (Noisy, sum_of_squares, numbers(3, 8)),
    "reversed": (Reversed, sum_of_squares, numbers(3, 8)),
    "frozen target": (FrozenTarget, sum_of_squares, numbers(3, 8)),
    "hooked": (Hooked, sum_of_squares, numbers(3, 8)),
}


def by_itself(model: nn.Module, function: Function, batch: Any) -> tuple[list[Any], nn.Module]:
    """What `function` returns in plain PyTorch, and a model with its gradients and buffers."""
    model = copy.deepcopy(model)
    with SeededDraws(DRAWS.seed, DRAWS.step, DRAWS.micro_batch):
        leaves = function(model, batch)
    leaves[0].backward()
    return leaves, model


def assert_same(chain: Chain, bounds: Sequence[int], model: nn.Module, batch: Any, expected: Any) -> None:
    wanted, whole = expected
    model = copy.deepcopy(model)
    leaves = run_backward(chain, bounds, tensors_of(model), read(batch)[1], DRAWS)
    torch.testing.assert_close(leaves, wanted, rtol=0, atol=ROUNDING)
    torch.testing.assert_close(dict(model.named_buffers()), dict(whole.named_buffers()), rtol=0, atol=ROUNDING)
    for (name, one), other in zip(model.named_parameters(), whole.parameters(), strict=True):
        assert one.grad is not None, name
        torch.testing.assert_close(one.grad, other.grad, rtol=0, atol=ROUNDING, msg=lambda text, name=name: name + text)


@pytest.mark.parametrize("name", CASES)
def test_every_cut_that_is_allowed_gives_loss_gradients_and_buffers_of_the_model(name):
    build, function, batch = CASES[name]
    torch.manual_seed(0)
    model = build()
    chain = captured(model, batch, function)
    expected = by_itself(model, function, batch)
    assert chain.cuts
    for position in chain.cuts.values():
        assert_same(chain, [0, position], model, batch, expected)


@pytest.mark.parametrize("name", ["gpt", "resnet"])
def test_as_many_stages_as_segments_give_the_same(name):
    build, function, batch = CASES[name]
    torch.manual_seed(0)
    model = build()
    chain = captured(model, batch, function)
    assert len(chain.segments) > 3
    bounds = [segment.ops.start for segment in chain.segments]
    assert_same(chain, bounds, model, batch, by_itself(model, function, batch))


def test_one_graph_serves_batches_and_lengths_of_other_sizes():
    model = Gpt()
    chain = captured(model, ids(2, 7), next_token)
    assert chain.graph.capture.dynamic == (frozenset({0, 1}),)
    bounds = [0, chain.cuts["before h.1"]]
    for batch in (ids(3, 7), ids(5, 4), ids(2, 11)):
        assert_same(chain, bounds, model, batch, by_itself(model, next_token, batch))


def test_a_stage_computes_masks_and_positions_for_itself_and_is_sent_only_the_hidden_state():
    chain = captured(Gpt(), ids(), next_token)
    first, second = cut(chain, [0, chain.cuts["before h.1"]])
    (hidden,) = second.inputs
    assert second.fields == first.fields == (0,)
    assert hidden == first.outputs[0]
    assert second.prepared
    assert chain.graph.widths[chain.cuts["before h.1"]] == 3 * 6 * 8 * 8, "[B, T, D] of 8 bytes each"


def test_a_tied_weight_is_read_by_both_stages_under_its_first_name_and_sums_its_gradients():
    chain = captured(Gpt(), ids(), next_token)
    first, second = cut(chain, [0, chain.cuts["before h.1"]])
    assert "embedding.weight" in first.parameters
    assert "embedding.weight" in second.parameters
    assert not any("head" in name for stage in (first, second) for name in stage.parameters)
    assert [parameter.name for parameter in chain.graph.parameters].count("embedding.weight") == 1


def test_no_cut_comes_between_a_tensor_and_a_later_write_to_it():
    """A write in place to what another stage sent would be a write to a leaf, and the sender would not see it."""
    chain = captured(ResNet(), numbers(3, 3, 6, 6))
    ops = chain.graph.ops
    own = [op.target == "aten.add_.Tensor" and "norm" not in op.calls[-1] for op in ops]
    written = [at for at, op in enumerate(ops) if op.target == "aten.relu_.default" or own[at]]
    assert len(written) == 6
    assert [at for at in written if chain.graph.widths[at] is not None] == []


def test_no_cut_comes_between_a_buffer_that_is_written_without_gradient_and_its_reader():
    """Export puts what runs under no_grad into a graph of its own, where the write was not seen.

    The stages then each had a buffer: one was updated, the other read, and no error told.
    """
    chain = captured(Averaging(), numbers(3, 8))
    assert chain.graph.written == {"mean"}
    targets = [op.target for op in chain.graph.ops]
    write = targets.index("wrap_with_set_grad_enabled")
    reader = targets.index("aten.sub.Tensor")
    assert [chain.graph.widths[at] for at in range(write + 1, reader + 1)] == [None] * (reader - write)


def test_a_buffer_that_is_written_without_gradient_and_read_by_nobody_is_written():
    """Nothing used the region's results, so it was taken for dead code."""

    class Counting(nn.Linear):
        def __init__(self) -> None:
            super().__init__(8, 8, dtype=torch.float64)
            self.register_buffer("calls", torch.zeros(()))

        def forward(self, x: Tensor) -> Tensor:
            with torch.no_grad():
                self.calls.add_(1)
            return super().forward(x)

    model = Counting()
    chain = captured(model, numbers(3, 8))
    run_backward(chain, [0], tensors_of(model), [numbers(3, 8)], DRAWS)
    assert model.calls.item() == 1


def test_a_write_by_a_keyword_is_seen():
    class Writing(nn.Linear):
        def __init__(self) -> None:
            super().__init__(8, 8, dtype=torch.float64)
            self.register_buffer("total", torch.zeros(8, dtype=torch.float64))

        def forward(self, x: Tensor) -> Tensor:
            torch.add(self.total, x.sum(0), out=self.total)
            return super().forward(x) + self.total

    assert captured(Writing(), numbers(3, 8)).graph.written == {"total"}


def test_running_statistics_of_a_norm_without_gradient_are_written():
    class Teaching(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.student = nn.BatchNorm1d(8, dtype=torch.float64), nn.Linear(8, 8, dtype=torch.float64)

        def forward(self, x: Tensor) -> Tensor:
            with torch.no_grad():
                target = self.norm(x)
            return self.student(x) - target

    written = captured(Teaching(), numbers(3, 8)).graph.written
    assert written == {"norm.running_mean", "norm.running_var", "norm.num_batches_tracked"}


def test_a_batch_that_the_loss_writes_to_is_copied_and_stays_as_it_was():
    """The copy was put behind the last attribute of the graph, which may stand behind its first reader."""

    def loss(model: nn.Module, batch: dict[str, Tensor]) -> list[Any]:
        labels = batch["labels"]
        labels[labels < 0] = 0
        with torch.no_grad():
            twice = 2 * labels
        return [(model(batch["x"]) - twice).square().sum()]

    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)).double()
    batch = {"x": numbers(3, 8), "labels": numbers(3, 8)}
    chain = captured(model, batch, loss)
    expected = by_itself(model, loss, copy.deepcopy(batch))
    before = batch["labels"].clone()
    for position in chain.cuts.values():
        assert_same(chain, [0, position], model, batch, expected)
    assert torch.equal(batch["labels"], before)


def test_each_draw_has_its_number_also_below_no_grad():
    chain = captured(Noisy(), numbers(3, 8))
    drawn = [(op.target, op.draws, chain.graph.first_draw[op.name]) for op in chain.graph.ops if op.draws]
    assert drawn == [("wrap_with_set_grad_enabled", 2, 0), ("aten.dropout.default", 1, 2)]


def test_draws_follow_the_formula_of_the_reference():
    with SeededDraws(1, 2, 3):
        wanted = torch.rand(4), torch.randn(4)
    with seeding(DRAWS):
        assert all(torch.equal(one, other) for one, other in zip((torch.rand(4), torch.randn(4)), wanted, strict=True))
