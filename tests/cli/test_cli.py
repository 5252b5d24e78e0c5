"""The commands: what they print, and how they fail."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

JOB = """
import torch
import shardwise
from torch import nn

def make_job():
    return shardwise.Job(
        model=lambda: nn.Sequential(*(nn.Linear(16, 16) for _ in range(4))).double(),
        loss=lambda model, batch: model(batch).pow(2).mean(),
        optimizer=lambda named: torch.optim.SGD(named, lr=0.1),
        batch_size=8,
    )

def example():
    return torch.randn(8, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
"""


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "train.py"
    path.write_text(JOB)
    return path


def shardwise(*arguments, folder: Path):
    command = [sys.executable, "-m", "shardwise.cli", *map(str, arguments)]
    environment = {**os.environ, "COLUMNS": "120"}
    return subprocess.run(
        command, cwd=folder, capture_output=True, text=True, timeout=120, check=False, env=environment
    )


def test_plan_prints_a_table_and_saves_a_file_that_train_can_take(file, tmp_path):
    found = shardwise(
        "plan", f"{file}:make_job", "--cluster", "2x cpu", "--pipeline", 2, "--save", "p.json", folder=tmp_path
    )
    assert found.returncode == 0, found.stderr
    assert "2 pipeline ranks" in found.stdout
    assert "before 2" in found.stdout
    assert json.loads((tmp_path / "p.json").read_text())["stages"][1]["begins"] == "before 2"


def test_plan_as_json_is_json_alone(file, tmp_path):
    found = shardwise("plan", f"{file}:make_job", "--cluster", "2x cpu", "--json", folder=tmp_path)
    assert json.loads(found.stdout)["replicas"] == 2


def test_verify_compares_every_gradient_with_one_process(file, tmp_path):
    found = shardwise(
        "verify", f"{file}:make_job", "--devices", 2, "--pipeline", 2, "--micro-batches", 3, folder=tmp_path
    )
    assert found.returncode == 0, found.stderr
    assert "equal: loss" in found.stdout
    assert "3.bias" in found.stdout


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["plan", "train.py"], "names no function; write FILE:FUNCTION"),
        (["plan", "nothing.py:make_job"], "there is no file nothing.py"),
        (["plan", "train.py:make_jobs"], "has no function make_jobs()"),
        (["plan", "train.py:make_job", "--cluster", "2x h100"], "h100-80gb"),
        (["plan", "train.py:make_job", "--cluster", "2x cpu", "--pipeline", "9"], "9"),
        (["train", "nothing.py"], "nothing.py"),
    ],
)
def test_a_slip_is_one_paragraph_and_not_a_traceback(file, tmp_path, arguments, words):
    found = shardwise(*arguments, folder=tmp_path)
    assert found.returncode != 0
    assert words in found.stderr
    assert "Traceback" not in found.stderr
    assert len(found.stderr.splitlines()) < 20


def test_help_teaches_each_command():
    found = shardwise("--help", folder=Path.cwd())
    assert {"train", "plan", "verify"} <= set(found.stdout.split())
    assert "resumes from the last checkpoint" in shardwise("train", "--help", folder=Path.cwd()).stdout
