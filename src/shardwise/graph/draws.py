"""Random numbers that depend on the sample's place, not on who draws them.

Each random op of a graph is seeded from (seed, step, global micro-batch, occurrence), so that no cut, replica, schedule
or recomputation changes what it draws.
"""

import hashlib
import struct
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, final

import torch
from torch.utils._python_dispatch import TorchDispatchMode

WHOLE = -1  # the occurrence that seeds a module run as it is: once, before its forward pass


def mix(seed: int, step: int, micro_batch: int, occurrence: int) -> int:
    """The seed of one draw: 63 bits of BLAKE2b over the four numbers as little-endian 64-bit integers."""
    digest = hashlib.blake2b(struct.pack("<4q", seed, step, micro_batch, occurrence), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


@final
@dataclass(frozen=True, slots=True)
class Draws:
    """Seeds the draws of one micro-batch.

    micro_batch:  its number in the step, over all replicas
    device:       whose generator the ops draw from
    """

    seed: int
    step: int
    micro_batch: int
    device: torch.device

    def at(self, occurrence: int) -> None:
        """Let the next random op draw as number `occurrence`."""
        number = mix(self.seed, self.step, self.micro_batch, occurrence)
        # A hundred times cheaper than torch.manual_seed, which visits every device.
        torch.default_generator.manual_seed(number)
        if self.device.type == "cuda":
            torch.cuda.default_generators[self.device.index or 0].manual_seed(number)


def seeded(function: Callable[..., Any], first: int) -> Callable[..., Any]:
    """`function` as one that takes `Draws` first; its random ops draw as `first`, `first + 1`, and so on."""

    def run(draws: Draws, *args: Any, **kwargs: Any) -> Any:
        with seeding(draws, first):
            return function(*args, **kwargs)

    run.__name__ = run.__qualname__ = f"seeded_{first}"
    return run


def seeding(draws: Draws, first: int = 0) -> AbstractContextManager[Any]:
    """Within it, every random op draws by its number: `first`, `first + 1`, and so on."""
    return _Seeding(draws, first)


@final
class _Seeding(TorchDispatchMode):
    def __init__(self, draws: Draws, first: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch's class has no types
        self._draws = draws
        self._next = first

    def __torch_dispatch__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if torch.Tag.nondeterministic_seeded in function.tags:
            self._draws.at(self._next)
            self._next += 1
        return function(*args, **(kwargs or {}))
