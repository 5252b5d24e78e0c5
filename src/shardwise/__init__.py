"""Split any PyTorch module over the devices at hand, with the numbers of one device.

job = shardwise.Job(model=..., loss=..., optimizer=..., batch_size=512)
with shardwise.parallelize(job, plan="auto", data=loader) as session:
    for step in session.steps(10_000): ...
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from shardwise.cluster import Cluster, parse_cluster
    from shardwise.errors import ShardwiseError
    from shardwise.job import Job, Mean
    from shardwise.plan import Plan, make_plan
    from shardwise.session import Session, parallelize
    from shardwise.track import StepReport

__version__ = "0.1.0"

__all__ = [
    "Cluster",
    "Job",
    "Mean",
    "Plan",
    "Session",
    "ShardwiseError",
    "StepReport",
    "make_plan",
    "parallelize",
    "parse_cluster",
]

_HOMES = {
    "Cluster": "cluster",
    "Job": "job",
    "Mean": "job",
    "Plan": "plan",
    "Session": "session",
    "ShardwiseError": "errors",
    "StepReport": "track",
    "make_plan": "plan",
    "parallelize": "session",
    "parse_cluster": "cluster",
}


def __getattr__(name: str) -> Any:
    # The launcher imports this package and has no use for torch, which takes two seconds to import.
    if name not in _HOMES:
        raise AttributeError(f"module 'shardwise' has no attribute {name!r}")
    return getattr(import_module(f"shardwise.{_HOMES[name]}"), name)
