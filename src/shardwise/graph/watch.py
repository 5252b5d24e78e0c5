"""See what `torch.export` cannot: it drops or freezes these without a word, and the numbers would be wrong.

- a custom `autograd.Function` and `Tensor.register_hook` become opaque ops (module `opaque`);
- activation checkpointing steps aside: what is recomputed is the plan's to say, and export takes the grad mode that
  checkpointing switches for its own use as one that holds from there on;
- module backward hooks, a backward pass inside the loss, random numbers from Python or numpy, and
  module state that the forward pass changes in Python: each makes the capture refuse, with the user's own line.
"""

import builtins
import random
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from pickle import dumps
from types import ModuleType, TracebackType
from typing import Any, final

import numpy as np
import torch
import torch._dynamo.trace_rules
from torch import Tensor, nn
from torch.utils import checkpoint

from shardwise.graph.opaque import Recorder


@final
@dataclass(frozen=True, slots=True)
class Refusal:
    """Why a loss is not captured: a value, since a plan with one stage may do without.

    reason:  what stands in the way and what would help
    where:   "file.py:12: the line" of the user's code, or "" where no line is to blame
    """

    reason: str
    where: str = ""

    def __str__(self) -> str:
        return f"{self.reason} ({self.where})" if self.where else self.reason


class RefusedError(Exception):
    """Carries a `Refusal` out of the code that is being captured."""

    def __init__(self, refusal: Refusal) -> None:
        super().__init__(str(refusal))
        self.refusal = refusal


@contextmanager
def watched(model: nn.Module) -> Iterator[Recorder]:
    """Run a capture under the watch.

    raises:  RefusedError as soon as something is met that a graph cannot hold
    """
    _refuse_module_hooks(model)
    # Export lists torch's functions by identity, once for the process: before any of them is swapped.
    torch._dynamo.trace_rules.get_torch_obj_rule_map()
    recorder = Recorder()
    drawn: list[str] = []
    with ExitStack() as stack:
        length = _swapped(builtins, "len", _length)
        for patch in (*_autograd_patches(recorder), _without_checkpointing(), *_random_patches(drawn), length):
            stack.enter_context(patch)
        stack.callback(recorder.forget)
        moved = stack.enter_context(_generators_put_back())
        yield recorder
        for generator in moved():
            raise RefusedError(
                Refusal(
                    f"the loss draws from {generator} random generator, whose value a graph would freeze; draw in the "
                    "data pipeline, or with torch",
                    drawn[0] if drawn else "",
                )
            )


@contextmanager
def _generators_put_back() -> Iterator[Callable[[], list[str]]]:
    """Gives which of Python's and numpy's generators were drawn from; they end as they began."""
    python, numpy = random.getstate(), np.random.get_state()

    def moved() -> list[str]:
        # Compared as bytes, since a state of numpy's holds an array.
        now = {"Python's": random.getstate() != python, "numpy's": dumps(np.random.get_state()) != dumps(numpy)}
        return [name for name, changed in now.items() if changed]

    try:
        yield moved
    finally:
        random.setstate(python)
        np.random.set_state(numpy)


def user_line(stack: TracebackType | None = None) -> str:
    """The innermost line outside torch, shardwise and the standard library: of `stack`, or of the caller."""
    frames = traceback.extract_tb(stack) if stack is not None else traceback.extract_stack(sys._getframe(1))
    for frame in reversed(frames):
        if frame.filename.startswith("<") or frame.filename.startswith(_NOT_THE_USERS):
            continue
        return f"{_short(frame.filename)}:{frame.lineno}: {(frame.line or '').strip()}"
    return ""


_NOT_THE_USERS = tuple(
    str(Path(module.__file__ or "").resolve().parent) + "/" for module in (torch, traceback, sys.modules["shardwise"])
)


