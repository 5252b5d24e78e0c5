"""Know a damaged file: a list of SHA-256 sums beside the files, in the format of `sha256sum`.

The list vouches for itself: a changed line no longer fits its file, a lost line leaves a file that is not listed.
"""

import hashlib
import re
from collections.abc import Mapping
from pathlib import Path

from shardwise.errors import CheckpointError

SUMS_FILE = "SHA256SUMS"
_LINE = re.compile(r"([0-9a-f]{64})  ([\w.-]+)")


def checksum(path: Path) -> str:
    """SHA-256 of the content of `path`, in hexadecimal."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def render_sums(sums: Mapping[str, str]) -> str:
    """The text of SHA256SUMS for `sums`, from file name to checksum."""
    return "".join(f"{sums[name]}  {name}\n" for name in sorted(sums))


def read_sums(path: Path) -> dict[str, str]:
    """File name to checksum, as SHA256SUMS in the folder `path` has it.

    raises:  CheckpointError where the list is missing or a line of it cannot be read
    """
    file = path / SUMS_FILE
    if not file.is_file():
        raise CheckpointError(f"{file} is missing: {path} is no whole checkpoint; use another one of the run")
    sums: dict[str, str] = {}
    *lines, end = file.read_bytes().decode("ascii", errors="replace").split("\n")
    for number, line in enumerate(lines, start=1):
        match = _LINE.fullmatch(line)
        if match is None or end:
            raise CheckpointError(f"{file} is damaged in line {number}; use another checkpoint of the run")
        sums[match[2]] = match[1]
    return sums


def missing_files(path: Path, sums: Mapping[str, str]) -> list[str]:
    """Names in `sums` that are no files in the folder `path`."""
    return [name for name in sums if not (path / name).is_file()]


def unlisted_files(path: Path, sums: Mapping[str, str]) -> list[str]:
    """Names in the folder `path` that are not in `sums`."""
    return sorted(entry.name for entry in path.iterdir() if entry.name not in sums and entry.name != SUMS_FILE)


def changed_files(path: Path, sums: Mapping[str, str]) -> list[str]:
    """Names in `sums` whose content is not what was saved; reads them all, and passes over missing ones."""
    return [name for name, saved in sums.items() if (path / name).is_file() and checksum(path / name) != saved]
