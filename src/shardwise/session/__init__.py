"""The user's object: a job under way."""

from shardwise.session.options import Options, default_run
from shardwise.session.session import Evaluation, Session, parallelize

__all__ = ["Evaluation", "Options", "Session", "default_run", "parallelize"]