def _short(filename: str) -> str:
    """As an import would find it: the path below the folder that is on `sys.path`."""
    for folder in sorted((entry for entry in sys.path if entry), key=len, reverse=True):
        if filename.startswith(folder.rstrip("/") + "/"):
            return filename[len(folder.rstrip("/")) + 1 :]
    return filename


def _refuse_module_hooks(model: nn.Module) -> None:
    """Hooks on parameters are no concern: what a graph is cut into holds the parameters themselves."""
    for name, module in model.named_modules():
        if module._backward_hooks or module._backward_pre_hooks:
            raise RefusedError(
                Refusal(
                    f"module {name or 'at the root'} ({type(module).__name__}) has a backward hook, which a graph "
                    "would lose; hook a tensor in forward (tensor.register_hook), or use a plan with one stage"
                )
            )


def _autograd_patches(recorder: Recorder) -> Iterator[Any]:
    original = vars(torch.autograd.Function)["apply"].__func__

    def apply(cls: type[torch.autograd.Function], *arguments: Any, **keywords: Any) -> Any:
        if cls is checkpoint.CheckpointFunction:
            return _reentrant(*arguments)
        if cls.__module__.split(".")[0] == "torch" or keywords:
            return original(cls, *arguments, **keywords)
        return recorder.apply(lambda *filled: original(cls, *filled), arguments)

    def register_hook(tensor: Tensor, function: Callable[[Tensor], Any]) -> "_NoHandle":
        recorder.hook(tensor, function)
        return _NoHandle()

    def refuse(*_: Any, **__: Any) -> Any:
        raise RefusedError(
            Refusal(
                "the loss runs a backward pass of its own (torch.autograd.grad or backward), which a graph cannot "
                "be cut through; use a plan with one stage",
                user_line(),
            )
        )

    yield _swapped(torch.autograd.Function, "apply", classmethod(apply))
    yield _swapped(torch.Tensor, "register_hook", register_hook)
    for owner, name in ((torch.autograd, "grad"), (torch.autograd, "backward"), (torch.Tensor, "backward")):
        yield _swapped(owner, name, refuse)


def _without_checkpointing() -> AbstractContextManager[None]:
    """Let a checkpoint that is not reentrant do nothing before and after the function that it wraps."""

    def nothing(*_: Any, **__: Any) -> Iterator[None]:
        yield

    return _swapped(checkpoint, "_checkpoint_without_reentrant_generator", nothing)


def _reentrant(function: Callable[..., Any], preserve_rng_state: bool, *inputs: Any) -> Any:
    """What a reentrant checkpoint computes: it has a gradient only where one of its inputs needs one."""
    flows = any(isinstance(value, Tensor) and value.requires_grad for value in inputs)
    with torch.set_grad_enabled(flows and torch.is_grad_enabled()):
        return function(*inputs)


@contextmanager
def _swapped(owner: Any, name: str, value: Any) -> Iterator[None]:
    before = vars(owner)[name]
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)


@final
class _NoHandle:
    def remove(self) -> None:
        raise RefusedError(
            Refusal("the loss removes a tensor hook again, which a graph cannot follow; leave it in place", user_line())
        )


def _length(value: Any) -> Any:
    """`len`, but of a tensor the size itself: as a plain number it would freeze the batch at the example's size."""
    if isinstance(value, Tensor) and value.dim():
        return value.shape[0]
    return _len(value)


_len = len


def _random_patches(drawn: list[str]) -> Iterator[Any]:
    for module in (random, np.random):
        for name, function in list(vars(module).items()):
            if not name.startswith("_") and callable(function) and not isinstance(function, type):
                yield _swapped(module, name, _noting(function, module, name, drawn))


def _noting(function: Callable[..., Any], module: ModuleType, name: str, drawn: list[str]) -> Callable[..., Any]:
    def noting(*arguments: Any, **keywords: Any) -> Any:
        if name not in ("getstate", "get_state"):
            drawn.append(user_line())
        return function(*arguments, **keywords)

    return noting
