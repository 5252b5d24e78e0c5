"""Open a checkpoint, which checks every byte of it, and fill tensors from it."""

import json
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch.distributed as dist
from torch import Tensor

from shardwise.checkpoint.checksums import changed_files, missing_files, read_sums, unlisted_files
from shardwise.checkpoint.folder import checkpoints_folder, published, step_of
from shardwise.checkpoint.ranks import Ranks, ranks_of
from shardwise.checkpoint.saving import FORMAT, META_FILE
from shardwise.checkpoint.tensors import Entry, read_entries, read_tensors
from shardwise.errors import CheckpointError


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    """A checkpoint whose every byte was checked when it was opened."""

    path: Path
    step: int
    meta: Mapping[str, Any]  # as it was given to save
    entries: Mapping[str, Entry]  # all tensors in it, by one-device name
    skipped: tuple[str, ...] = ()  # newer ones that are damaged, with what is wrong; the newest first


def open_latest(folder: Path | str, *, group: dist.ProcessGroup | None = None) -> Checkpoint | None:
    """The newest undamaged checkpoint of the run in `folder`; None where the run has none yet.

    Called by every rank of `group`, each of which reads and checks a share of the files. Damaged ones are passed over,
    with a warning on the first rank and in `skipped`.

    raises:  CheckpointError where there are checkpoints and all are damaged
    """
    ranks = ranks_of(group)
    names = ranks.first(lambda: [path.name for path in reversed(published(folder))])
    skipped: list[str] = []
    for name in names:
        path = checkpoints_folder(folder) / name
        damage = _damage(path, ranks)
        if damage is None:
            _warn_of(skipped, path, ranks)
            return replace(_described(path, ranks), skipped=tuple(skipped))
        skipped.append(damage)
    if skipped:
        raise CheckpointError(
            f"no checkpoint in {folder} is undamaged: {'; '.join(skipped)}; restore one from a backup, "
            "or move the checkpoints away to start from step 0"
        )
    return None


def open_checkpoint(path: Path | str, *, group: dist.ProcessGroup | None = None) -> Checkpoint:
    """Check every byte of the checkpoint folder `path`; called by every rank of `group`, each reads a share.

    raises:  CheckpointError, the same on every rank, that names each file that is missing or damaged
    """
    ranks, path = ranks_of(group), Path(path)
    damage = _damage(path, ranks)
    if damage is not None:
        raise CheckpointError(f"{damage}; open another one, or let open_latest find the newest undamaged one")
    return _described(path, ranks)


def load(
    checkpoint: Checkpoint, state: Mapping[str, Tensor], *, group: dist.ProcessGroup | None = None
) -> Mapping[str, Any]:
    """Fill `state`, this rank's part, in place, and return the checkpoint's meta; together the ranks ask for all of it.

    Called by every rank of `group`; the parts need not be cut as they were when saved. Any rank may ask for any name.

    raises:  CheckpointError, the same on every rank: names, shapes or types differ (no tensor was touched), or the disk
             failed (the tensors hold a mixture)
    """
    read_tensors(checkpoint.path, state, checkpoint.entries, frozenset(checkpoint.entries), ranks_of(group))
    return checkpoint.meta


def load_part(
    checkpoint: Checkpoint, state: Mapping[str, Tensor], *, group: dist.ProcessGroup | None = None
) -> Mapping[str, Any]:
    """As `load`, but the rest of the checkpoint may stay unread: the model without its optimizer, for instance."""
    read_tensors(checkpoint.path, state, checkpoint.entries, frozenset(), ranks_of(group))
    return checkpoint.meta


def _damage(path: Path, ranks: Ranks) -> str | None:
    """What is wrong with the files in `path`, the same on every rank; None where nothing is."""
    problems = list(
        dict.fromkeys(text for found in ranks.everywhere(lambda: _own_damage(path, ranks)) for text in found)
    )
    return f"{path} is damaged: {', '.join(problems)}" if problems else None


def _own_damage(path: Path, ranks: Ranks) -> list[str]:
    if not path.is_dir():
        raise CheckpointError(f"{path} is no folder on rank {ranks.rank}; give a checkpoint that all ranks can read")
    try:
        sums = read_sums(path)
    except CheckpointError as error:
        return [str(error)]
    share = dict(sorted(sums.items())[ranks.rank :: ranks.size])
    return [
        *(f"{name} is missing" for name in missing_files(path, sums)),
        *(f"{name} is not in SHA256SUMS" for name in unlisted_files(path, sums)),
        *(f"{name} is not what was saved (SHA256SUMS has another sum)" for name in changed_files(path, share)),
    ]


def _described(path: Path, ranks: Ranks) -> Checkpoint:
    return ranks.each(lambda: _read(path))


def _read(path: Path) -> Checkpoint:
    record = json.loads((path / META_FILE).read_text(encoding="ascii"))
    if record["format"] != FORMAT:
        raise CheckpointError(
            f"{path} has format {record['format']}, and this shardwise reads {FORMAT}; use the version that wrote it"
        )
    if record["step"] != step_of(path):
        raise CheckpointError(f"{path} holds step {record['step']}; give the folder its own name back")
    return Checkpoint(
        path=path,
        step=record["step"],
        meta=MappingProxyType(record["meta"]),
        entries=MappingProxyType(read_entries(path)),
    )


def _warn_of(skipped: list[str], path: Path, ranks: Ranks) -> None:
    if skipped and ranks.rank == 0:
        warnings.warn(f"{'; '.join(skipped)}; went back to {path.name}", stacklevel=3)
