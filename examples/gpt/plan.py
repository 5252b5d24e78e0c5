"""What `shardwise plan` asks of a file: functions that return a Job, and an example batch.

shardwise plan examples/gpt/plan.py:make_job --cluster "2x cpu" --pipeline 2 --save pipeline.json
shardwise plan examples/gpt/plan.py:make_large_job --cluster "2x 8x h100-80gb"
"""

from dataclasses import replace
from functools import partial

from torch import Tensor
from train import GPT, make_job, windows

import shardwise

__all__ = ["example", "make_job", "make_large_job"]


def make_large_job() -> shardwise.Job:
    """The same program with 12.6 billion parameters."""
    large = partial(GPT, width=5120, layers=40, heads=40)
    return replace(make_job(), model=large, batch_size=512, precision="bf16")


def example() -> Tensor:
    return windows()[:2]
