"""Gradients of replicas on one machine are summed through memory; the small models of other tests send messages."""

import mmap
import os

import pytest
import torch
from torch import distributed as dist

from shardwise.runtime import host_sum
from workers import Trained, Training, errors_of, plan_of, train
from workers.layouts import TWO_REPLICAS

LENGTHS = [(3 * host_sum.PIECE + 5, torch.float64), (7, torch.bfloat16), (1, torch.float32), (10**6, torch.float32)]


def sums_of_whole_numbers(times: int) -> list[bool]:
    """Whether each sum is that of messages: exactly, for whole numbers need no rounding."""
    group = dist.group.WORLD
    assert group is not None
    shared = host_sum.host_sum(LENGTHS, group)
    assert shared is not None, "the ranks of a test are on one machine"
    generator = torch.Generator().manual_seed(dist.get_rank())
    found = []
    for _ in range(times):
        for tensor in shared.own:
            tensor.copy_(torch.randint(-9, 9, tensor.shape, generator=generator))
        wanted = [tensor.clone() for tensor in shared.own]
        for tensor in wanted:
            dist.all_reduce(tensor)
        shared.sum()
        found += [torch.equal(a, b) for a, b in zip(wanted, shared.own, strict=True)]
    return found


def shares_unless(fault: str) -> bool:
    """Whether ranks share memory where rank 1 cannot."""
    group = dist.group.WORLD
    assert group is not None
    saved = host_sum._processes, os.posix_fallocate, os.memfd_create, mmap.mmap
    if dist.get_rank() == 1 and fault == "another machine":
        host_sum._processes = lambda: "another"
    if dist.get_rank() == 1 and fault == "no room":
        os.posix_fallocate = _no_room
    if dist.get_rank() == 1 and fault == "no such call":
        del os.memfd_create
    if dist.get_rank() == 1 and fault == "too many files":
        mmap.mmap = _no_room
    try:
        return host_sum.host_sum(LENGTHS, group) is not None
    finally:
        host_sum._processes, os.posix_fallocate, os.memfd_create, mmap.mmap = saved


def _no_room(*_: object) -> None:
    raise OSError("nothing left")


def train_through_memory(training: Training) -> Trained:
    least, host_sum.LEAST_BYTES = host_sum.LEAST_BYTES, 1
    try:
        return train(training)
    finally:
        host_sum.LEAST_BYTES = least


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_every_rank_gets_the_sum(pool, ranks):
    assert pool.run(ranks, sums_of_whole_numbers, 3) == [[True] * 3 * len(LENGTHS)] * ranks


@pytest.mark.parametrize("fault", ["another machine", "no room", "no such call", "too many files"])
def test_all_ranks_send_messages_where_one_cannot_share(pool, fault):
    assert pool.run(3, shares_unless, "") == [True] * 3
    assert pool.run(3, shares_unless, fault) == [False] * 3


@pytest.mark.parametrize(
    ("case", "asked"),
    [
        ("bert", TWO_REPLICAS),
        ("bert", {"devices": 4, "pipeline": 2, "replicas": 2, "micro_batches": 4}),
        ("gpt_tied", TWO_REPLICAS),
        ("14_branch_per_step", TWO_REPLICAS),
        ("adapters", TWO_REPLICAS),
    ],
)
def test_replicas_that_share_memory_equal_the_reference(pool, case, asked):
    training = Training(case=case, plan=plan_of(case, **asked))
    errors = errors_of(training, pool.run(training.plan.devices, train_through_memory, training))
    assert errors.equal, errors
