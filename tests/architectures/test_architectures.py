"""Architectures of transformers train in two stages as they are, or run whole under a plan that names the line."""

import re

import pytest

from architectures import CASES
from architectures.comparison import two_stages
from architectures.verdicts import LEAST_SHARE, Cut, Whole, check
from shardwise.errors import PlanError
from workers import Pool

ALWAYS = ("gpt2", "t5", "mixtral", "vit")  # ties and dropout; encoder and decoder; experts; images
NOT_CUT = ("wav2vec2",)
CUT = [pytest.param(name, marks=() if name in ALWAYS else pytest.mark.slow) for name in CASES if name not in NOT_CUT]


def test_of_the_22_architectures_at_least_18_are_cut():
    assert len(CASES) == 22
    assert len(CUT) >= 18


@pytest.mark.parametrize("name", CUT)
def test_two_stages_have_30_percent_of_the_flops_each_and_the_gradients_of_the_reference(pool: Pool, name: str):
    found = check(name, pool)
    assert isinstance(found, Cut), found
    assert found.smallest_stage >= LEAST_SHARE
    assert found.equal, found
    assert found.dynamic, found


def test_a_branch_on_the_labels_in_wav2vec2_is_not_cut_and_the_plan_names_its_line():
    with pytest.raises(PlanError) as refused:
        two_stages("wav2vec2")
    assert re.search(
        r"cannot be cut: Python asks for the value of a tensor.* \(transformers/models/wav2vec2/modeling_wav2vec2\.py:"
        r"\d+: if labels is not None and labels\.max\(\) >= self\.config\.vocab_size:\)",
        str(refused.value),
    )


@pytest.mark.slow
def test_wav2vec2_runs_whole_on_two_replicas_under_a_plan_that_says_why(pool: Pool):
    found = check("wav2vec2", pool)
    assert isinstance(found, Whole), found
    assert re.match(r"not cut: Python asks for .*modeling_wav2vec2\.py:\d+: if labels", found.notes[0])
