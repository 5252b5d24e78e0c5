"""What each rank of `shardwise verify` runs: TARGET, a plan file or "", and what to fix of the plan as JSON."""

import json
import os
import sys
from dataclasses import replace
from pathlib import Path

from rich.console import Console
from rich.table import Table

from shardwise.cli.target import load_target
from shardwise.cluster import local_cluster
from shardwise.data import samples_in
from shardwise.plan import Plan, make_plan, report
from shardwise.runtime import Verdict
from shardwise.session import parallelize

SHOWN = 8  # gradients that differ most


def main(target: str, plan_file: str, asked: str) -> int:
    job, example = load_target(target)
    job = replace(job, batch_size=samples_in(example))
    os.environ["SHARDWISE_OUTPUT"] = "none"
    plan: Plan | Path = Path(plan_file)
    if not plan_file:
        plan = make_plan(job, local_cluster(int(os.environ["WORLD_SIZE"])), example, **json.loads(asked))
    with parallelize(job, plan) as session:
        verdict = session.verify(example)
        if verdict is not None:
            console = Console()
            console.print(report(session.plan))
            console.print(_table(verdict))
            console.print(_sentence(verdict))
    # A difference is told by words and by the exit code of rank 0.
    return 1 if verdict is not None and not verdict.equal else 0


def _table(verdict: Verdict) -> Table:
    table = Table("gradient", "difference, of the largest gradient", title=None)
    for each in verdict.differences[:SHOWN]:
        table.add_row(each.name, f"{each.error:.1e}")
    if len(verdict.differences) > SHOWN:
        table.add_row(f"and {len(verdict.differences) - SHOWN} more", f"at most {verdict.differences[SHOWN].error:.1e}")
    return table


def _sentence(verdict: Verdict) -> str:
    losses = f"loss {verdict.loss:.9g}, in one process {verdict.reference_loss:.9g}"
    if verdict.equal:
        return f"equal: {losses}; every gradient within {verdict.tolerance:.0e}"
    return f"NOT EQUAL: {losses}; gradients may differ by {verdict.tolerance:.0e}"


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
