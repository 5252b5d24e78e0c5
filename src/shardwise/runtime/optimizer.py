"""Make the job's optimizer of the parameters that are here, or say why it cannot serve."""

import inspect
from collections.abc import Mapping

from torch import nn
from torch.optim import Optimizer

from shardwise.errors import PlanError
from shardwise.job import Job


def make_optimizer(job: Job, trained: Mapping[str, nn.Parameter]) -> Optimizer | None:
    """None where nothing is trained here: a factory is not asked for an optimizer of nothing.

    raises:  PlanError where the factory gives no optimizer, or one that wants to evaluate the loss itself
    """
    if not trained:
        return None
    made = job.optimizer(list(trained.items()))
    if not isinstance(made, Optimizer):
        raise PlanError(
            f"Job.optimizer returned {type(made).__name__}, not one torch.optim.Optimizer. A job has one loss, one "
            "backward pass and one optimizer: use parameter groups for several learning rates; train the two sides of "
            "a GAN as two jobs, each with its own loss"
        )
    closure = inspect.signature(type(made).step).parameters.get("closure")
    if closure is not None and closure.default is inspect.Parameter.empty:
        raise PlanError(
            f"{type(made).__name__} evaluates the loss itself, several times a step, which no plan can run; use an "
            "optimizer whose step takes no closure"
        )
    return made
