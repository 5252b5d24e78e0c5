"""What segments ask of the rank that runs them: numbers alone, for the search to add up."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from math import inf
from typing import final


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """One segment on one kind of device, for micro-batches of one size.

    parameters, gradients, optimizer:  bytes of what it alone reads, gradients and state of the trained ones
    enters:   bytes of activations that cross its start
    made:     bytes that it computes and that are kept for the backward pass
    working:  bytes that it needs beside those for a moment, forward or backward
    """

    forward_seconds: float
    backward_seconds: float
    parameters: int = 0
    gradients: int = 0
    optimizer: int = 0
    enters: int = 0
    made: int = 0
    working: int = 0


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Shared:
    """A parameter that several segments read, by their places: a stage with any of them holds it, once."""

    readers: tuple[int, ...]
    parameters: int
    gradients: int
    optimizer: int


@final
@dataclass(frozen=True, slots=True)
class State:
    """Bytes of the parameters of a stage, of their gradients, and of what the optimizer keeps."""

    parameters: int
    gradients: int
    optimizer: int


@final
class Loads:
    """The loads of all segments, summed up over any stretch of them; a stretch is half-open."""

    def __init__(self, loads: Sequence[Load], shared: Sequence[Shared] = ()) -> None:
        self.each = tuple(loads)
        self.shared = tuple(shared)
        self._forward = [0.0, *accumulate(load.forward_seconds for load in loads)]
        self._backward = [0.0, *accumulate(load.backward_seconds for load in loads)]
        self._made = [0, *accumulate(load.made for load in loads)]
        self._parameters = [0, *accumulate(load.parameters for load in loads)]
        self._gradients = [0, *accumulate(load.gradients for load in loads)]
        self._optimizer = [0, *accumulate(load.optimizer for load in loads)]
        self._most: dict[tuple[int, int], tuple[int, int]] = {}

    def __len__(self) -> int:
        return len(self.each)

    def forward_seconds(self, first: int, last: int) -> float:
        return self._forward[last] - self._forward[first]

    def backward_seconds(self, first: int, last: int) -> float:
        return self._backward[last] - self._backward[first]

    def seconds(self, first: int, last: int) -> float:
        return self.forward_seconds(first, last) + self.backward_seconds(first, last)

    def made(self, first: int, last: int) -> int:
        return self._made[last] - self._made[first]

    def working(self, first: int, last: int) -> int:
        return self._most_of(first, last)[0]

    def largest(self, first: int, last: int) -> int:
        """Bytes of the parameters of the segment that has most of them."""
        return self._most_of(first, last)[1]

    def _most_of(self, first: int, last: int) -> tuple[int, int]:
        found = self._most.get((first, last))
        if found is None:
            own = self.each[first:last]
            found = max(load.working for load in own), max(load.parameters for load in own)
            self._most[first, last] = found
        return found

    @cached_property
    def least_entering(self) -> int:
        return min(load.enters for load in self.each)

    @cached_property
    def least_working(self) -> int:
        return min(load.working for load in self.each)

    @cached_property
    def longest_seconds(self) -> float:
        return max(load.forward_seconds + load.backward_seconds for load in self.each)

    @cached_property
    def usual_entering(self) -> int:
        """The median."""
        return sorted(load.enters for load in self.each)[len(self.each) // 2]

    @cached_property
    def saved_a_second(self) -> float:
        """Bytes that recompute frees at most for each second of forward pass that it takes."""
        return max((load.made / load.forward_seconds for load in self.each if load.forward_seconds), default=inf)

    def state(self, first: int, last: int) -> State:
        here = [one for one in self.shared if any(first <= reader < last for reader in one.readers)]
        return State(
            self._parameters[last] - self._parameters[first] + sum(one.parameters for one in here),
            self._gradients[last] - self._gradients[first] + sum(one.gradients for one in here),
            self._optimizer[last] - self._optimizer[first] + sum(one.optimizer for one in here),
        )
