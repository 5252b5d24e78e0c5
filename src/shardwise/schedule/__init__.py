"""In which order: what each rank does in a step, as data that can be checked, simulated, drawn and run."""

from shardwise.schedule import actions
from shardwise.schedule.checks import validate
from shardwise.schedule.costs import Costs, StageCosts
from shardwise.schedule.lists import Links, Schedule
from shardwise.schedule.orders import forward_only, gpipe, interleaved_one_f_one_b, one_f_one_b
from shardwise.schedule.pictures import draw, show
from shardwise.schedule.timeline import Timeline, simulate
from shardwise.schedule.transport import Transport, in_memory_transports

__all__ = [
    "Costs",
    "Links",
    "Schedule",
    "StageCosts",
    "Timeline",
    "Transport",
    "actions",
    "draw",
    "forward_only",
    "gpipe",
    "in_memory_transports",
    "interleaved_one_f_one_b",
    "one_f_one_b",
    "show",
    "simulate",
    "validate",
]
