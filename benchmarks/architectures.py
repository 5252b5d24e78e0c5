"""How many architectures of transformers train in two stages, as they are, with the gradients of one process.

    OMP_NUM_THREADS=1 python benchmarks/architectures.py [--only NAME ...] [--json]

For each: the smaller stage's share of the FLOPs; how many places may be cut; the largest difference of a gradient from
the reference, as a share of the largest gradient in the model, first with the stages in turn in one process, then over
two steps on two ranks; and whether one graph served micro-batches of 3, 3 and 2 samples. What cannot be cut runs whole
on two replicas, and the line that stands in the way is named.
"""

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from measuring import machine

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))

from architectures import CASES
from architectures.verdicts import Verdict, check
from workers import started_pool


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", metavar="NAME", choices=list(CASES), default=list(CASES))
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(1)
    found: list[Verdict] = []
    with started_pool() as pool:
        for name in options.only:
            found.append(check(name, pool))
            if not options.json:
                print(found[-1], flush=True)
    good = sum(one.good for one in found)
    print(_json(found, good) if options.json else f"{good} of {len(found)} train in two stages, equal to the reference")


def _json(found: Sequence[Verdict], good: int) -> str:
    entries: list[dict[str, Any]] = [
        {"verdict": type(one).__name__.lower(), "good": one.good, **asdict(one)} for one in found
    ]
    return json.dumps({"machine": machine(), "good": good, "architectures": entries}, indent=2)


if __name__ == "__main__":
    main()
