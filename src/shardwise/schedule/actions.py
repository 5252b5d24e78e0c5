"""What a rank of the pipeline does, one action after the other."""

from dataclasses import dataclass
from typing import Literal, TypeAlias

TransferKind: TypeAlias = Literal["batch", "activation", "gradient"]


@dataclass(frozen=True, slots=True, order=True)
class Transfer:
    """One message: all values of one kind that stage `source` gives stage `target` for one micro-batch.

    A value that skips stages goes straight to the stage that uses it. The batch comes from stage 0: its rank loads it.
    """

    kind: TransferKind
    micro_batch: int
    source: int
    target: int

    def __str__(self) -> str:
        return f"{self.kind} {self.micro_batch} from stage {self.source} to stage {self.target}"


@dataclass(frozen=True, slots=True)
class Load:
    """Take the next micro-batch from the data; on the rank of stage 0, before the micro-batch is first used or sent."""

    micro_batch: int

    def __str__(self) -> str:
        return f"load of micro-batch {self.micro_batch}"


@dataclass(frozen=True, slots=True)
class Forward:
    """Compute the stage's outputs for a micro-batch, once every input is there."""

    stage: int
    micro_batch: int

    def __str__(self) -> str:
        return f"forward {self.micro_batch} of stage {self.stage}"


@dataclass(frozen=True, slots=True)
class Backward:
    """Compute the gradients of the stage's inputs and parameters, once those of its outputs are there."""

    stage: int
    micro_batch: int

    def __str__(self) -> str:
        return f"backward {self.micro_batch} of stage {self.stage}"


@dataclass(frozen=True, slots=True)
class Reduce:
    """Start the sum of the stage's gradients over its replicas: they are whole. The rank goes on meanwhile."""

    stage: int

    def __str__(self) -> str:
        return f"reduction of stage {self.stage}"


@dataclass(frozen=True, slots=True)
class Exchange:
    """Start these transfers together, as one group. The rank goes on, and waits only where it needs what it receives.

    The order within `sends` and within `receives` is the order on the wire: channels have no tags.
    """

    sends: tuple[Transfer, ...]
    receives: tuple[Transfer, ...]

    def __str__(self) -> str:
        parts = [f"send {transfer}" for transfer in self.sends] + [f"receive {transfer}" for transfer in self.receives]
        return f"exchange ({', '.join(parts)})"


Compute: TypeAlias = Forward | Backward
Action: TypeAlias = Load | Forward | Backward | Reduce | Exchange
