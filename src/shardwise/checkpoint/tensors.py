"""Write and read tensors by their one-device names, through torch.distributed.checkpoint (DCP).

Each rank hands in what it holds: whole tensors, or DTensors of which it holds a shard. DCP records for each name which
box of the tensor lies in which file, so reading asks for boxes and does not care who wrote them.
"""

import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from difflib import get_close_matches
from math import prod
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadPlan, SavePlan, SavePlanner, WriteItem
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from shardwise.checkpoint.ranks import Ranks, describe_exception, describe_failures
from shardwise.errors import CheckpointError


@dataclass(frozen=True, slots=True)
class Entry:
    """One tensor in a checkpoint, as one device would hold it."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    def __str__(self) -> str:
        return f"{str(self.dtype).removeprefix('torch.')} of shape {self.shape}"


def write_tensors(path: Path, state: Mapping[str, Tensor], ranks: Ranks) -> None:
    """Write `state`, this rank's part, into the folder `path`; returns when all ranks' files are on the disk.

    A name that several ranks hold is written once, by one of them.

    raises:  CheckpointError, the same on every rank
    """
    with _one_error():
        dcp_save(
            dict(state),
            storage_writer=_Writer(path, sync_files=True),
            planner=_SavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False),
            process_group=ranks.group,
            no_dist=not ranks.are_connected,
        )


def files_of(path: Path, rank: int) -> list[Path]:
    """The files that `rank` wrote into the folder `path`."""
    return sorted(path.glob(f"__{rank}_*.distcp"))


def read_entries(path: Path) -> dict[str, Entry]:
    """What the folder `path` holds, by name."""
    metadata: Metadata = FileSystemReader(path).read_metadata()
    return {name: _entry(path, name, stored) for name, stored in metadata.state_dict_metadata.items()}


def read_tensors(
    path: Path, state: Mapping[str, Tensor], entries: Mapping[str, Entry], required: frozenset[str], ranks: Ranks
) -> None:
    """Fill the tensors of `state`, this rank's part, in place.

    required:  names that at least one rank must ask for
    raises:    CheckpointError, the same on every rank, before any tensor is touched where names, shapes or types
               differ; after an error of the disk the tensors hold a mixture
    """
    with _one_error():
        dcp_load(
            dict(state),
            storage_reader=FileSystemReader(path),
            planner=_LoadPlanner(path, entries, required),
            process_group=ranks.group,
            no_dist=not ranks.are_connected,
        )


class _Writer(FileSystemWriter):
    """DCP's own, which also tells of a full disk: torch.save covers that error with one of its file format."""

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        try:
            return super().write_data(plan, planner)
        except RuntimeError as error:
            if isinstance(error.__context__, OSError):
                raise error.__context__ from None
            raise


class _SavePlanner(DefaultSavePlanner):
    """DCP's own, which also refuses a name that means two different tensors (DCP would keep either of them)."""

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        _refuse_two_meanings(all_plans)
        return super().create_global_plan(all_plans)


class _LoadPlanner(DefaultLoadPlanner):
    """DCP's own, which also compares what is asked for with what is there, both ways, and names every difference."""

    def __init__(self, path: Path, entries: Mapping[str, Entry], required: frozenset[str]) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self._path, self._entries, self._required = path, entries, required

    def set_up_planner(
        self, state_dict: dict[str, Any], metadata: Metadata | None = None, is_coordinator: bool = False
    ) -> None:
        differences = [text for name, value in state_dict.items() for text in _difference(name, value, self._entries)]
        if differences:
            raise CheckpointError(f"{self._path} does not fit: {_few(differences)}")
        super().set_up_planner(state_dict, metadata, is_coordinator)

    def create_global_plan(self, global_plan: list[LoadPlan]) -> list[LoadPlan]:
        asked = {item.dest_index.fqn for plan in global_plan for item in plan.items}
        ignored = [
            n for n in sorted(self._required - asked) if prod(self._entries[n].shape)
        ]  # an empty one needs no read
        if ignored:
            raise CheckpointError(
                f"{self._path} holds what no rank asked for: {_few(ignored)}; build the model and optimizer that were "
                "saved, or use load_part to leave the rest of a checkpoint unread"
            )
        return super().create_global_plan(global_plan)


@contextmanager
def _one_error() -> Iterator[None]:
    """Turn DCP's exception, which holds those of all ranks, into one sentence."""
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")  # one process is fine for us
            yield
    except CheckpointException as error:
        _raise_from(error)


def _raise_from(error: CheckpointException) -> NoReturn:
    causes = {rank: cause for rank, (cause, _) in error.failures.items()}
    for cause in causes.values():
        if not isinstance(cause, Exception):  # Ctrl-C stays Ctrl-C
            raise cause
    raise CheckpointError(
        describe_failures({rank: describe_exception(cause) for rank, cause in causes.items()})
    ) from error


def _refuse_two_meanings(plans: list[SavePlan]) -> None:
    seen: dict[str, tuple[int, str]] = {}
    for rank, plan in enumerate(plans):
        for item in plan.items:
            meaning = _meaning(item)
            first_rank, first_meaning = seen.setdefault(item.index.fqn, (rank, meaning))
            if meaning != first_meaning:
                raise CheckpointError(
                    f"{item.index.fqn!r} is {first_meaning} on rank {first_rank} and {meaning} on rank {rank}; "
                    "a name means one tensor in the whole job: use the names of the one-device model"
                )


def _meaning(item: WriteItem) -> str:
    assert item.tensor_data is not None  # saving.py lets nothing but tensors through
    entry = Entry(tuple(item.tensor_data.size), item.tensor_data.properties.dtype)
    return f"{entry} ({item.type.name.lower()})"


def _entry(path: Path, name: str, stored: object) -> Entry:
    if not isinstance(stored, TensorStorageMetadata):
        raise CheckpointError(
            f"{path} holds {name!r} as pickled bytes, which no save of ours writes; save it as a tensor"
        )
    return Entry(tuple(stored.size), stored.properties.dtype)


def _difference(name: str, value: Any, entries: Mapping[str, Entry]) -> list[str]:
    if not isinstance(value, Tensor):
        return [f"{name!r} is asked for as {type(value).__name__}; give a tensor to fill"]
    if name not in entries:
        near = get_close_matches(name, entries, n=1)
        return [f"{name!r} is not in it" + (f" (but {near[0]!r} is)" if near else "")]
    if value.is_meta:
        return [f"{name!r} is on the meta device; give it memory first, with to_empty"]
    wanted, stored = Entry(tuple(value.shape), value.dtype), entries[name]
    return [] if wanted == stored else [f"{name!r} is {stored} there and {wanted} here"]


def _few(texts: list[str]) -> str:
    shown = ", ".join(texts[:5])
    return shown if len(texts) <= 5 else f"{shown} and {len(texts) - 5} more"
