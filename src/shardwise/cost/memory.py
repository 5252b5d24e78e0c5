"""Memory of one rank of the pipeline, from the list of actions that it will run."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Literal, final

from shardwise.schedule.actions import Action, Backward, Forward


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class StageBytes:
    """What one stage keeps.

    parameters:      of the whole stage, before sharding
    gradients:       of the trained ones
    optimizer:       state of the trained ones
    largest:         parameters of the largest segment, which are gathered at a time
    activations:     kept of one micro-batch from its forward to its backward, inputs of the stage included
    working:         needed for a moment only: what a recomputed segment saves
    sent:            outputs of one micro-batch, held until they have been received
    """

    parameters: int
    gradients: int
    optimizer: int
    largest: int
    activations: int
    working: int
    sent: int


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Memory:
    """Bytes at the peak of a step."""

    parameters: int
    gradients: int
    optimizer: int
    activations: int
    buffers: int

    @property
    def total(self) -> int:
        return sum(getattr(self, field.name) for field in fields(self))


def rank_memory(
    stages: Mapping[int, StageBytes],
    actions: Sequence[Action],
    shards: int,
    shard_mode: Literal["gathered", "regathered"],
) -> dict[int, Memory]:
    """The memory of each stage of one rank, at the moment when activations take most.

    stages:      those of this rank, by number
    actions:     its list in the schedule
    shards:      ranks that hold one copy of parameters, gradients and state between them
    shard_mode:  "regathered": parameters are whole only while they are used; else whole, with their gradients, for the
                 step
    """
    peak = peak_activations({number: stage.activations for number, stage in stages.items()}, actions)
    return {
        number: _memory(stage, peak[number], shards, shard_mode == "regathered") for number, stage in stages.items()
    }


def peak_activations(sizes: Mapping[int, int], actions: Sequence[Action]) -> dict[int, int]:
    """Bytes of activations of each stage at the moment when all together are largest.

    sizes:  bytes of one micro-batch, by stage
    """
    held = dict.fromkeys(sizes, 0)
    peak = dict(held)
    for action in actions:
        if isinstance(action, Forward):
            held[action.stage] += sizes[action.stage]
            peak = max(peak, dict(held), key=lambda state: sum(state.values()))
        elif isinstance(action, Backward):
            held[action.stage] -= sizes[action.stage]
    return peak


def _memory(stage: StageBytes, activations: int, shards: int, regathered: bool) -> Memory:
    parameters, gradients = _share(stage.parameters, shards), _share(stage.gradients, shards)
    if shards > 1 and regathered:
        parameters += 2 * stage.largest  # the one in use, and the next one on its way
        gradients += stage.largest
    elif shards > 1:
        parameters += stage.parameters
        gradients += stage.gradients
    return Memory(
        parameters=parameters,
        gradients=gradients,
        optimizer=_share(stage.optimizer, shards),
        activations=activations + stage.working,
        buffers=stage.sent,
    )


def _share(size: int, shards: int) -> int:
    return -(-size // shards)
