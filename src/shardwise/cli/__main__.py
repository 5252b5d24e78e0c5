"""`python -m shardwise.cli`, the same as `shardwise`."""

from shardwise.cli import main

main()
