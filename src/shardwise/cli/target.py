"""FILE:FUNCTION on the command line: the job that a file describes, and an example batch."""

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

from shardwise.errors import PlanError
from shardwise.job import Batch, Job


def load_target(text: str) -> tuple[Job, Batch]:
    """The job that `FUNCTION()` of the file returns, and the batch that its `example()` returns.

    raises:  PlanError where the file or a function is not there, or returns something else
    """
    file, colon, function = text.rpartition(":")
    if not colon:
        raise PlanError(f"{text!r} names no function; write FILE:FUNCTION, such as train.py:make_job")
    module = _load(Path(file))
    job = _call(module, function, file)
    if not isinstance(job, Job):
        raise PlanError(f"{function}() in {file} returned {type(job).__name__}; let it return a shardwise.Job")
    return job, _call(module, "example", file)


def _load(path: Path) -> ModuleType:
    if not path.is_file():
        raise PlanError(f"there is no file {path}")
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    sys.path.insert(0, str(path.parent.absolute()))
    arguments, sys.argv = sys.argv, [str(path)]  # ours are not the file's
    try:
        spec.loader.exec_module(module)
    finally:
        sys.argv = arguments
    return module


def _call(module: ModuleType, name: str, file: str) -> object:
    function = getattr(module, name, None)
    if not callable(function):
        hint = "returns a batch of at least two samples" if name == "example" else "returns the Job"
        raise PlanError(f"{file} has no function {name}(); add one that {hint}")
    return function()
