"""The Python numbers that a capture freezes, found again before each step.

A graph holds `0.1 * kl` as the number that stood there when it was captured. So the plain values that the function
could have read are listed, cheaply enough for every step: attributes of the modules, closures, defaults, and the
globals that the function names.
"""

import types
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import nn

PLAIN = (int, float, bool, complex, str)
DEPTH = 3  # how far functions that call functions are followed


def scalars(function: Callable[..., Any], model: nn.Module) -> Mapping[str, object]:
    """Each plain value within reach of `function(model, ...)`, by where it stands."""
    found: dict[str, object] = {}
    seen: set[int] = set()
    for name, value in _of_function(function, "loss", DEPTH, seen):
        found[name] = value
    for path, module in model.named_modules():
        place = f"model.{path}" if path else "model"
        found.update((f"{place}.{key}", value) for key, value in _plain(vars(module)) if not key.startswith("_"))
        forward = type(module).forward
        if isinstance(forward, types.FunctionType) and not forward.__module__.startswith("torch."):
            found.update(_of_function(forward, f"{type(module).__name__}.forward", DEPTH, seen))
    return found


@contextmanager
def noted_reads() -> Iterator[set[tuple[int, str]]]:
    """Note which attributes of modules are read meanwhile, each as the module's id and the attribute's name.

    What was written before it was read (`self.height = x.shape[2]`, for a later method) is the module's own affair.
    """
    read: set[tuple[int, str]] = set()
    written: set[tuple[int, str]] = set()
    every_module: Any = nn.Module
    write = every_module.__setattr__

    def noting_read(module: nn.Module, name: str) -> Any:
        if (id(module), name) not in written:
            read.add((id(module), name))
        return object.__getattribute__(module, name)

    def noting_write(module: nn.Module, name: str, value: Any) -> None:
        written.add((id(module), name))
        write(module, name, value)

    every_module.__getattribute__ = noting_read
    every_module.__setattr__ = noting_write
    try:
        yield read
    finally:
        del every_module.__getattribute__
        every_module.__setattr__ = write


def that_were_read(names: Iterable[str], model: nn.Module, read: set[tuple[int, str]]) -> list[str]:
    """`names` of scalars, less the attributes of modules that were not `read`: a counter that only a hook counts up."""
    modules = {f"model.{path}" if path else "model": module for path, module in model.named_modules()}
    kept = []
    for name in names:
        owner, _, key = name.rpartition(".")
        if owner not in modules or (id(modules[owner]), key) in read:
            kept.append(name)
    return kept


def _of_function(function: Callable[..., Any], place: str, depth: int, seen: set[int]) -> Iterator[tuple[str, object]]:
    """The values in the closure, defaults and named globals of `function`, and of the functions it names."""
    function = getattr(function, "__wrapped__", function)
    if isinstance(function, types.MethodType):
        yield from _of_value(function.__self__, place, depth, seen)
        function = function.__func__
    if not isinstance(function, types.FunctionType):
        if not isinstance(function, type) and hasattr(function, "__dict__"):
            yield from _of_value(function, place, depth, seen)
        return
    if id(function.__code__) in seen or depth == 0:
        return
    seen.add(id(function.__code__))
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        try:
            yield from _of_value(cell.cell_contents, f"{place}: {name}", depth, seen)
        except ValueError:  # a cell that is not filled yet
            continue
    for number, default in enumerate(function.__defaults__ or ()):
        yield from _of_value(default, f"{place}: default {number}", depth, seen)
    for name, default in (function.__kwdefaults__ or {}).items():
        yield from _of_value(default, f"{place}: {name}", depth, seen)
    for name in function.__code__.co_names:
        if name in function.__globals__:
            yield from _of_value(function.__globals__[name], f"{function.__module__}.{name}", depth, seen)


def _of_value(value: Any, place: str, depth: int, seen: set[int]) -> Iterator[tuple[str, object]]:
    """The value itself where it is plain, else the plain values one level inside."""
    if isinstance(value, PLAIN):
        yield place, value
    elif isinstance(value, Mapping):
        yield from ((f"{place}[{key!r}]", item) for key, item in _plain(value))
    elif isinstance(value, list | tuple):
        yield from ((f"{place}[{key}]", item) for key, item in _plain(dict(enumerate(value))))
    elif isinstance(value, types.FunctionType | types.MethodType):
        if not value.__module__.startswith("torch"):
            yield from _of_function(value, place, depth - 1, seen)
    elif isinstance(value, nn.Module | types.ModuleType | type):
        return
    elif hasattr(value, "__dict__"):
        yield from ((f"{place}.{key}", item) for key, item in _plain(vars(value)))


def _plain(values: Mapping[Any, Any]) -> Iterator[tuple[Any, object]]:
    return ((key, value) for key, value in list(values.items()) if isinstance(value, PLAIN))
