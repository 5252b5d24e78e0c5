"""Equal graphs have equal fingerprints, in every process; different graphs have different ones."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from graph.models import FrozenTarget, Gpt, Hooked, Reversed, captured, ids, linear, next_token, numbers

BUILT = {"gpt": Gpt, "reversed": Reversed, "hooked": Hooked, "frozen target": FrozenTarget}


def fingerprints() -> dict[str, str]:
    return {
        name: captured(build(), ids(), next_token).graph.fingerprint
        if build is Gpt
        else captured(build(), numbers(3, 8)).graph.fingerprint
        for name, build in BUILT.items()
    }


def test_another_process_finds_the_same():
    """The text of a custom function held its address."""
    here = Path(__file__).parent.parent
    code = "from graph.test_fingerprint import fingerprints; print(fingerprints())"
    environment = {**os.environ, "PYTHONPATH": str(here), "PYTHONHASHSEED": "7"}
    other = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, env=environment, timeout=120
    )
    assert other.stdout.strip() == str(fingerprints())


def test_sizes_and_weights_make_no_difference_and_ops_do():
    one, other = (captured(Gpt(), ids(samples, 7), next_token).graph.fingerprint for samples in (3, 4))
    assert one == other
    assert captured(Gpt(blocks=2), ids(), next_token).graph.fingerprint != one
    assert len(set(fingerprints().values())) == len(BUILT)


def test_a_number_in_the_loss_makes_a_difference():
    def scaled(factor: float) -> str:
        return captured(linear(), numbers(3, 8), lambda model, x: [factor * model(x).sum()]).graph.fingerprint

    assert scaled(0.5) == scaled(0.5) != scaled(0.25)


def test_what_runs_below_no_grad_makes_a_difference():
    """A region was one op, whatever it held."""

    def aiming_at(factor: float) -> str:
        def loss(model: nn.Module, x: Tensor) -> list[Any]:
            with torch.no_grad():
                target = factor * x
            return [(model(x) - target).square().sum()]

        return captured(linear(), numbers(3, 8), loss).graph.fingerprint

    assert aiming_at(0.5) == aiming_at(0.5) != aiming_at(0.25)
