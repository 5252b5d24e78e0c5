from collections.abc import Callable
from pathlib import Path
from textwrap import dedent

import pytest

ALL_REDUCE_FOR_EVER = """
import os, signal, sys
import torch
import torch.distributed as dist

dist.init_process_group("gloo")
rank, action = dist.get_rank(), sys.argv[1]
for step in range(10**9):
    if step == 20 and action == f"kill {rank}":
        os.kill(os.getpid(), signal.SIGKILL)
    if step == 20 and action == f"raise {rank}":
        raise ValueError("bad sample")
    if step == 20 and rank == 0:
        open(sys.argv[2], "w").close()
    dist.all_reduce(torch.ones(4))
"""


@pytest.fixture
def script(tmp_path) -> Callable[[str], Path]:
    def write(source: str) -> Path:
        path = tmp_path / "train.py"
        path.write_text(dedent(source))
        return path

    return write


@pytest.fixture
def all_reduce_for_ever(script) -> Path:
    """A script of two arguments: what to do at step 20 ("kill 1", "raise 0"), and a file to make when it gets there."""
    return script(ALL_REDUCE_FOR_EVER)
