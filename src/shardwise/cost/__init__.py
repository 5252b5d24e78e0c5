"""What it costs: time of segments and messages, memory of ranks, state of optimizers."""

from shardwise.cost.analytic import Analytic
from shardwise.cost.memory import Memory, StageBytes, peak_activations, rank_memory
from shardwise.cost.model import CostModel
from shardwise.cost.optimizer import OptimizerState, probe_optimizer

__all__ = [
    "Analytic",
    "CostModel",
    "Memory",
    "OptimizerState",
    "StageBytes",
    "peak_activations",
    "probe_optimizer",
    "rank_memory",
]
