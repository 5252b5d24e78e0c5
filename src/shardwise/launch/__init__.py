"""Start it everywhere: one process per device, the first cause of a failure first, nothing left behind."""

from shardwise.launch.failure import Died, Failure, Raised, UserLine
from shardwise.launch.outcome import Outcome, describe
from shardwise.launch.start import start_script

__all__ = [
    "Died",
    "Failure",
    "Outcome",
    "Raised",
    "UserLine",
    "describe",
    "start_script",
]
