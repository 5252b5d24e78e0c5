"""The bug reports about what a model is made of: `cases.structure` tells their stories."""

from collections.abc import Mapping
from typing import Any

import pytest
import torch

from shardwise.errors import PlanError
from shardwise.graph import Chain, cut
from workers import CASES, Training, assert_equal, plan_of
from workers.layouts import SEED, TWO_REPLICAS, TWO_SHARDS, TWO_STAGES, sketch_of

WITHOUT_PIPELINE = [pytest.param(TWO_REPLICAS, id="replicas"), pytest.param(TWO_SHARDS, id="shards")]
EACH_WAY = [*WITHOUT_PIPELINE, pytest.param(TWO_STAGES, id="stages")]
CUT_BEFORE_MIDDLE = {"devices": 2, "cuts": ["before middle"], "micro_batches": 2}


def training_of(case: str, asked: Mapping[str, Any], **more: Any) -> Training:
    return Training(case=case, plan=plan_of(case, clip_grad_norm=more.get("clip_grad_norm"), **asked), **more)


def test_01_a_tie_of_first_and_last_stage_stays_a_tie(pool):
    first, last = assert_equal(pool, training_of("01_tied_embedding", CUT_BEFORE_MIDDLE, batches=(8,) * 5))
    assert torch.equal(first.parameters["embedding.weight"], last.parameters["embedding.weight"])


@pytest.mark.parametrize("case", ["02_skip_over_a_stage", "02_skip_from_an_embedding"])
def test_02_a_value_may_skip_a_stage(pool, case):
    assert_equal(pool, training_of(case, {"devices": 3, "cuts": ["before b", "before c"], "micro_batches": 4}))


@pytest.mark.parametrize("stages", [2, 3])
def test_03_nested_skips_are_cut_by_themselves(pool, stages):
    asked = {"devices": stages, "pipeline": stages, "micro_batches": 3}
    assert_equal(pool, training_of("03_nested_skips", asked))


def test_03_a_skip_does_not_pass_through_the_stage_that_it_skips():
    graph = sketch_of("03_nested_skips").graph
    assert isinstance(graph, Chain)
    _, middle, last = cut(graph, [0, graph.cuts["before enc_2"], graph.cuts["after aten.relu.default #4"]])
    skips = {name for name, source in last.sources.items() if source == 0}
    assert len(skips) == 1
    assert not skips & set(middle.inputs)


@pytest.mark.parametrize("asked", WITHOUT_PIPELINE)
def test_04_a_branch_on_a_value_runs_without_a_pipeline(pool, asked):
    assert_equal(pool, training_of("04_branch_on_a_value", asked))


def test_04_a_branch_on_a_value_is_not_cut_and_the_plan_names_its_line():
    with pytest.raises(PlanError, match=r"cannot be cut: .*structure\.py:\d+: if x\.sum\(\) > 0"):
        plan_of("04_branch_on_a_value", **TWO_STAGES)


def test_05_a_first_stage_that_is_frozen_has_no_gradient_to_wait_for(pool):
    asked = {"devices": 2, "cuts": ["before base"], "micro_batches": 2}
    ranks = assert_equal(pool, training_of("05_frozen_first_stage", asked))
    optimized = {name for rank in ranks for step in rank.gradients for name in step}
    assert optimized == {"narrow.weight", "widen.weight"}


@pytest.mark.parametrize("stages", [2, 3])
def test_06_a_dict_passes_between_stages(pool, stages):
    asked = {"devices": stages, "pipeline": stages, "micro_batches": 2}
    assert_equal(pool, training_of("06_dict_between_stages", asked))


@pytest.mark.parametrize("asked", EACH_WAY)
def test_09_the_loss_may_read_the_input_and_two_targets(pool, asked):
    assert_equal(pool, training_of("09_two_targets_and_the_input", asked))


@pytest.mark.parametrize("shards", [2, 3])
def test_17_every_row_of_a_tied_table_moves_that_no_number_of_ranks_divides(pool, shards):
    asked = {"devices": shards, "shards": shards, "micro_batches": 2}
    after = assert_equal(pool, training_of("17_tied_and_uneven", asked))[0].parameters
    torch.manual_seed(SEED)
    before = CASES["17_tied_and_uneven"].model().get_parameter("embedding.weight")
    assert before.shape == (7, 4)
    assert (before != after["embedding.weight"]).any(dim=1).all()
    assert "head.weight" not in after


@pytest.mark.parametrize("case", ["bert", "gpt_tied", "convnet_dropout"])
def test_stages_may_be_sharded(pool, case):
    assert_equal(pool, training_of(case, {"devices": 4, "pipeline": 2, "shards": 2, "micro_batches": 2}))


def test_01_a_tie_of_two_stages_of_one_rank_is_summed_over_replicas_once_it_is_whole(pool):
    """Stages 0 and 2 are on one rank: the last backward of stage 2 does not make the gradient of the tie whole."""
    cuts = [f"before {at}" for at in (1, 2, 3)]
    asked = {"devices": 4, "pipeline": 2, "stages_per_rank": 2, "replicas": 2, "micro_batches": 2, "cuts": cuts}
    training = training_of("01_tie_on_one_rank", asked)
    assert [stage.rank for stage in training.plan.stages] == [0, 1, 0, 1]
    assert_equal(pool, training)
