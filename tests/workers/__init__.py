"""Run the system on several real ranks, and compare it with the reference of its plan."""

from workers.comparison import Errors, assert_equal, errors_of
from workers.grid import Cell, Compared, Outcome, Refused, outcome_of
from workers.layouts import CASES, LAYOUTS, Layout, plan_of
from workers.pool import Pool, TaskError, started_pool
from workers.training import Trained, Training, train

__all__ = [
    "CASES",
    "LAYOUTS",
    "Cell",
    "Compared",
    "Errors",
    "Layout",
    "Outcome",
    "Pool",
    "Refused",
    "TaskError",
    "Trained",
    "Training",
    "assert_equal",
    "errors_of",
    "outcome_of",
    "plan_of",
    "started_pool",
    "train",
]
