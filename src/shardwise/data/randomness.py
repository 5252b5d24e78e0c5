"""Draws from Python's, numpy's and torch's global generators that depend on a place in the data, not on who draws."""

import hashlib
import random
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Literal, TypeAlias, final

import numpy as np
import torch

Use: TypeAlias = Literal["order", "sample", "collate", "worker"]


def mix(use: Use, seed: int, epoch: int, place: int) -> int:
    """A seed of 63 bits: BLAKE2b, personalised by `use`, over the three numbers as little-endian 64-bit integers.

    place:  of the sample in the epoch; of a worker, its data rank
    """
    message = struct.pack("<3q", seed, epoch, place)
    digest = hashlib.blake2b(message, digest_size=8, person=use.encode()).digest()
    return int.from_bytes(digest, "little") >> 1


def reseed(number: int) -> None:
    """Seed the three global generators; those of accelerators stay as they are."""
    # A hundred times cheaper than torch.manual_seed, which visits every device.
    torch.default_generator.manual_seed(number)
    random.seed(number)
    np.random.seed(number & 0xFFFFFFFF)


@contextmanager
def preserved() -> Iterator[None]:
    """Leave the three global generators as they were found."""
    found = _states()
    try:
        yield
    finally:
        _set_states(found)


@final
class OwnGenerators:
    """Global generators that some code has to itself: inside `entered()` they go on where they were when it ended last.

    So a sampler that is asked for indices now and then draws what it would have drawn in one go after the seed.
    """

    def __init__(self, number: int) -> None:
        with preserved():
            reseed(number)
            self._inside = _states()

    @contextmanager
    def entered(self) -> Iterator[None]:
        with preserved():
            _set_states(self._inside)
            try:
                yield
            finally:
                self._inside = _states()


def _states() -> tuple[Any, ...]:
    return torch.default_generator.get_state(), random.getstate(), np.random.get_state()


def _set_states(states: tuple[Any, ...]) -> None:
    of_torch, of_python, of_numpy = states
    torch.default_generator.set_state(of_torch)
    random.setstate(of_python)
    np.random.set_state(of_numpy)
