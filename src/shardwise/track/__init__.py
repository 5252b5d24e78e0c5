"""What happened: one report per step, handed to trackers that write, draw or call.

    tracker = all_of(JsonLines(run, resume_step=40), progress(steps=10_000), Callback(function))
    tracker.record(StepReport(step=41, loss=2.3, ...))
    tracker.close()

A tracker that raises is named once on stderr and dropped, and training goes on; one that takes a noticeable share of
the time is named once, too. Only the first rank tracks.
"""

from shardwise.track.json_lines import JsonLines, JsonStream
from shardwise.track.live import LiveLine, PlainLines, progress
from shardwise.track.report import StepReport
from shardwise.track.tensorboard import TensorBoard
from shardwise.track.tracker import Callback, Tracker, all_of

__all__ = [
    "Callback",
    "JsonLines",
    "JsonStream",
    "LiveLine",
    "PlainLines",
    "StepReport",
    "TensorBoard",
    "Tracker",
    "all_of",
    "progress",
]
