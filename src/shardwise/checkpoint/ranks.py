"""Act together: what fails on one rank is the same error on all, so that none waits for ever."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Generic, TypeVar, final

import torch.distributed as dist

from shardwise.errors import CheckpointError

T = TypeVar("T")


def ranks_of(group: dist.ProcessGroup | None) -> "Ranks":
    """The ranks of `group`; None is all ranks of the job, or this process alone where there is no process group."""
    if not (dist.is_available() and dist.is_initialized()):
        return Ranks(group=None, rank=0, size=1)
    return Ranks(group=group, rank=dist.get_rank(group), size=dist.get_world_size(group))


@final
@dataclass(frozen=True, slots=True)
class Ranks:
    """The processes that save or load together. Each method below is called by all of them, or by none."""

    group: dist.ProcessGroup | None
    rank: int
    size: int

    @property
    def are_connected(self) -> bool:
        """Whether a process group is there to talk through; a lone process without one needs none."""
        return dist.is_available() and dist.is_initialized()

    def each(self, action: Callable[[], T]) -> T:
        """Run `action` on every rank and return this rank's result.

        raises:  CheckpointError, the same on every rank, where `action` raised on any
        """
        outcome = _attempt(action)
        failures = self._gather(outcome.failure)
        _raise_failures(failures, outcome)
        return outcome.result()

    def everywhere(self, action: Callable[[], T]) -> list[T]:
        """Run `action` on every rank and return all results, in order of rank; raises as `each` does."""
        outcome = _attempt(action)
        outcomes = self._gather(_Outcome(value=outcome.value, failure=outcome.failure))
        _raise_failures([other.failure for other in outcomes], outcome)
        return [other.result() for other in outcomes]

    def first(self, action: Callable[[], T]) -> T:
        """Run `action` on the first rank alone and return its result on every rank; raises as `each` does."""
        outcome: _Outcome[T] = _attempt(action) if self.rank == 0 else _Outcome()
        first = self._from_first(_Outcome(value=outcome.value, failure=outcome.failure))
        _raise_failures([first.failure], outcome)
        return first.result()

    def _gather(self, value: T) -> list[T]:
        if not self.are_connected:
            return [value]
        gathered: list[Any] = [None] * self.size
        dist.all_gather_object(gathered, value, group=self.group)
        return gathered

    def _from_first(self, value: T) -> T:
        if not self.are_connected:
            return value
        box = [value]
        dist.broadcast_object_list(box, group_src=0, group=self.group)
        return box[0]


def describe_failures(failures: Mapping[int, str]) -> str:
    """One sentence for all ranks that failed: ranks that say the same are named once."""
    speakers: dict[str, list[int]] = {}
    for rank, text in sorted(failures.items()):
        speakers.setdefault(text, []).append(rank)
    return "; ".join(f"{_name(ranks)}: {text}" for text, ranks in speakers.items())


def describe_exception(error: BaseException) -> str:
    """What `error` says; an error that is not ours bears its type."""
    return str(error) if isinstance(error, CheckpointError) else f"{type(error).__name__}: {error}"


@dataclass(frozen=True, slots=True)
class _Outcome(Generic[T]):
    """What an action came to on one rank: a value, or the words of an error; the error itself stays on its rank."""

    value: T | None = None
    failure: str | None = None
    error: Exception | None = None

    def result(self) -> T:
        return self.value  # type: ignore[return-value]  # without a failure it is what the action returned


def _attempt(action: Callable[[], T]) -> _Outcome[T]:
    try:
        return _Outcome(value=action())
    except Exception as error:  # raised again, on every rank, by _raise_failures
        return _Outcome(failure=describe_exception(error), error=error)


def _raise_failures(failures: list[str | None], own: _Outcome[Any]) -> None:
    failed = {rank: failure for rank, failure in enumerate(failures) if failure is not None}
    if not failed:
        return
    texts = set(failed.values())
    same_everywhere = len(failed) == len(failures) and len(texts) == 1
    raise CheckpointError(texts.pop() if same_everywhere else describe_failures(failed)) from own.error


def _name(ranks: list[int]) -> str:
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"rank {ranks[0]} and {len(ranks) - 1} more"
