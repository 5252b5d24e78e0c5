"""Who runs what: plans, and how they are made."""

from shardwise.plan.cuts import positions
from shardwise.plan.files import load, save
from shardwise.plan.make import make_plan
from shardwise.plan.plan import Alternative, Plan, ScheduleName, ShardMode, Stage, share_out
from shardwise.plan.report import report
from shardwise.plan.weighting import Guard, Weighing, rewrite, weigh

__all__ = [
    "Alternative",
    "Guard",
    "Plan",
    "ScheduleName",
    "ShardMode",
    "Stage",
    "Weighing",
    "load",
    "make_plan",
    "positions",
    "report",
    "rewrite",
    "save",
    "share_out",
    "weigh",
]
