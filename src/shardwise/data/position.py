"""Where in the data a run is, and what lies between two such places: a step."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, final

from shardwise.errors import CheckpointError
from shardwise.job import Batch


@final
@dataclass(frozen=True, slots=True)
class Position:
    """A place in the data, which no number of ranks, micro-batches or workers is part of.

    consumed:     samples of the epoch that steps have had
    fingerprint:  checksum of their indices
    generators:   states that the generators of loader and samplers had when the epoch began
    """

    epoch: int = 0
    consumed: int = 0
    fingerprint: int = 0
    generators: tuple[str, ...] = ()

    def to_state(self) -> dict[str, Any]:
        """It, as JSON can hold it."""
        return {**asdict(self), "generators": list(self.generators)}


@final
@dataclass(frozen=True, slots=True)
class Drawn:
    """One step's worth of data.

    batches:      this rank's micro-batches
    samples:      of the global batch
    fingerprint:  checksum of the indices of the epoch up to the end of this step
    """

    batches: list[Batch]
    samples: int
    fingerprint: int


def from_state(state: Mapping[str, Any]) -> Position:
    """The position that `to_state` wrote.

    raises:  CheckpointError where `state` is something else
    """
    try:
        return Position(
            epoch=int(state["epoch"]),
            consumed=int(state["consumed"]),
            fingerprint=int(state["fingerprint"]),
            generators=tuple(state["generators"]),
        )
    except (KeyError, TypeError, ValueError) as error:
        raise CheckpointError(
            f"{state!r} is no position in the data ({type(error).__name__}: {error}); give what Feed.state() returned"
        ) from error
