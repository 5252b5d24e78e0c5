"""What can go wrong: every error that a caller may want to catch.

A slip in one call raises Python's own `ValueError` or `TypeError`; these classes are for what a program may handle.
Each message says what is wrong, where, and how to mend it.
"""


class ShardwiseError(Exception):
    """The base of every error below."""


class ClusterError(ShardwiseError):
    """The cluster text or the devices at hand do not give what was asked for."""


class CaptureError(ShardwiseError):
    """The loss cannot be captured as a graph, and the plan that was asked for needs one."""


class PlanError(ShardwiseError):
    """No plan meets what was asked, or a plan does not belong to this job or this world."""


class BatchError(ShardwiseError):
    """A batch cannot be shared out over micro-batches or replicas."""


class ScheduleError(ShardwiseError):
    """A list of actions would wait for ever, or does not compute the step."""


class LossError(ShardwiseError):
    """The loss is of a kind that cannot be trained on: no scalar, no gradient, or a value that is not finite."""


class CheckpointError(ShardwiseError):
    """A checkpoint is not whole, or belongs to another job or plan."""


class LaunchError(ShardwiseError):
    """The processes of a run could not be started, or one of them failed."""
