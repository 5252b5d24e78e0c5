"""A run that is killed and started again ends where the undisturbed run ends."""

import re
import subprocess
import sys
import time
from functools import cache
from itertools import product
from pathlib import Path

import pytest
import torch

from shardwise.checkpoint import load_part, open_latest

SCRIPT = Path(__file__).parent / "resumed.py"
STEPS = 6
QUICK = (2, 1, 4)  # pipeline ranks, rank and step of the kill


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """The parameters that a run ends with, by its pipeline ranks."""

    @cache
    def end(pipeline: int) -> dict[str, list[float]]:
        folder = tmp_path_factory.mktemp("undisturbed")
        found = run(folder, pipeline)
        assert found.returncode == 0, found.stderr
        return parameters(folder)

    return end


@pytest.mark.parametrize(
    ("pipeline", "rank", "step"),
    [
        pytest.param(*each, marks=[] if each == QUICK else pytest.mark.slow)
        for each in product((1, 2), (0, 1), range(1, STEPS))
    ],
)
def test_a_killed_run_is_named_ends_at_once_and_resumes_to_the_same_bits(tmp_path, undisturbed, pipeline, rank, step):
    broken = run(tmp_path / "killed", pipeline, "--kill", f"{rank}:{step}")
    assert broken.returncode == 1
    assert f"rank {rank} of 2" in broken.stderr
    assert "SIGKILL" in broken.stderr
    assert broken.seconds_after_kill < 15
    resumed = run(tmp_path / "killed", pipeline)
    assert resumed.returncode == 0, resumed.stderr
    first = int(re.search(r"rank 0 step (\d+)", resumed.stdout).group(1))
    assert first in (step, step + 1)  # the step of the kill was saved, or its save was still under way
    assert parameters(tmp_path / "killed") == undisturbed(pipeline)


@pytest.mark.slow
def test_another_job_in_the_same_run_folder_is_an_error(tmp_path):
    run(tmp_path, 1)
    script = tmp_path / "other.py"
    script.write_text(SCRIPT.read_text().replace("seed=1", "seed=2"))
    found = run(tmp_path, 1, script=script)
    assert found.returncode == 1
    assert "is of another job (seed: 1 there, 2 here)" in found.stderr
    assert "--fresh" in found.stderr


class Finished:
    def __init__(self, process: subprocess.CompletedProcess[str], seconds: float) -> None:
        self.returncode, self.stdout, self.stderr = process.returncode, process.stdout, process.stderr
        self.seconds_after_kill = seconds


def run(folder: Path, pipeline: int, *arguments: str, script: Path = SCRIPT) -> Finished:
    command = [sys.executable, "-m", "shardwise.cli", "train", str(script), "--devices", "2", "--run", str(folder)]
    command += ["--save-every", "1", "--", "--steps", str(STEPS), "--pipeline", str(pipeline), *arguments]
    process = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
    records = folder / "metrics.jsonl"
    return Finished(process, time.time() - records.stat().st_mtime if records.exists() else 0.0)


def parameters(folder: Path) -> dict[str, list[float]]:
    """Every tensor of the last checkpoint, bit for bit."""
    found = open_latest(folder)
    assert found is not None
    assert found.step == STEPS
    state = {
        name: torch.empty(entry.shape, dtype=entry.dtype)
        for name, entry in found.entries.items()
        if name.startswith(("model/", "optimizer/")) and entry.dtype.is_floating_point
    }
    load_part(found, state)
    return {name: tensor.tolist() for name, tensor in state.items()}
