"""A schedule: one list of actions per rank, and which stages depend on each other."""

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property, lru_cache

from shardwise.schedule.actions import Action, Backward, Compute, Forward, Load, Reduce, Transfer


@dataclass(frozen=True, slots=True, kw_only=True)
class Links:
    """Which stages need what from which: every pair below is one transfer per micro-batch.

    activations:  (s, t), s < t: stage t uses values that stage s computes
    gradients:    (t, s), s < t: stage t gives back gradients of the values that it had from stage s
    batch:        stages other than 0 that need fields of the batch

    raises:  ValueError where a pair runs the wrong way, or a gradient answers no activation
    """

    activations: frozenset[tuple[int, int]]
    gradients: frozenset[tuple[int, int]]
    batch: frozenset[int] = frozenset()

    def __post_init__(self) -> None:
        for source, target in self.activations:
            if not 0 <= source < target:
                raise ValueError(
                    f"activations go from {source} to {target}; they go from an earlier stage to a later one"
                )
        for source, target in self.gradients:
            if (target, source) not in self.activations:
                raise ValueError(
                    f"gradients go from {source} to {target}, but no activations go from {target} to {source}; "
                    f"add ({target}, {source}) to activations, or drop the gradient"
                )
        if any(stage < 1 for stage in self.batch):
            raise ValueError(f"batch is {sorted(self.batch)}; name only stages after 0, which has the batch already")

    @classmethod
    def chain(cls, stages: int, *, batch: Iterable[int] = ()) -> "Links":
        """Each stage uses what the stage before it computes, and gives its gradient back."""
        return cls(
            activations=frozenset((stage, stage + 1) for stage in range(stages - 1)),
            gradients=frozenset((stage + 1, stage) for stage in range(stages - 1)),
            batch=frozenset(batch),
        )

    def inputs(self, compute: Compute) -> tuple[Transfer, ...]:
        """What the other stages must have given before `compute`, those on the same rank included."""
        return _inputs(self, compute)

    def outputs(self, producer: Load | Compute) -> tuple[Transfer, ...]:
        """What `producer` gives to other stages, those on the same rank included."""
        return _outputs(self, producer)


@lru_cache(maxsize=2**14)  # every action of every step asks
def _inputs(links: Links, compute: Compute) -> tuple[Transfer, ...]:
    stage, micro_batch = compute.stage, compute.micro_batch
    if isinstance(compute, Backward):
        sources = (source for source, target in links.gradients if target == stage)
        return tuple(sorted(Transfer("gradient", micro_batch, source, stage) for source in sources))
    sources = (source for source, target in links.activations if target == stage)
    batch = [Transfer("batch", micro_batch, 0, stage)] if stage in links.batch else []
    return tuple(sorted([*batch, *(Transfer("activation", micro_batch, source, stage) for source in sources)]))


@lru_cache(maxsize=2**14)
def _outputs(links: Links, producer: Load | Compute) -> tuple[Transfer, ...]:
    micro_batch = producer.micro_batch
    match producer:
        case Load():
            return tuple(Transfer("batch", micro_batch, 0, stage) for stage in sorted(links.batch))
        case Forward(stage):
            targets = sorted(target for source, target in links.activations if source == stage)
            return tuple(Transfer("activation", micro_batch, stage, target) for target in targets)
        case Backward(stage):
            targets = sorted(target for source, target in links.gradients if source == stage)
            return tuple(Transfer("gradient", micro_batch, stage, target) for target in targets)


def producer_of(transfer: Transfer) -> Load | Compute:
    """The action after which `transfer` can be sent."""
    match transfer.kind:
        case "batch":
            return Load(transfer.micro_batch)
        case "activation":
            return Forward(transfer.source, transfer.micro_batch)
        case "gradient":
            return Backward(transfer.source, transfer.micro_batch)


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """What each rank of the pipeline does in a step, in order, communication included.

    placement:  the rank of each stage
    ranks:      the actions of each rank

    A list without any Backward only evaluates. Transfers between stages of one rank are local: no Exchange holds them.
    The lists are not checked here; `validate` does.

    raises:  ValueError where counts, placement, links and lists do not fit each other
    """

    name: str
    stages: int
    micro_batches: int
    placement: tuple[int, ...]
    links: Links
    ranks: tuple[tuple[Action, ...], ...]

    def __post_init__(self) -> None:
        if self.stages < 1 or self.micro_batches < 1:
            raise ValueError(f"{self.stages} stages and {self.micro_batches} micro-batches; a step needs one of each")
        if len(self.placement) != self.stages or set(self.placement) != set(range(len(self.ranks))):
            raise ValueError(
                f"placement {self.placement} does not put {self.stages} stages on {len(self.ranks)} ranks; "
                "give one rank per stage, and each rank at least one stage"
            )
        linked = {stage for pair in self.links.activations for stage in pair} | self.links.batch
        if linked and max(linked) >= self.stages:
            raise ValueError(f"links name stage {max(linked)}, but the stages are 0 to {self.stages - 1}")

    @cached_property
    def trains(self) -> bool:
        """Whether anything runs backward."""
        return any(isinstance(action, Backward | Reduce) for actions in self.ranks for action in actions)

    def is_local(self, transfer: Transfer) -> bool:
        """Whether both ends are on one rank, so that nothing is sent."""
        return self.placement[transfer.source] == self.placement[transfer.target]

    def receives_of(self, compute: Compute) -> tuple[Transfer, ...]:
        """What must come from other ranks before `compute`."""
        return tuple(transfer for transfer in self.links.inputs(compute) if not self.is_local(transfer))
