"""The commands."""

from shardwise.cli.main import main

__all__ = ["main"]
