"""Save the state of a run: draft, sums, then one rename."""

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from shardwise.checkpoint.checksums import SUMS_FILE, checksum, render_sums, unlisted_files
from shardwise.checkpoint.folder import checkpoints_folder, path_of, publish, remove_old, start_draft
from shardwise.checkpoint.ranks import Ranks, ranks_of
from shardwise.checkpoint.tensors import files_of, write_tensors
from shardwise.errors import CheckpointError

META_FILE = "meta.json"
INDEX_FILE = ".metadata"  # DCP's name for its index
FORMAT = 1


def save(
    folder: Path | str,
    step: int,
    state: Mapping[str, Tensor],
    meta: Mapping[str, Any],
    *,
    group: dist.ProcessGroup | None = None,
    keep: int | None = 3,
) -> Path:
    """Write one checkpoint of the run in `folder`, and return its folder when it is published.

    Called by every rank of `group`. A kill at any instant leaves the whole checkpoints that were there. Only one run
    may save into a folder at a time. What an earlier save left half done is removed; checkpoints of later steps are
    renamed to "abandoned-...", with a warning on the first rank.

    state:   this rank's part, by one-device names: plain tensors (the whole of it; where several ranks hold one, they
             hold the same values) or DTensors
    meta:    what JSON can hold: data position, fingerprint of the job, plan; the first rank's is written
    keep:    how many whole checkpoints stay, this one included; None keeps all
    raises:  CheckpointError, the same on every rank
    """
    if keep is not None and keep < 1:
        raise ValueError(f"keep is {keep}; keep at least the checkpoint that is being saved, or None for all")
    ranks = ranks_of(group)
    steps = ranks.everywhere(lambda: _refuse_what_cannot_be_saved(step, state, meta))
    if len(set(steps)) > 1:
        raise CheckpointError(f"the ranks save different steps: {steps} in order of rank; save after the same step")
    draft = checkpoints_folder(folder) / ranks.first(lambda: start_draft(folder, step))
    write_tensors(draft, state, ranks)
    sums = _merge(ranks.everywhere(lambda: _own_sums(draft, step, meta, ranks)))
    ranks.first(lambda: _finish(folder, draft, step, sums, keep))
    return path_of(folder, step)


def _refuse_what_cannot_be_saved(step: int, state: Mapping[str, Tensor], meta: Mapping[str, Any]) -> int:
    if step < 0:
        raise CheckpointError(f"step is {step}; steps count from 0")
    for name, value in state.items():
        problem = _problem(value)
        if problem is not None:
            raise CheckpointError(f"{name!r} cannot be saved: {problem}")
    try:
        survives = json.loads(json.dumps(meta)) == meta
    except (TypeError, ValueError) as error:
        raise CheckpointError(f"meta cannot be saved: {error}; put tensors into state, and the rest as JSON") from error
    if not survives:
        raise CheckpointError("meta would come back changed; use lists for tuples, str keys, and None for NaN")
    return step


def _problem(value: object) -> str | None:
    if not isinstance(value, Tensor):
        return f"it is {type(value).__name__}; give a tensor, or put it into meta"
    if value.is_meta:
        return "it is on the meta device and has no values; give the tensor that was trained"
    if value.layout is not torch.strided:
        return f"its layout is {value.layout}; give value.to_dense()"
    if isinstance(value, DTensor) and any(placement.is_partial() for placement in value.placements):
        return "it is a DTensor with a Partial placement, not yet summed; give value.redistribute(...) first"
    return None


def _own_sums(draft: Path, step: int, meta: Mapping[str, Any], ranks: Ranks) -> dict[str, str]:
    """Checksums by name of the files that this rank wrote; to the first rank belong meta and the index, too."""
    files = files_of(draft, ranks.rank)
    if ranks.rank == 0:
        record = {"format": FORMAT, "step": step, "torch": str(torch.__version__), "ranks": ranks.size, "meta": meta}
        _write_durably(draft / META_FILE, json.dumps(record, indent=1))
        files += [draft / META_FILE, draft / INDEX_FILE]
    return {file.name: checksum(file) for file in files}


def _merge(parts: list[dict[str, str]]) -> dict[str, str]:
    return {name: value for part in parts for name, value in part.items()}


def _finish(folder: Path | str, draft: Path, step: int, sums: Mapping[str, str], keep: int | None) -> None:
    unseen = [name for name in sums if not (draft / name).is_file()]
    if unseen:
        raise CheckpointError(
            f"the first rank does not see {', '.join(unseen)} in {draft}: the ranks do not share this folder; "
            "save to a file system that all machines mount"
        )
    unknown = unlisted_files(draft, sums)
    if unknown:
        raise CheckpointError(
            f"{draft} holds {', '.join(unknown)}, which no rank wrote; let one run save here at a time"
        )
    _write_durably(draft / SUMS_FILE, render_sums(sums))
    publish(folder, draft, step)
    if keep is not None:
        remove_old(folder, keep)


def _write_durably(path: Path, text: str) -> None:
    with path.open("w", encoding="ascii") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
