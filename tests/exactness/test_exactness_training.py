"""The bug reports about how a model is trained: `cases.training` tells their stories."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

import reference
from workers import CASES, TaskError, Trained, Training, assert_equal, plan_of, surprises, train
from workers.comparison import evaluation_of, reference_of
from workers.counting import count_reductions
from workers.layouts import SEED, TWO_REPLICAS, TWO_SHARDS, TWO_STAGES, adamw
from workers.sessions import (
    EVALUATION_SEED,
    Seen,
    count_hook_calls,
    gradients_left,
    step_of_own_plans,
    train_and_evaluate,
    train_in_parts,
    train_on_shards,
    with_a_sparse_gradient,
)

WITHOUT_PIPELINE = [pytest.param(TWO_REPLICAS, id="replicas"), pytest.param(TWO_SHARDS, id="shards")]
EACH_WAY = [*WITHOUT_PIPELINE, pytest.param(TWO_STAGES, id="stages")]
REGATHERED = pytest.param({**TWO_SHARDS, "shard_mode": "regathered"}, id="regathered")
SMALLER_LAST_BATCH = (
    ("train", 8), ("train", 8), ("train", 6), ("evaluate", 16), ("evaluate", 1), ("train", 8), ("evaluate", 16),
)  # fmt: skip
EVALUATION_FIRST = (("evaluate", 8), ("train", 8), ("evaluate", 8))


def training_of(case: str, asked: Mapping[str, Any], **more: Any) -> Training:
    return Training(case=case, plan=plan_of(case, clip_grad_norm=more.get("clip_grad_norm"), **asked), **more)


def test_07_eight_samples_in_three_micro_batches_are_3_3_2(pool):
    training = training_of("07_odd_micro_batches", TWO_STAGES)
    assert training.sizes(0) == [3, 3, 2]
    assert_equal(pool, training)


@pytest.mark.parametrize("asked", [*EACH_WAY, REGATHERED])
def test_08_batches_may_have_other_sizes_and_so_may_evaluation(pool, asked, tmp_path):
    training = training_of("08_smaller_last_batch", asked, batches=(8, 8, 6, 8))
    ranks = pool.run(2, train_and_evaluate, training.case, training.plan, SMALLER_LAST_BATCH, tmp_path)
    assert_follows(ranks, training, SMALLER_LAST_BATCH)


def test_the_plan_of_the_first_rank_counts_where_each_made_its_own(pool, tmp_path):
    """Here their examples differ in what a sample weighs, which divides the gradients."""
    first, second = pool.run(2, step_of_own_plans, tmp_path)
    torch.manual_seed(0)
    model = surprises.layers()
    loss = model(torch.ones(8, surprises.FEATURES).double())[0].square().mean()
    loss.backward()
    assert first.losses == second.losses == [pytest.approx(float(loss))]
    for name, parameter in model.named_parameters():
        wanted = parameter.detach() - 0.1 * parameter.grad
        for rank in (first, second):
            torch.testing.assert_close(rank.parameters[name], wanted, rtol=0, atol=1e-12)


def test_10_stages_are_clipped_by_the_norm_of_the_whole_model(pool):
    asked = {"devices": 2, "cuts": ["before middle"], "micro_batches": 2}
    ranks = assert_equal(pool, training_of("10_clip_across_stages", asked, clip_grad_norm=0.5))
    assert min(ranks[0].grad_norms) > 0.5


def test_11_each_parameter_is_reduced_once_a_step_however_many_micro_batches(pool):
    asked = {"devices": 4, "pipeline": 2, "replicas": 2, "micro_batches": 4}
    training = training_of("bert", asked, batches=(16,) * 3)
    assert training.sizes(0) == [2] * 8
    ranks = assert_equal(pool, training)
    elements = [sum(parameter.numel() for parameter in rank.parameters.values()) for rank in ranks]
    assert pool.run(4, count_reductions, training) == [[held] * 3 for held in elements]


@pytest.mark.parametrize("asked", WITHOUT_PIPELINE)
def test_12_a_hook_runs_once_a_micro_batch(pool, asked, tmp_path):
    plan = plan_of("12_hook_on_a_boundary", **asked)
    assert pool.run(2, count_hook_calls, "12_hook_on_a_boundary", plan, 5, tmp_path) == [[10], [10]]


def test_12_a_hook_on_a_boundary_of_stages_runs_once_a_micro_batch(pool, tmp_path):
    plan = plan_of("12_hook_on_a_boundary", devices=2, cuts=["before second.layer"], micro_batches=3)
    calls = pool.run(2, count_hook_calls, "12_hook_on_a_boundary", plan, 5, tmp_path)
    assert sorted(calls) == [[0], [15]]


@pytest.mark.parametrize("asked", EACH_WAY)
def test_13_evaluation_may_come_first_and_reads_batch_norm_without_writing(pool, asked, tmp_path):
    training = training_of("13_evaluate_first", asked, batches=(8,))
    ranks = pool.run(2, train_and_evaluate, training.case, training.plan, EVALUATION_FIRST, tmp_path)
    assert_follows(ranks, training, EVALUATION_FIRST)


@pytest.mark.parametrize("asked", EACH_WAY)
def test_13_evaluation_leaves_no_gradient(pool, asked, tmp_path):
    plan = plan_of("13_evaluate_first", **asked)
    assert pool.run(2, gradients_left, "13_evaluate_first", plan, tmp_path) == [[], []]


@pytest.mark.parametrize("asked", WITHOUT_PIPELINE)
@pytest.mark.parametrize("case", ["14_branch_per_step", "14_head_called_again"])
def test_14_data_ranks_may_take_other_branches(pool, case, asked):
    training = training_of(case, asked, seeds="by step and data rank", batches=(8,) * 4)
    assert len({batch["times"] for batch in training.micro_batches(1)}) == 2
    assert_equal(pool, training)


@pytest.mark.parametrize("asked", EACH_WAY)
@pytest.mark.parametrize("case", ["14_branch_per_step", "14_head_called_again"])
def test_14_steps_may_take_other_branches(pool, case, asked):
    assert_equal(pool, training_of(case, asked, batches=(8,) * 4))


@pytest.mark.parametrize("asked", EACH_WAY)
def test_15_a_checkpointed_head_runs_twice_and_a_parameter_only_every_other_step(pool, asked):
    assert_equal(pool, training_of("15_called_twice_checkpointed", asked, batches=(8,) * 4))


@pytest.mark.parametrize("asked", EACH_WAY)
def test_16_recomputed_dropout_drops_what_it_dropped(pool, asked):
    kept, recomputed = (
        assert_equal(pool, training_of(case, asked)) for case in ("16_dropout_kept", "16_dropout_recomputed")
    )
    assert_same_gradients(kept, recomputed)


def test_16_dropout_that_the_plan_recomputes_drops_what_it_dropped(pool):
    kept = training_of("16_dropout_kept", {**TWO_STAGES, "recompute": False})
    recomputed = training_of("16_dropout_kept", {**TWO_STAGES, "recompute": True})
    assert [bool(stage.recompute) for stage in kept.plan.stages] == [False, False]
    assert [bool(stage.recompute) for stage in recomputed.plan.stages] == [True, True]
    assert_same_gradients(assert_equal(pool, kept), assert_equal(pool, recomputed))


@pytest.mark.parametrize("asked", EACH_WAY)
def test_16_dropout_goes_on_after_a_resume_as_it_would_have(pool, asked, tmp_path):
    plan = plan_of("16_dropout_recomputed", **asked)
    through, resumed = (
        pool.run(2, train_in_parts, "16_dropout_recomputed", plan, stops, tmp_path / str(len(stops)))
        for stops in ([4], [2, 4])
    )
    for one, other in zip(through, resumed, strict=True):
        assert len(one.losses) == 4
        assert one.losses == other.losses
        assert all(torch.equal(value, other.parameters[name]) for name, value in one.parameters.items())


@pytest.mark.parametrize("source", ["indexed", "stream"])
@pytest.mark.parametrize("asked", [*WITHOUT_PIPELINE, REGATHERED])
@pytest.mark.parametrize("name", ["07_odd_micro_batches", "padded_loss"])
def test_18_thirteen_samples_on_two_ranks_are_each_seen_once(pool, asked, source, name, tmp_path):
    """Batches of 4 in micro-batches of 2, one a rank; the last sample is alone, and shards run it twice."""
    case, sizes = CASES[name], [[2, 2], [2, 2], [2, 2], [1]]
    plan = replace(plan_of(name, **{**asked, "micro_batches": 1}), batch_size=4)
    ranks = pool.run(2, train_on_shards, case.name, plan, source, (7, 3, 3), 4, tmp_path)
    batches = iter(case.micro_batches([size for step in sizes for size in step], 0))
    in_steps = [[next(batches) for _ in step] for step in sizes]
    assert_seen(ranks, reference.run(case.model, case.loss, in_steps, sizes, adamw, seed=SEED, random="torch"))


def test_18_a_first_batch_that_is_too_small_for_shards_is_refused_on_every_rank(pool):
    training = training_of("07_odd_micro_batches", TWO_SHARDS, batches=(1,))
    with pytest.raises(TaskError, match="a first batch of 1 samples leaves one of 2 data ranks without any"):
        pool.run(2, train, training)


def assert_follows(ranks: Sequence[Seen], training: Training, script: Sequence[tuple[str, int]]) -> None:
    evaluations, steps = [], 0
    for verb, samples in script:
        steps += verb == "train"
        if verb == "evaluate":
            trained = replace(training, batches=training.batches[:steps])
            evaluations.append(evaluation_of(trained, samples, EVALUATION_SEED))
    for rank in ranks:
        assert rank.evaluations == pytest.approx(evaluations, rel=0, abs=1e-11)
    assert_seen(ranks, reference_of(training))


def assert_seen(ranks: Sequence[Seen], expected: reference.Result) -> None:
    assert {name for rank in ranks for name in rank.parameters} == expected.parameters.keys()
    for rank in ranks:
        assert rank.losses == pytest.approx(expected.losses, rel=0, abs=1e-11)
        for name, value in rank.parameters.items():
            assert (value - expected.parameters[name]).abs().max() <= 1e-10, name


def assert_same_gradients(some: Sequence[Trained], others: Sequence[Trained]) -> None:
    """To the last bit."""
    for one, other in zip(some, others, strict=True):
        for step, again in zip(one.gradients, other.gradients, strict=True):
            assert step.keys() == again.keys()
            assert all(torch.equal(value, again[name]) for name, value in step.items() if value is not None)


def test_a_sparse_gradient_under_replicas_says_what_to_change(pool, tmp_path):
    with pytest.raises(
        TaskError, match=r"PlanError: weight has a sparse gradient, .*make its module with sparse=False"
    ):
        pool.run(2, with_a_sparse_gradient, tmp_path)
