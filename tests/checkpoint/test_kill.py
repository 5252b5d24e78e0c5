"""SIGKILL at a random instant of a save: what was published stays the latest, whole."""

import os
import random
import re
import time
from multiprocessing.connection import Connection
from pathlib import Path

import pytest
import torch
from checkpoint_world import processes

from shardwise.checkpoint import load, open_latest, save

SIZE = 300_000


def save_for_ever(run: Path, start: int, pipe: Connection) -> None:
    torch.set_num_threads(1)
    for step in range(start, 100_000):
        state = {f"model/{i}": torch.full((SIZE,), float(step)) for i in range(4)}
        save(run, step, state, {"step": step}, keep=2)
        pipe.send(step)


def save_one_step_for_ever(run: Path, start: int, pipe: Connection) -> None:
    torch.set_num_threads(1)
    for count in range(start, 100_000):
        save(run, 7, {f"model/{i}": torch.full((SIZE,), float(count)) for i in range(4)}, {"step": count})
        pipe.send(count)


@pytest.mark.parametrize("saver", [save_for_ever, save_one_step_for_ever])
def test_killed_at_twelve_random_instants_the_last_published_one_is_whole(tmp_path: Path, saver):
    instants = random.Random(5)
    published, caught_in_a_save = 0, 0
    for _ in range(12):
        published = kill_while_saving(tmp_path, saver, published + 1, instants.uniform(0.0, 0.06))
        caught_in_a_save += any(name.startswith(".saving-") for name in os.listdir(tmp_path / "checkpoints"))
        checkpoint = open_latest(tmp_path)
        assert checkpoint is not None
        assert checkpoint.skipped == ()
        state = {f"model/{i}": torch.zeros(SIZE) for i in range(4)}
        step = load(checkpoint, state)["step"]
        # The kill may fall between the rename and the message: then one more is published than was told.
        assert step in (published, published + 1)
        assert all(torch.equal(value, torch.full((SIZE,), float(step))) for value in state.values())
        published = step
    assert caught_in_a_save >= 3  # else the instants missed what they are for
    save(tmp_path, 100_000, {}, {})
    assert all(re.fullmatch(r"step-\d{8}", name) for name in os.listdir(tmp_path / "checkpoints"))


def kill_while_saving(run: Path, saver, start: int, seconds_after_a_save: float) -> int:
    """Kill a process that saves one checkpoint after another; the last step that it told of."""
    ours, theirs = processes.Pipe()
    process = processes.Process(target=saver, args=(run, start, theirs))
    process.start()
    theirs.close()
    told = ours.recv()
    time.sleep(seconds_after_a_save)
    process.kill()
    process.join()
    try:
        while True:
            told = ours.recv()
    except EOFError:
        return told
