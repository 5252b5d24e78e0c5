"""What became of one architecture: cut in two stages and compared, run whole with the reason, or failed."""

from dataclasses import dataclass
from typing import TypeAlias, final

from architectures.comparison import (
    MOST_SECONDS,
    InTurn,
    OnTwoRanks,
    assert_agreement,
    compare_in_turn,
    compare_on_two_ranks,
    smallest_stage,
    train,
    two_replicas,
    two_stages,
)
from shardwise.errors import PlanError
from workers import Pool, TaskError

LEAST_SHARE = 0.3  # of the FLOPs, that a stage has


@final
@dataclass(frozen=True, slots=True)
class Cut:
    """An architecture in two stages, the second of which begins at the cut `begins`."""

    name: str
    smallest_stage: float
    begins: str
    in_turn: InTurn
    on_two_ranks: OnTwoRanks

    @property
    def equal(self) -> bool:
        return self.in_turn.equal and self.on_two_ranks.equal

    @property
    def dynamic(self) -> bool:
        """One graph served micro-batches of 3, 3 and 2 samples."""
        return self.in_turn.dynamic and self.on_two_ranks.graphs == 1

    @property
    def good(self) -> bool:
        return self.equal and self.smallest_stage >= LEAST_SHARE

    def __str__(self) -> str:
        return (
            f"{self.name:10}  {'equal' if self.equal else 'DIFFERS'}  {self.smallest_stage:5.1%}  "
            f"{self.in_turn.candidates:2} cuts  {self.in_turn.gradient:7.1e} in turn  "
            f"{self.on_two_ranks.gradient:7.1e} on two ranks (at most {self.in_turn.tolerance:.0e})  "
            f"{'one graph' if self.dynamic else 'NOT DYNAMIC'}  {self.in_turn.capture_seconds:4.1f} s to capture  "
            f"{self.begins}"
        )


@final
@dataclass(frozen=True, slots=True)
class Whole:
    """An architecture that cannot be cut: it ran whole on two replicas, under a plan whose `notes` say why."""

    name: str
    notes: tuple[str, ...]

    good = False

    def __str__(self) -> str:
        return f"{self.name:10}  whole on two replicas; " + "; ".join(self.notes)


@final
@dataclass(frozen=True, slots=True)
class Failed:
    """An architecture that was planned, and did not run."""

    name: str
    story: str

    good = False

    def __str__(self) -> str:
        return f"{self.name:10}  FAILED: {self.story}"


Verdict: TypeAlias = Cut | Whole | Failed


def check(name: str, pool: Pool) -> Verdict:
    try:
        plan = two_stages(name)
    except PlanError:
        return _run_whole(name, pool)
    try:
        in_turn = compare_in_turn(name, plan)
        on_two_ranks = compare_on_two_ranks(name, plan, in_turn.tolerance, pool)
    except (AssertionError, TaskError) as error:
        return Failed(name, str(error))
    return Cut(name, smallest_stage(plan), plan.stages[1].begins, in_turn, on_two_ranks)


def _run_whole(name: str, pool: Pool) -> Whole | Failed:
    plan = two_replicas(name)
    try:
        assert_agreement(pool.run(2, train, name, plan, seconds=MOST_SECONDS))
    except (AssertionError, TaskError) as error:
        return Failed(name, str(error))
    return Whole(name, plan.notes)
