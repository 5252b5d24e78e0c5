"""Each example is a whole program: it runs here on two processes, and trains as its one-device twin does.

No example draws random numbers in its loss or couples samples, so every plan gives the losses of the whole batch, up to
the rounding of float32. A few steps are compared: far out, training multiplies any rounding.
"""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"
PROGRAMS = {
    "gpt": ["--steps", "4"],
    "unet": ["--steps", "4"],
    "t5": ["--steps", "4"],
    "own_loop": ["--epochs", "1"],
}
ADDED_LINES = 9
ROUNDING = 2e-5  # of float32, in losses between 1 and 7

each_program = pytest.mark.parametrize("name", PROGRAMS)


@each_program
def test_at_most_nine_lines_are_added_to_the_one_device_program(name: str):
    twins = [EXAMPLES / name / "one_device.py", EXAMPLES / name / "train.py"]
    counted = subprocess.run(
        ["git", "diff", "--no-index", "--numstat", *twins], capture_output=True, text=True, check=False
    )
    assert counted.returncode == 1, counted.stderr  # they differ
    added, removed, _ = counted.stdout.split(maxsplit=2)
    assert int(added) <= ADDED_LINES
    assert int(removed) > 0


@each_program
def test_two_processes_give_the_losses_of_one_device(name: str, tmp_path: Path):
    alone = run([sys.executable, EXAMPLES / name / "one_device.py", *PROGRAMS[name]])
    together = train(name, tmp_path / "run")
    assert_equal_losses(losses(together), losses(alone))
    assert held_out(together) == pytest.approx(held_out(alone), abs=ROUNDING)
    assert json.loads((tmp_path / "run" / "plan.json").read_text())["replicas"] == 2


def test_gpt_in_two_stages_gives_the_losses_of_one_device_and_writes_the_same_text(tmp_path: Path):
    plan = tmp_path / "pipeline.json"
    shardwise("plan", f"{EXAMPLES}/gpt/plan.py:make_job", "--cluster", "2x cpu", "--pipeline", "2", "--save", plan)
    alone = run([sys.executable, EXAMPLES / "gpt" / "one_device.py", *PROGRAMS["gpt"]])
    together = train("gpt", tmp_path / "run", "--plan", plan)
    assert len(json.loads((tmp_path / "run" / "plan.json").read_text())["stages"]) == 2
    assert_equal_losses(losses(together), losses(alone))
    assert len(written(alone)) > 100
    assert written(together)[:100] == written(alone)[:100]


def train(name: str, run_folder: Path, *options: object) -> str:
    printed = [] if name == "own_loop" else ["--json"]  # a loop of one's own prints its steps itself
    return shardwise(
        "train", EXAMPLES / name / "train.py", "--devices", 2, "--run", run_folder, *printed, *options, "--",
        *PROGRAMS[name],
    )  # fmt: skip


def shardwise(*arguments: object) -> str:
    return run([sys.executable, "-m", "shardwise.cli", *arguments])


def run(command: list[object]) -> str:
    done = subprocess.run(
        [str(part) for part in command],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def losses(printed: str) -> list[float]:
    """Of each step, from lines such as "step 1  loss 5.606116" or {"step": 1, "loss": 5.606116, ...}."""
    return [float(value) for value in re.findall(r'"?step"?:? \d+,?  ?"?loss"?:? ([\d.]+)', printed)]


def held_out(printed: str) -> list[float]:
    return [float(value) for value in re.findall(r"held out:?(?: loss)? ([\d.]+)", printed)]


def written(printed: str) -> str:
    """The text that the model wrote, behind the lines of the steps."""
    return re.sub(r'^(step |\{"step").*\n', "", printed, flags=re.MULTILINE)


def assert_equal_losses(found: list[float], expected: list[float]) -> None:
    assert len(expected) >= 4
    assert found == pytest.approx(expected, abs=ROUNDING)
    assert abs(expected[-1] - expected[0]) > 100 * ROUNDING  # the steps do something
