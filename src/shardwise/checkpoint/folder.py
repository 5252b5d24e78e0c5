"""Lay checkpoints out in a run's folder, so that each is there whole or not at all.

All files of a save are written into a draft (".saving-step-..."), which one rename publishes. Where the step is there
already, its folder steps aside first and still counts until the new one has its name:

    step-42           step-42.old                     step-42.old           -
    .saving-step-42   .saving-step-42   step-42 missing: the .old counts    step-42 (new)   ->   step-42 (new)

Deleting renames first, too, so that a kill leaves no half-deleted checkpoint under a published name.
"""

import os
import re
import secrets
import shutil
import warnings
from pathlib import Path

from shardwise.checkpoint.checksums import missing_files, read_sums
from shardwise.errors import CheckpointError

_PUBLISHED = re.compile(r"step-(\d{8,})(\.old)?")
_DRAFT, _REMOVED = ".saving-", ".removing-"


def latest(folder: Path | str) -> Path | None:
    """The newest whole checkpoint of the run in `folder`, or None: names are compared, contents are not read.

    Saves that did not end are passed over; they are the folders ".saving-..." and the next save removes them.
    """
    return next((path for path in reversed(published(folder)) if is_whole(path)), None)


def published(folder: Path | str) -> list[Path]:
    """Every published checkpoint of the run in `folder`, oldest first, damaged ones too."""
    home = checkpoints_folder(folder)
    by_step: dict[int, Path] = {}
    for path in sorted(home.iterdir(), reverse=True) if home.is_dir() else ():
        if _PUBLISHED.fullmatch(path.name):
            by_step[step_of(path)] = path  # "step-42" comes after "step-42.old" here, and wins
    return [by_step[step] for step in sorted(by_step)]


def step_of(path: Path) -> int:
    """The step of a published checkpoint, from its name.

    raises:  CheckpointError where the name is not that of a published checkpoint
    """
    match = _PUBLISHED.fullmatch(path.name)
    if match is None:
        raise CheckpointError(
            f"{path} is not named like a checkpoint; give a folder such as RUN/checkpoints/step-00000042, "
            "or the run's folder to open_latest"
        )
    return int(match[1])


def is_whole(path: Path) -> bool:
    """Whether every file that was saved is there; contents are not read."""
    try:
        return not missing_files(path, read_sums(path))
    except CheckpointError:  # the list itself is missing or unreadable: so it is not whole
        return False


def checkpoints_folder(folder: Path | str) -> Path:
    """Where the checkpoints of the run in `folder` lie."""
    return Path(folder) / "checkpoints"


def path_of(folder: Path | str, step: int) -> Path:
    """Where the checkpoint of `step` is published."""
    return checkpoints_folder(folder) / f"step-{step:08d}"


def start_draft(folder: Path | str, step: int) -> str:
    """Make an empty draft for `step` and return its name; remove what an earlier process left half done."""
    home = checkpoints_folder(folder)
    home.mkdir(parents=True, exist_ok=True)
    _clear_leftovers(home)
    name = f"{_DRAFT}{path_of(folder, step).name}-{secrets.token_hex(4)}"
    (home / name).mkdir()
    return name


def publish(folder: Path | str, draft: Path, step: int) -> None:
    """Give `draft` its published name; checkpoints of later steps are abandoned, since the run went back."""
    sync_folder(draft)
    _abandon_later(folder, step)
    target = path_of(folder, step)
    old = target.with_suffix(".old")
    if target.exists():
        target.rename(old)
    draft.rename(target)
    sync_folder(target.parent)
    if old.exists():
        _remove(old)


def remove_old(folder: Path | str, keep: int) -> None:
    """Delete whole checkpoints but the newest `keep`; those that are not whole are not ours to judge, and stay."""
    whole = [path for path in published(folder) if is_whole(path)]
    for path in whole[: max(len(whole) - keep, 0)]:
        _remove(path)


def sync_folder(path: Path) -> None:
    """Return when the names in `path` are on the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _clear_leftovers(home: Path) -> None:
    for path in list(home.iterdir()):
        if path.name.startswith((_DRAFT, _REMOVED)):
            shutil.rmtree(path)
        elif _PUBLISHED.fullmatch(path.name) and path.suffix == ".old":
            _settle(path)


def _settle(old: Path) -> None:
    """End a publish that was killed: the old folder of a step gives way to the new one, or takes its name back."""
    if old.with_suffix("").exists():
        _remove(old)
    else:
        old.rename(old.with_suffix(""))


def _abandon_later(folder: Path | str, step: int) -> None:
    for path in reversed(published(folder)):  # newest first: a kill in between leaves nothing newer than before
        if step_of(path) <= step:
            return
        aside = path.with_name(f"abandoned-{path.name}-{secrets.token_hex(4)}")
        path.rename(aside)
        warnings.warn(
            f"step {step} is saved after {path.name} was: the run went back. {path.name} is now {aside.name} and will "
            "not be resumed from; delete it when you no longer need it",
            stacklevel=2,
        )


def _remove(path: Path) -> None:
    doomed = path.with_name(f"{_REMOVED}{path.name}-{secrets.token_hex(4)}")
    path.rename(doomed)
    shutil.rmtree(doomed)
