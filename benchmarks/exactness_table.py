"""Print how exactly each model of the zoo trains under each layout, as a table in Markdown or as JSON.

    python benchmarks/exactness_table.py > docs/exactness-table.md

A cell is the largest difference between a plan and its reference after three AdamW steps in float64, of losses,
gradients (as a share of the largest), parameters and buffers; or the reason why there is no such plan.
"""

import argparse
import json
import sys
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))

import torch

import zoo
from workers import LAYOUTS, Cell, Compared, Outcome, Pool, Refused, TaskError, outcome_of, started_pool

Table = Mapping[str, Mapping[str, Outcome | TaskError]]

INTRODUCTION = """\
# Exactness of every plan

Each model of the zoo (`tests/zoo`) under each layout, on 8 samples in ragged micro-batches: 3, 3, 2 of a data rank that
has 8 of them, 2, 1, 1 of one that has 4. *Equal* is against the reference of the plan, plain PyTorch in one process
(`tests/reference.py`), in float64, gradients clipped to a norm of 0.5: losses, norms and each gradient to 1e-11 (of the
largest gradient in the model), parameters and buffers to 1e-10 after three AdamW steps, all copies of a parameter alike
to the last bit. The number is the largest of these differences; the percentage is the share of the FLOPs that the
smallest stage has. Cuts are the planner's; where those balance time so that a stage has less than 15 % of the FLOPs,
they balance FLOPs instead.

Made by `python benchmarks/exactness_table.py > docs/exactness-table.md`.
"""


def main() -> None:
    arguments = _arguments()
    torch.set_num_threads(1)
    with started_pool() as pool:
        table = {case: dict(_row(case, pool)) for case in arguments.cases or zoo.CASES}
    print(json.dumps(_plain(table), indent=2) if arguments.json else _markdown(table))
    if any(not _is_right(outcome) for row in table.values() for outcome in row.values()):
        sys.exit("some cells are neither equal nor refused")


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Print how exactly each model trains under each layout.")
    parser.add_argument("cases", nargs="*", metavar="CASE", help="names of models of the zoo; all without one")
    parser.add_argument("--json", action="store_true", help="print JSON instead of Markdown")
    return parser.parse_args()


def _row(case: str, pool: Pool) -> Iterator[tuple[str, Outcome | TaskError]]:
    for layout in LAYOUTS:
        print(f"{case}, {layout}", file=sys.stderr, flush=True)
        try:
            yield layout, outcome_of(Cell(case=case, layout=layout), pool)
        except TaskError as error:
            yield layout, error


def _is_right(outcome: Outcome | TaskError) -> bool:
    return isinstance(outcome, Refused) or (isinstance(outcome, Compared) and outcome.errors.equal)


def _markdown(table: Table) -> str:
    head = ["model", *LAYOUTS]
    rows = [[case, *(_text(outcome) for outcome in row.values())] for case, row in table.items()]
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join([INTRODUCTION, *(f"| {' | '.join(line)} |" for line in lines), "", _summary(table)])


def _text(outcome: Outcome | TaskError) -> str:
    match outcome:
        case Refused(reason):
            return f"refused: {reason}"
        case Compared(errors, smallest):
            share = f", {smallest:.0%}" if smallest < 1 else ""
            return f"{'equal' if errors.equal else '**differs**'} {errors.largest:.0e}{share}"
        case _:
            return f"**failed**: {str(outcome).strip().splitlines()[-1]}"


def _summary(table: Table) -> str:
    outcomes = [outcome for row in table.values() for outcome in row.values()]
    equal = [outcome for outcome in outcomes if isinstance(outcome, Compared) and outcome.errors.equal]
    cut = [outcome.smallest_stage for outcome in equal if outcome.smallest_stage < 1]
    least = f" The smallest stage of all has {min(cut):.0%} of its model's FLOPs." if cut else ""
    refused = sum(isinstance(outcome, Refused) for outcome in outcomes)
    wrong = len(outcomes) - len(equal) - refused
    return f"{len(table)} models, {len(outcomes)} cells: {len(equal)} equal, {refused} refused, {wrong} wrong.{least}"


def _plain(table: Table) -> dict[str, dict[str, dict[str, object]]]:
    return {case: {layout: _plain_cell(outcome) for layout, outcome in row.items()} for case, row in table.items()}


def _plain_cell(outcome: Outcome | TaskError) -> dict[str, object]:
    match outcome:
        case Refused(reason):
            return {"outcome": "refused", "reason": reason}
        case Compared(errors, smallest):
            verdict = "equal" if errors.equal else "differs"
            return {"outcome": verdict, "errors": asdict(errors), "smallest_stage": smallest}
        case _:
            return {"outcome": "failed", "reason": str(outcome)}


if __name__ == "__main__":
    main()
