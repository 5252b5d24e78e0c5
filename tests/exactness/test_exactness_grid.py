"""Every model of the zoo under every layout, against the reference of its plan.

All cells run under `--all`. The quick tier is a covering array: of case, layout, shares and activations, every pair of
values meets in some cell, except that a case meets three of the six layouts: replicas or shards, three stages, and one
of those with two pipeline ranks.
"""

from itertools import combinations, product

import pytest

import zoo
from shardwise.plan import ShardMode
from workers import CASES, LAYOUTS, Cell, Compared, Refused, outcome_of
from workers.grid import LEAST_SHARE_OF_FLOPS, Activations, Shares

REFUSED: dict[tuple[str, str], str] = {}

WITHOUT_PIPELINE = ("2 replicas", "FSDP2 x2")
TWO_RANKS = ("1F1B x2", "interleaved 2x2", "2x2 pipeline x replicas")
SHARD_MODES: tuple[ShardMode, ...] = ("gathered", "regathered")
FORMS: tuple[tuple[Shares, Activations], ...] = (
    ("even", "kept"),
    ("ragged", "recomputed"),
    ("ragged", "kept"),
    ("even", "recomputed"),
)


def every_cell() -> list[Cell]:
    return [
        Cell(case=case, layout=layout, shares=shares, activations=activations, shard_mode=mode)
        for case, layout, (shares, activations) in product(zoo.CASES, LAYOUTS, FORMS)
        for mode in (SHARD_MODES if "shards" in LAYOUTS[layout].asked else (None,))
    ]


def quick_cells() -> list[Cell]:
    cells = []
    for number, case in enumerate(zoo.CASES):
        for place, layout in enumerate((WITHOUT_PIPELINE[number % 2], "GPipe x3", TWO_RANKS[number % 3])):
            shares, activations = FORMS[(number // 2 + place) % 4]
            mode = SHARD_MODES[number // 2 % 2] if layout == "FSDP2 x2" else None
            cells.append(Cell(case=case, layout=layout, shares=shares, activations=activations, shard_mode=mode))
    return cells


QUICK = quick_cells()


def test_the_quick_cells_are_a_covering_array():
    axes = {
        "case": set(zoo.CASES), "layout": set(LAYOUTS), "shares": {"even", "ragged"},
        "activations": {"kept", "recomputed"},
    }  # fmt: skip
    for one, other in combinations(axes, 2):
        met = {(getattr(cell, one), getattr(cell, other)) for cell in QUICK}
        if (one, other) == ("case", "layout"):
            assert len(met) == 3 * len(zoo.CASES)
        else:
            assert met == set(product(axes[one], axes[other]))
    assert {cell.shard_mode for cell in QUICK} == {None, "gathered", "regathered"}


@pytest.mark.parametrize(
    "cell",
    [pytest.param(cell, id=str(cell), marks=[] if cell in QUICK else pytest.mark.slow) for cell in every_cell()],
)
def test_a_plan_equals_its_reference_or_is_refused_with_the_reason(pool, cell):
    outcome = outcome_of(cell, pool)
    if (cell.case, cell.layout) in REFUSED:
        assert isinstance(outcome, Refused)
        assert REFUSED[cell.case, cell.layout] in outcome.reason
    else:
        assert isinstance(outcome, Compared)
        assert outcome.errors.equal, outcome.errors
        assert outcome.smallest_stage >= LEAST_SHARE_OF_FLOPS


def test_what_is_refused_is_little_and_runs_without_a_pipeline():
    assert len(zoo.CASES) >= 24
    for stages in (2, 3):
        layouts = [name for name, layout in LAYOUTS.items() if layout.stages == stages]
        cut = [case for case in zoo.CASES if not any((case, layout) in REFUSED for layout in layouts)]
        assert len(cut) >= 20
    assert {layout for _, layout in REFUSED} <= {name for name, layout in LAYOUTS.items() if layout.stages > 1}
    assert {case for case, _ in REFUSED} <= set(CASES)
