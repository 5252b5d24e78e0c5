"""What export drops or freezes without a word is right in a pipeline, or is not cut and says which line it is."""

import pytest

from shardwise.errors import PlanError
from workers import Training, assert_equal, plan_of, train
from workers.layouts import TWO_REPLICAS, TWO_SHARDS, TWO_STAGES
from workers.pool import TaskError
from workers.sessions import with_a_number_of_ones_own

ONE_STAGE = {"devices": 1, "micro_batches": 3}


@pytest.mark.parametrize(
    "case", ["gradient_reversal", "hooks", "kl_warm_up", "nested_checkpoint", "parameter_hook", "reentrant_checkpoint"]
)
def test_what_a_graph_can_hold_is_right_under_two_stages(pool, case):
    assert_equal(pool, Training(case=case, plan=plan_of(case, **TWO_STAGES)))


@pytest.mark.parametrize(
    ("case", "reason"),
    [
        ("module_backward_hook", r"module 2 \(Linear\) has a backward hook"),
        ("python_random_branch", r"draws from Python's random generator.*surprises\.py:\d+: if random"),
        ("numpy_random_branch", r"draws from numpy's random generator.*surprises\.py:\d+: if np\.random"),
        ("gradient_penalty", r"runs a backward pass of its own.*surprises\.py:\d+: \(slope,\) = torch\.autograd\.grad"),
    ],
)
def test_what_a_graph_would_lose_is_not_cut_and_the_plan_says_why_and_where(pool, case, reason):
    with pytest.raises(PlanError, match=f"cannot be cut: .*{reason}"):
        plan_of(case, **TWO_STAGES)


@pytest.mark.parametrize(
    "case", ["module_backward_hook", "python_random_branch", "numpy_random_branch", "gradient_penalty"]
)
def test_what_is_not_cut_is_right_with_one_stage_which_notes_the_reason(pool, case):
    assert_equal(pool, Training(case=case, plan=plan_of(case, **ONE_STAGE)))
    assert [note for note in plan_of(case, **ONE_STAGE).notes if note.startswith("not cut: ")]


@pytest.mark.parametrize(
    "case", ["module_backward_hook", "gradient_penalty", "nested_checkpoint", "parameter_hook", "reentrant_checkpoint"]
)
def test_what_draws_nothing_is_right_under_two_replicas(pool, case):
    assert_equal(pool, Training(case=case, plan=plan_of(case, **TWO_REPLICAS)))


def test_a_hook_on_a_parameter_is_refused_under_shards_which_would_lose_it(pool):
    plan = plan_of("parameter_hook", **TWO_SHARDS)
    with pytest.raises(TaskError, match=r"PlanError: .*gradient hook, which sharding would lose"):
        pool.run(2, train, Training(case="parameter_hook", plan=plan))


def test_a_python_number_that_changed_on_one_rank_only_stops_that_rank(pool, tmp_path):
    """The graph holds the number of each rank: stages would compute different losses, and nothing would say so."""
    told = "(?s)rank 1 .*step 1: the Python numbers that the loss reads differ between ranks"
    with pytest.raises(TaskError, match=told):
        pool.run(2, with_a_number_of_ones_own, tmp_path)
