"""Less than single precision, on every layout: the numbers of autocast on one device, one loss scale for all ranks."""

from collections.abc import Mapping
from functools import partial
from typing import Any

import pytest
import torch

from workers import surprises
from workers.layouts import TWO_REPLICAS, TWO_SHARDS, TWO_STAGES
from workers.sessions import divided_by_zero, single, train_in_precision

LAYOUTS = [
    pytest.param(TWO_REPLICAS, id="replicas"),
    pytest.param(TWO_SHARDS, id="shards"),
    pytest.param({**TWO_SHARDS, "shard_mode": "regathered"}, id="regathered"),
    pytest.param({**TWO_STAGES, "micro_batches": 4}, id="stages"),
]
# Of the largest parameter, after three steps: about ten units in the last place of what autocast rounds to.
TOLERANCE = {"bf16": 2e-3, "fp16": 2e-4}
STEPS = 3


@pytest.mark.parametrize("asked", LAYOUTS)
@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_every_layout_trains_as_autocast_on_one_device(pool, asked: Mapping[str, Any], precision, tmp_path):
    asked = {name: value for name, value in asked.items() if name != "devices"}
    batches = [tuple(each.float() for each in batch_of(step)) for step in range(STEPS)]
    ranks = pool.run(2, train_in_precision, precision, asked, batches, tmp_path)
    losses, wanted = by_hand(batches, {"bf16": torch.bfloat16, "fp16": torch.float16}[precision])
    start = dict(single_from_seed().named_parameters())
    for rank in ranks:
        assert rank.losses == pytest.approx(losses, rel=TOLERANCE[precision])
        for name, parameter in rank.parameters.items():
            assert parameter.dtype == torch.float32
            moved = (wanted[name] - start[name]).abs().max()
            assert (parameter - wanted[name]).abs().max() <= 10 * TOLERANCE[precision] * moved, name


@pytest.mark.parametrize("asked", LAYOUTS)
def test_a_loss_that_is_a_sum_over_many_terms_overflows_fp16_no_sooner_than_its_mean(pool, asked, tmp_path):
    asked = {name: value for name, value in asked.items() if name != "devices"}
    batches = [tuple(each.float() for each in batch_of(step)) for step in range(STEPS)]
    sums, means = (
        pool.run(2, partial(train_in_precision, as_sum=as_sum), "fp16", asked, batches, tmp_path / str(as_sum))
        for as_sum in (True, False)
    )
    assert sums[0].losses == pytest.approx(means[0].losses, rel=1e-5)
    assert sums[0].losses[-1] != sums[0].losses[0]


def test_a_division_by_zero_in_the_second_stage_is_told_on_both_ranks_and_changes_nothing(pool, tmp_path):
    for told, kept in pool.run(2, divided_by_zero, tmp_path):
        assert "the loss of step 1 is" in told
        assert 'come out of "last.0" on rank 1, micro-batch 2' in told
        assert kept


def batch_of(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    samples = [surprises.pair_sample(step, index) for index in range(8)]
    inputs, targets = zip(*samples, strict=True)
    return torch.stack(inputs), torch.stack(targets)


def single_from_seed() -> torch.nn.Module:
    torch.manual_seed(0)
    return single()


def by_hand(batches, dtype: torch.dtype) -> tuple[list[float], Mapping[str, torch.Tensor]]:
    """A micro-batch of 2 samples at a time, as all layouts have them; the loss scale is a power of two, so exact."""
    model = single_from_seed()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for inputs, targets in batches:
        total = 0.0
        for part in zip(inputs.split(2), targets.split(2), strict=True):
            with torch.autocast("cpu", dtype):
                loss = surprises.distance(model, part) / 4
            (loss * 2.0**16).backward()
            total += float(loss.detach())
        for parameter in model.parameters():
            assert parameter.grad is not None
            parameter.grad /= 2.0**16
        losses.append(total)
        optimizer.step()
        optimizer.zero_grad()
    return losses, {name: parameter.detach() for name, parameter in model.named_parameters()}
