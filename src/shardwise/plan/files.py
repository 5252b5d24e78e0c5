"""Plans as files: JSON that people can read, edit and compare."""

import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict, fields
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from shardwise.errors import PlanError
from shardwise.plan.plan import Alternative, Plan, Stage

VERSION = 1


def save(plan: Plan, path: Path | str) -> None:
    """Write `plan` to `path`: one value per line, in the order of `Plan`, so that two plans can be compared."""
    content = {"version": VERSION, **asdict(plan)}
    Path(path).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def load(path: Path | str) -> Plan:
    """The plan in the file `path`.

    raises:  PlanError that names the file, the field and what belongs there; OSError where it cannot be read
    """
    content = _read(path)
    unknown = [*_unknown(content, Plan, "")]
    for name, type_ in (("stages", Stage), ("alternatives", Alternative)):
        entries = content.get(name)
        for at, entry in enumerate(entries if isinstance(entries, list) else []):
            unknown += _unknown(entry, type_, f"{name}[{at}].")
    if unknown:
        raise PlanError(f"{path} is no plan: {'; '.join(unknown)}")
    try:
        return _PLAN.validate_json(json.dumps(content), strict=True)
    except ValidationError as error:
        raise PlanError(f"{path} is no plan: {'; '.join(_faults(error))}; mend it, or make the plan again") from None
    except PlanError as error:
        raise PlanError(f"{path} is no plan: {error}") from None


_PLAN: TypeAdapter[Plan] = TypeAdapter(Plan)


def _read(path: Path | str) -> dict[str, Any]:
    """The fields of the file, without its version."""
    try:
        content = json.loads(Path(path).read_text(encoding="utf-8"))
    except ValueError as error:  # not UTF-8, or not JSON
        raise PlanError(f"{path} is no plan: it is not JSON ({error}); make the plan again") from None
    if not isinstance(content, dict):
        raise PlanError(f"{path} is no plan: it holds a {type(content).__name__}, where a JSON object belongs")
    version = content.pop("version", None)
    if version != VERSION:
        raise PlanError(
            f"{path} has version {version!r}, and this shardwise reads version {VERSION}; make the plan again"
        )
    return content


def _unknown(entry: object, type_: type[Plan | Stage | Alternative], where: str) -> Iterator[str]:
    names = [field.name for field in fields(type_)]
    for name in entry if isinstance(entry, Mapping) else ():
        if name not in names:
            near = get_close_matches(name, names, n=1)
            yield f"{where}{name} is no field of it; " + (f"did you mean {near[0]}?" if near else "remove it")


def _faults(error: ValidationError) -> Iterator[str]:
    for fault in error.errors():
        where = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in fault["loc"]).lstrip(".")
        if fault["type"] == "missing":
            yield f"{where} is missing"
        else:
            yield f"{where} is {json.dumps(fault['input'], default=str)[:80]}: {fault['msg']}"
