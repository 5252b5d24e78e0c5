"""Real captures of losses on a small model, in float64: what each divides by is found, and taken out of the graph."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from plan_jobs import CLASSES, FEATURES
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, log_softmax, mse_loss, nll_loss, one_hot

from shardwise.graph import Capture, Refusal, capture, read
from shardwise.job import Mean, objective
from shardwise.plan import Guard, rewrite, weigh
from shardwise.plan.weighting import check_of_batch, sample_weight, weight_of_batch

SAMPLES = 10
Batch = dict[str, Tensor]
Loss = Callable[[nn.Module, Batch], Any]


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Linear(FEATURES, CLASSES).double()


def batch() -> Batch:
    """Labels of which several are -100, and a mask that is unlike from sample to sample."""
    generator = torch.Generator().manual_seed(1)
    label = torch.randint(CLASSES, (SAMPLES,), generator=generator)
    return {
        "x": torch.randn(SAMPLES, FEATURES, generator=generator, dtype=torch.float64),
        "label": torch.where(torch.arange(SAMPLES) % 3 == 0, -100, label),
        "whole_label": label,
        "mask": torch.arange(SAMPLES) % 4 > 1,
    }


def captured(loss: Loss) -> Capture:
    found = capture(objective(loss), model(), batch())
    assert isinstance(found, Capture), found
    return found


def each(model: nn.Module, batch: Batch) -> Tensor:
    """[B]: one number per sample."""
    return model(batch["x"]).square().mean(1)


def ignoring(model, batch):
    return cross_entropy(model(batch["x"]), batch["label"])


def with_class_weights(model, batch):
    weight = torch.arange(1.0, CLASSES + 1, dtype=torch.float64)
    return cross_entropy(model(batch["x"]), batch["label"], weight=weight, label_smoothing=0.1)


def with_another_ignore_index(model, batch):
    return cross_entropy(model(batch["x"]), batch["whole_label"], ignore_index=3)


def likelihood(model, batch):
    return nll_loss(log_softmax(model(batch["x"]), 1), batch["label"])


def masked(model, batch):
    return (each(model, batch) * batch["mask"]).sum() / batch["mask"].sum()


def masked_with_floor(model, batch):
    return (each(model, batch) * batch["mask"]).sum() / batch["mask"].sum().clamp(min=1)


def masked_by_a_number(model, batch):
    return (each(model, batch) * batch["mask"]).sum() / batch["mask"].sum().item()


def masked_then_summed(model, batch):
    return (each(model, batch) * batch["mask"] / batch["mask"].sum()).sum()


def selected(model, batch):
    return each(model, batch)[batch["mask"]].mean()


def scaled(model, batch):
    return -0.5 * ignoring(model, batch) / 3


REWRITTEN = [
    ignoring, with_class_weights, with_another_ignore_index, likelihood, masked, masked_with_floor, masked_by_a_number,
    masked_then_summed, selected, scaled,
]  # fmt: skip


def run(graph: Capture, part: Batch, linear: nn.Module | None = None) -> list[Any]:
    """The leaves that the graph gives for a batch, with the parameters of `linear`."""
    graph.module.recompile()
    named = {f"model.{name}": value for name, value in (linear or model()).named_parameters()}
    return list(torch.func.functional_call(graph.module, named, tuple(part.values())))


@pytest.mark.parametrize("loss", REWRITTEN)
def test_sums_and_weights_of_uneven_parts_make_the_loss_of_the_whole_batch(loss):
    graph = captured(loss)
    weighing = weigh(graph)
    assert weighing.weighting == "rewritten"
    rewritten = rewrite(graph, weighing)
    parts = [{name: value[first:last] for name, value in batch().items()} for first, last in ((0, 5), (5, 7), (7, 10))]
    totals, weights = zip(*(run(rewritten, part)[:2] for part in parts), strict=True)
    whole = loss(model(), batch())
    torch.testing.assert_close(sum(totals) / sum(weights), whole.detach(), rtol=1e-12, atol=1e-14, check_dtype=False)
    means = torch.stack([loss(model(), part) for part in parts])
    by_samples = (means * torch.tensor([5, 2, 3])).sum() / 10
    assert abs(by_samples - whole) > 1e-4  # what weighing by samples would have given


@pytest.mark.parametrize("loss", REWRITTEN)
def test_gradients_of_uneven_parts_make_the_gradient_of_the_whole_batch(loss):
    graph = captured(loss)
    rewritten = rewrite(graph, weigh(graph))
    split, weight = model(), 0.0
    for first, last in ((0, 7), (7, 10)):
        total, counted = run(rewritten, {name: value[first:last] for name, value in batch().items()}, split)[:2]
        total.backward()
        weight += float(counted)
    whole = model()
    loss(whole, batch()).backward()
    torch.testing.assert_close(split.weight.grad / weight, whole.weight.grad, rtol=1e-12, atol=1e-14)


def test_a_part_without_any_label_weighs_nothing_and_is_no_nan():
    graph = captured(ignoring)
    none = batch() | {"label": torch.full((SAMPLES,), -100)}
    total, weight = run(rewrite(graph, weigh(graph)), none)[:2]
    assert (total.item(), weight.item()) == (0.0, 0)


def test_metrics_keep_their_values():
    def loss(model, batch):
        value = ignoring(model, batch)
        return value, {"loss": value.detach(), "count": batch["mask"].sum()}

    graph = captured(loss)
    rewritten = rewrite(graph, weigh(graph))
    assert run(rewritten, batch())[2:] == run(graph, batch())[2:]
    assert rewritten.outputs == graph.outputs


def test_rewriting_leaves_the_capture_as_it_is():
    graph = captured(ignoring)
    before = str(graph.module.graph)
    after = str(rewrite(graph, weigh(graph)).module.graph)
    assert str(graph.module.graph) == before != after
    assert "cross_entropy_loss" in before


@pytest.mark.parametrize("loss", REWRITTEN)
def test_the_weight_of_a_batch_is_found_without_the_model_where_it_needs_none(loss):
    graph = captured(loss)
    rewritten = rewrite(graph, weigh(graph))
    module = weight_of_batch(rewritten)
    if loss is selected:
        assert module is None
    else:
        assert module is not None
        assert float(module(*batch().values())[0]) == float(run(rewritten, batch())[1])


# What needs no rewriting


def mean_of_each(model, batch):
    return each(model, batch).mean()


def of_probabilities(model, batch):
    return cross_entropy(model(batch["x"]), one_hot(batch["whole_label"], CLASSES).double())


def by_size(model, batch):
    return each(model, batch).sum() / batch["x"].shape[0]


def by_ones(model, batch):
    return each(model, batch).sum() / torch.ones_like(batch["x"][:, 0]).sum()


def normalised_input(model, batch):
    return mse_loss(model(batch["x"] / batch["x"].abs().max()), torch.zeros((), dtype=torch.float64).expand(1, 1))


def contrastive(model, batch):
    scores = model(batch["x"]) @ model(batch["x"]).T
    return cross_entropy(scores, torch.arange(len(scores)))


def overlap(model, batch):
    """Dice: both sums depend on the parameters, so that no micro-batch has a weight."""
    chance = each(model, batch).sigmoid()
    return 1 - 2 * (chance * batch["mask"]).sum() / (chance.sum() + batch["mask"].sum())


def test_a_batch_without_values_does_not_tell_what_its_samples_weigh():
    graph = captured(ignoring)
    rewritten = rewrite(graph, weigh(graph))
    fields = read(batch())[1]
    assert sample_weight(rewritten, fields, SAMPLES) == 0.6
    assert sample_weight(rewritten, [field.to("meta") for field in fields], SAMPLES) == 1.0


@pytest.mark.parametrize(
    "loss", [mean_of_each, of_probabilities, by_size, by_ones, normalised_input, contrastive, overlap]
)
def test_a_mean_over_samples_is_weighed_by_samples(loss):
    graph = captured(loss)
    weighing = weigh(graph)
    assert (weighing.weighting, weighing.guards) == ("samples", ())
    assert rewrite(graph, weighing) is graph


def test_a_declared_mean_is_left_alone():
    graph = captured(lambda model, batch: Mean((each(model, batch) * batch["mask"]).sum(), batch["mask"].sum()))
    weighing = weigh(graph)
    assert weighing.weighting == "declared"
    assert rewrite(graph, weighing) is graph


# What cannot be rewritten


def penalised(model, batch):
    return ignoring(model, batch) + model.weight.square().mean()


def test_cross_entropy_beside_another_term_is_guarded():
    graph = captured(penalised)
    weighing = weigh(graph)
    assert weighing.weighting == "samples"
    (guard,) = weighing.guards
    labels = [node.name for node in graph.module.graph.nodes if node.op == "placeholder"][1]
    assert guard == Guard(labels=labels, ignore_index=-100)
    check = check_of_batch(graph, weighing.guards)
    fields = batch()
    fields["label"].clamp_(min=0)
    assert check(list(fields.values())) == ""
    fields["label"][0] = -100
    assert check(list(fields.values())).startswith("a label is -100, which the loss ignores")


def masked_and_penalised(model, batch):
    return masked(model, batch) + model.weight.square().mean()


def weighted_and_penalised(model, batch):
    return with_class_weights(model, batch) + model.weight.square().mean()


def ignoring_another_and_penalised(model, batch):
    return with_another_ignore_index(model, batch) + model.weight.square().mean()


def two_masks(model, batch):
    return torch.stack([masked(model, batch), selected(model, batch)]).mean()


def almost_a_count(model, batch):
    return (each(model, batch) * batch["mask"]).sum() / (batch["mask"].sum() + 1e-8)


def mean_by_count(model, batch):
    return each(model, batch).mean() / batch["mask"].sum()


def inverse(model, batch):
    return (each(model, batch) * batch["mask"]).sum() * (1.0 / batch["mask"].sum())


def squared(model, batch):
    return masked(model, batch).square()


def hidden_in_a_term(model, batch):
    return (each(model, batch) * batch["mask"] / batch["mask"].sum()).sum() + each(model, batch).mean()


def of_numbers(model, batch):
    return torch.where(batch["mask"], each(model, batch), torch.nan).nanmean()


@pytest.mark.parametrize(
    "loss",
    [
        masked_and_penalised, weighted_and_penalised, ignoring_another_and_penalised, two_masks, almost_a_count,
        mean_by_count, inverse, squared, hidden_in_a_term, of_numbers,
    ],
)  # fmt: skip
def test_what_cannot_be_rewritten_is_refused_with_the_lines_to_write(loss):
    refusal = weigh(captured(loss))
    assert isinstance(refusal, Refusal)
    assert "return shardwise.Mean(total, weight)" in refusal.reason
