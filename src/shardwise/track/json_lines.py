"""One JSON object per step: into metrics.jsonl of the run's folder, or onto a stream."""

import json
import math
import os
from dataclasses import asdict
from pathlib import Path
from typing import Any, TextIO, final

from shardwise.track.report import StepReport


@final
class JsonLines:
    """Appends each report to FOLDER/metrics.jsonl, there to be read at once.

    On opening, records after `resume_step` (the run will do those steps again) move to metrics.abandoned.jsonl, and a
    last line that a kill cut off is removed.

    raises:  ValueError where a line is no record of a step
    """

    def __init__(self, folder: Path | str, *, resume_step: int = 0) -> None:
        path = Path(folder) / "metrics.jsonl"
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.exists():
            _cut(path, resume_step)
        self._stream = path.open("a", encoding="ascii")

    def record(self, report: StepReport) -> None:
        self._stream.write(to_json(report) + "\n")
        self._stream.flush()

    def close(self) -> None:
        self._stream.close()


@final
class JsonStream:
    """Prints each report onto `stream`, one JSON object per line; the stream stays open."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def record(self, report: StepReport) -> None:
        print(to_json(report), file=self._stream, flush=True)

    def close(self) -> None:
        self._stream.flush()


def to_json(report: StepReport) -> str:
    """`report` as one line of JSON; "NaN", "Infinity" and "-Infinity" are text, since JSON has no such numbers."""
    return json.dumps(_finite(asdict(report)), allow_nan=False)


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(part) for key, part in value.items()}
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    return value


def _cut(path: Path, resume_step: int) -> None:
    """Shorten the file in place, so that a kill at any instant leaves whole records."""
    content = path.read_bytes()
    lines = content.splitlines(keepends=True)
    whole = lines[:-1] if lines and not lines[-1].endswith(b"\n") else lines
    kept = next((i for i, line in enumerate(whole) if _step(path, i, line) > resume_step), len(whole))
    abandoned = whole[kept:]
    if abandoned:
        with path.with_name("metrics.abandoned.jsonl").open("ab") as aside:
            aside.writelines(abandoned)
    if kept < len(lines):
        os.truncate(path, sum(len(line) for line in lines[:kept]))


def _step(path: Path, index: int, line: bytes) -> int:
    try:
        step = json.loads(line)["step"]
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path}, line {index + 1} is no record of a step; remove that line, or the file") from error
    return int(step)
