"""One cell of the grid: a case under a layout, recomputed or not, with even or ragged micro-batches."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias, final

from shardwise.errors import PlanError
from shardwise.plan import Plan, ShardMode
from workers.comparison import Errors, errors_of
from workers.layouts import LAYOUTS, cuts_by_flops, plan_of, smallest_stage
from workers.pool import Pool
from workers.training import Training, train

Shares: TypeAlias = Literal["even", "ragged"]
Activations: TypeAlias = Literal["kept", "recomputed"]

LEAST_SHARE_OF_FLOPS = 0.15
CLIP_GRAD_NORM = 0.5  # below most norms of the zoo, so that most steps are clipped


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """shard_mode:  None where there are no shards"""

    case: str
    layout: str
    shares: Shares = "ragged"
    activations: Activations = "kept"
    shard_mode: ShardMode | None = None

    def __str__(self) -> str:
        mode = f", {self.shard_mode}" if self.shard_mode else ""
        return f"{self.case}, {self.layout}, {self.shares}, {self.activations}{mode}"

    def plan(self) -> Plan:
        """As the planner cuts; but by FLOPs alone where that leaves a stage with too few to be a real one.

        The planner balances time, of which reading memory is a large part in models as small as these.

        raises:  PlanError where the case cannot be planned so
        """
        plan = self._plan(None)
        if smallest_stage(plan) >= LEAST_SHARE_OF_FLOPS:
            return plan
        return self._plan(cuts_by_flops(self.case, len(plan.stages)))

    def _plan(self, cuts: Sequence[str] | None) -> Plan:
        layout = LAYOUTS[self.layout]
        return plan_of(
            self.case,
            devices=layout.devices,
            clip_grad_norm=CLIP_GRAD_NORM,
            **layout.asked,
            micro_batches=layout.even if self.shares == "even" else layout.ragged,
            recompute=self.activations == "recomputed",
            shard_mode=self.shard_mode,
            cuts=cuts,
        )


@final
@dataclass(frozen=True, slots=True)
class Refused:
    reason: str


@final
@dataclass(frozen=True, slots=True)
class Compared:
    """smallest_stage:  its share of the FLOPs"""

    errors: Errors
    smallest_stage: float


Outcome: TypeAlias = Refused | Compared


def outcome_of(cell: Cell, pool: Pool) -> Outcome:
    """Plan the cell, train it and compare; or the reason why it cannot be planned.

    raises:  TaskError where a rank fails, though there was a plan
    """
    try:
        plan = cell.plan()
    except PlanError as error:
        return Refused(str(error))
    training = Training(case=cell.case, plan=plan, clip_grad_norm=CLIP_GRAD_NORM)
    ranks = pool.run(plan.devices, train, training)
    return Compared(errors_of(training, ranks), smallest_stage(plan))
