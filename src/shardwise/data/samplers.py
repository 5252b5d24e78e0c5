"""The objects that decide the order of a DataLoader: its samplers and their generators."""

import base64
from collections.abc import Sequence
from typing import Any

import torch
from torch.utils.data import DataLoader

from shardwise.errors import CheckpointError


def samplers(loader: DataLoader[Any]) -> list[Any]:
    """The batch sampler, the sampler, and what they wrap: an iterable may hold others as `sampler`, `batch_sampler`."""
    found: list[Any] = []
    waiting: list[Any] = [loader.batch_sampler, loader.sampler]
    while waiting:
        sampler = waiting.pop(0)
        if sampler is not None and not any(sampler is one for one in found):
            found.append(sampler)
            # Samplers are any iterables: what they hold is convention, not type.
            waiting += [getattr(sampler, name, None) for name in ("batch_sampler", "sampler")]
    return found


def set_epoch(parts: Sequence[Any], epoch: int) -> None:
    """Tell each of `parts` that can be told which epoch begins."""
    for part in parts:
        tell = getattr(part, "set_epoch", None)
        if callable(tell):
            tell(epoch)


def generators(loader: DataLoader[Any]) -> list[torch.Generator]:
    """The loader's generator and those that its samplers hold, each once, in a fixed order."""
    held: list[Any] = [loader.generator]
    for sampler in samplers(loader):
        held += getattr(sampler, "__dict__", {}).values()
    return list(dict.fromkeys(one for one in held if isinstance(one, torch.Generator)))


def generator_states(loader: DataLoader[Any]) -> tuple[str, ...]:
    """The states of its generators, in base64."""
    return tuple(base64.b64encode(one.get_state().numpy().tobytes()).decode("ascii") for one in generators(loader))


def rewind(loader: DataLoader[Any], states: Sequence[str]) -> None:
    """Set its generators to what `generator_states` returned.

    raises:  CheckpointError where it has more of them or fewer
    """
    found = generators(loader)
    if len(found) != len(states):
        raise CheckpointError(
            f"the state of the data holds {len(states)} generators, but the DataLoader and its samplers have "
            f"{len(found)}; make the DataLoader as it was when the state was saved"
        )
    for generator, state in zip(found, states, strict=True):
        generator.set_state(torch.frombuffer(bytearray(base64.b64decode(state)), dtype=torch.uint8))
