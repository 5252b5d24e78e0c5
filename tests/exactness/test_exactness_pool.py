"""The machinery of these tests: ranks that outlive their tasks, and a comparison that sees a difference."""

import os
import time
from dataclasses import replace

import pytest
import torch
from torch import distributed as dist

from workers import Pool, TaskError, Training, errors_of, plan_of, started_pool, train


def sum_of_ranks() -> float:
    total = torch.tensor([float(dist.get_rank() + 1)])
    dist.all_reduce(total)
    return total.item()


def process_id() -> int:
    return os.getpid()


def fail_on_rank_1() -> None:
    if dist.get_rank() == 1:
        raise RuntimeError("the cause")
    dist.barrier()


def die_on_rank_1() -> None:
    if dist.get_rank() == 1:
        os._exit(3)
    dist.barrier()


def test_tasks_share_processes_and_have_a_process_group_each(pool):
    first, again = pool.run(3, process_id), pool.run(2, process_id)
    assert len(set(first)) == 3
    assert again == first[:2]
    assert pool.run(2, sum_of_ranks) == [3.0, 3.0]
    assert pool.run(3, sum_of_ranks) == [6.0, 6.0, 6.0]


@pytest.mark.parametrize(
    ("task", "story"), [(fail_on_rank_1, "^rank 1 raised(.|\n)*the cause"), (die_on_rank_1, "^rank 1 died")]
)
def test_the_rank_that_failed_first_is_named_and_the_next_task_runs_on_new_ranks(task, story):
    with started_pool() as pool:
        before = pool.run(2, process_id)
        with pytest.raises(TaskError, match=story):
            pool.run(2, task)
        assert not set(pool.run(2, process_id)) & set(before)


def test_a_task_that_hangs_is_ended():
    with started_pool() as pool:
        pool.run(1, process_id)
        with pytest.raises(TaskError, match=r"ranks \[0\] were not done in time"):
            pool.run(1, time.sleep, 30, seconds=0.5)
        assert len(pool.run(1, process_id)) == 1


def test_more_ranks_than_the_pool_has_are_refused(pool):
    with pytest.raises(ValueError, match="5 ranks were asked of a pool of 4"):
        pool.run(5, process_id)


def trained(pool: Pool) -> tuple[Training, list]:
    training = Training(case="padded_loss", plan=plan_of("padded_loss", devices=2, replicas=2, micro_batches=2))
    return training, pool.run(2, train, training)


def test_one_changed_element_of_one_rank_is_a_difference(pool):
    training, ranks = trained(pool)
    assert errors_of(training, ranks).equal
    ranks[1].parameters["head.weight"][0, 0] += 1e-9
    changed = errors_of(training, ranks)
    assert not changed.equal
    assert changed.unlike == ("head.weight",)
    assert changed.parameter == pytest.approx(1e-9, rel=1e-3)


def test_a_plan_differs_from_the_reference_of_a_batch_that_was_not_its_own(pool):
    training, ranks = trained(pool)
    errors = errors_of(replace(training, batches=(8, 8, 7)), ranks)
    assert errors.loss > 1e-4
    assert errors.gradient > 1e-4
    assert not errors.equal


def test_a_gradient_that_is_missing_on_all_ranks_is_no_equality(pool):
    training, ranks = trained(pool)
    for rank in ranks:
        del rank.gradients[2]["head.weight"]
    with pytest.raises(AssertionError):
        errors_of(training, ranks)


def test_a_nan_is_no_equality(pool):
    training, ranks = trained(pool)
    ranks[0].gradients[0]["head.weight"][0, 0] = torch.nan
    assert not errors_of(training, ranks).equal
