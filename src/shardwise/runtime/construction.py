"""Build a model without its memory: record how its factory makes it, then make for real what this rank holds.

The factory runs once on fake tensors, under a mode that keeps every op (on the meta device some libraries leave their
initialisation out). The ops are run again in their order, on the
host and for real where a held tensor comes out of them. A random op whose tensor nobody here holds still draws, into
scratch memory that is dropped at once, so that the numbers after it are those of one device.
"""

import warnings
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, final

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from shardwise.graph.names import named_tensors
from shardwise.job import Job

Key = int  # the identity of a storage while the factory ran: tensors that share memory share it


@final
@dataclass(frozen=True)
class Construction:
    """A model whose tensors have no memory yet, and how they came to be.

    ops:  that made them; None where the model was built for real
    """

    model: nn.Module
    seed: int
    ops: Sequence["_Op"] | None

    def materialize(self, names: Collection[str]) -> Callable[[Tensor], Tensor]:
        """Make the parameters and buffers called `names` real, with all tensors that modules hold besides; once.

        What is not named becomes a shape without memory. Returns what gives the real one of any tensor of before.
        """
        if self.ops is None:
            _drop(self.model, names)
            return lambda tensor: tensor
        named = named_tensors(self.model)
        ours = {id(tensor) for name, tensor in named if name in names}
        theirs = {id(tensor) for _, tensor in named} - ours
        recorded = {place.key for op in self.ops for place in op.makes}
        held = [tensor for tensor in _tensors(self.model) if _key(tensor) in recorded]
        real = _replay(self.ops, {_key(tensor) for tensor in held if id(tensor) not in theirs}, self.seed)
        made: dict[int, Tensor] = {}

        def replace(tensor: Tensor) -> Tensor:
            if id(tensor) not in made:
                elsewhere = id(tensor) in theirs
                made[id(tensor)] = _like(
                    tensor, _shape_of(tensor) if elsewhere else _place(tensor).view(real[_key(tensor)])
                )
            return made[id(tensor)]

        which = {id(tensor) for tensor in held}  # held until the end: a freed tensor would lend its identity
        for module in self.model.modules():
            for key, value in list(vars(module).items()):
                vars(module)[key] = _replaced(value, which, replace)
        return lambda tensor: _place(tensor).view(real[_key(tensor)]) if isinstance(tensor, FakeTensor) else tensor


def construct(job: Job) -> Construction:
    """Record how `job.model` builds; where that needs values, build it for real on this host, and say so."""
    recorder = _Recorder()
    try:
        with FakeTensorMode(shape_env=ShapeEnv(), allow_non_fake_inputs=True), recorder, _fakes_swapped():
            model = job.build()
    except Exception as error:  # whatever the user's code raises where a tensor has no values
        warnings.warn(
            "the model is built whole in the memory of every rank's host, since its factory reads values "
            f"({type(error).__name__}: {next(iter(str(error).splitlines()), '')})",
            stacklevel=2,
        )
        return Construction(job.build(), job.seed, None)
    return Construction(model, job.seed, recorder.ops)


def _drop(model: nn.Module, names: Collection[str]) -> None:
    named = named_tensors(model)
    held = {id(tensor) for name, tensor in named if name in names}
    for _, tensor in named:
        if id(tensor) not in held:
            tensor.data = _shape_of(tensor)


@contextmanager
def _fakes_swapped() -> Iterator[None]:
    """Let `module.double()` and the like work on fake parameters, which torch refuses to swap."""
    original = torch.utils.swap_tensors

    def swap(first: Tensor, second: Tensor) -> None:
        if isinstance(first, FakeTensor):
            first.data = second.data
        else:
            original(first, second)  # type: ignore[no-untyped-call]  # torch's function has no types

    torch.utils.swap_tensors = swap
    try:
        yield
    finally:
        torch.utils.swap_tensors = original


@final
@dataclass(frozen=True, slots=True)
class _Place:
    """Where a tensor lay when an op met it: `tensor.data = other` moves it later, unseen.

    storage:   kept alive, so that no other takes its identity
    constant:  the tensor itself, which counts where no recorded op made its storage
    """

    storage: torch.UntypedStorage
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    dtype: torch.dtype
    constant: Tensor

    @property
    def key(self) -> Key:
        return int(self.storage._cdata)

    def view(self, memory: Tensor) -> Tensor:
        """The tensor that lies in `memory` as this one lay in its storage."""
        empty = torch.empty(0, dtype=self.dtype, device=memory.device)
        return empty.set_(memory.untyped_storage(), self.offset, self.size, self.stride)


def _place(tensor: Tensor) -> _Place:
    return _Place(
        storage=tensor.untyped_storage(),
        size=tuple(tensor.size()),
        stride=tensor.stride(),
        offset=int(tensor.storage_offset()),
        dtype=tensor.dtype,
        constant=tensor,
    )


def _key(tensor: Tensor) -> Key:
    return int(tensor.untyped_storage()._cdata)


@final
@dataclass(frozen=True, slots=True)
class _Op:
    """One recorded call, with a `_Place` for every tensor."""

    function: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    makes: tuple[_Place, ...]

    @property
    def reads(self) -> list[_Place]:
        return _places((self.args, self.kwargs))

    @property
    def writes(self) -> list[_Place]:
        """Those of its inputs that it writes to."""
        arguments = self.function._schema.arguments
        given = [*zip(arguments, self.args, strict=False)]
        given += [(argument, self.kwargs[argument.name]) for argument in arguments if argument.name in self.kwargs]
        return [
            place
            for argument, value in given
            if argument.alias_info is not None and argument.alias_info.is_write
            for place in _places(value)
        ]

    @property
    def draws(self) -> bool:
        return torch.Tag.nondeterministic_seeded in self.function.tags


def _places(value: Any) -> list[_Place]:
    return [leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, _Place)]


@final
class _Recorder(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch's class has no types
        self.ops: list[_Op] = []

    def __torch_dispatch__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        placed = pytree.tree_map_only(Tensor, _place, (args, kwargs or {}))
        result = function(*args, **(kwargs or {}))
        made = [_place(leaf) for leaf in pytree.tree_leaves(result) if isinstance(leaf, Tensor)]
        self.ops.append(_Op(function, placed[0], placed[1], tuple(made)))
        return result


def _replay(ops: Sequence[_Op], wanted: set[Key], seed: int) -> dict[Key, Tensor]:
    """The real memory of every wanted storage. Leaves torch's generator where the whole construction leaves it."""
    needed, last_use = _needed(ops, wanted)
    real: dict[Key, Tensor] = {}
    torch.manual_seed(seed)
    with torch.no_grad():
        for at, op in enumerate(ops):
            if at in needed:
                args, kwargs = _on_host((op.args, op.kwargs), lambda place: _found(place, real))
                result = op.function(*args, **kwargs)
                made = [leaf for leaf in pytree.tree_leaves(result) if isinstance(leaf, Tensor)]
                for place, tensor in zip(op.makes, made, strict=True):
                    real.setdefault(place.key, tensor)
            elif op.draws:
                args, kwargs = _on_host((op.args, op.kwargs), _scratch)
                op.function(*args, **kwargs)
            for key in last_use.get(at, ()):
                real.pop(key, None)
    return real


def _needed(ops: Sequence[_Op], wanted: set[Key]) -> tuple[set[int], dict[int, list[Key]]]:
    """The ops that wanted values come out of, and after which op each other value is needed no more."""
    values = set(wanted)
    needed: set[int] = set()
    ends: dict[int, list[Key]] = {}
    for at in reversed(range(len(ops))):
        op = ops[at]
        touched = {place.key for place in (*op.makes, *op.writes)}
        # What a random op draws from another tensor may depend on its values: it is run as it was.
        from_values = op.draws and any(place.key not in touched for place in op.reads)
        if touched.isdisjoint(values) and not from_values:
            continue
        needed.add(at)
        for key in {place.key for place in (*op.reads, *op.makes)} - values:
            values.add(key)
            ends.setdefault(at, []).append(key)
    return needed, ends


def _on_host(arguments: Any, tensor_at: Callable[[_Place], Tensor]) -> Any:
    """Recorded arguments as real ones."""
    return pytree.tree_map_only(_Place, tensor_at, arguments)


def _found(place: _Place, real: dict[Key, Tensor]) -> Tensor:
    if place.key not in real:
        # A constant that stood in the factory; it may be written to, so that the record keeps the original.
        real[place.key] = place.constant.clone()
        return real[place.key]
    return place.view(real[place.key])


def _scratch(place: _Place) -> Tensor:
    return torch.empty_strided(place.size, place.stride, dtype=place.dtype, device=_HOST)


_HOST = torch.device("cpu")


def _shape_of(recorded: Tensor) -> Tensor:
    return torch.empty((), dtype=recorded.dtype).expand(recorded.shape)


def _like(recorded: Tensor, value: Tensor) -> Tensor:
    """`value` as a parameter where `recorded` is one, with what the model wrote on it, and its hooks."""
    if not isinstance(recorded, nn.Parameter):
        return value
    parameter = nn.Parameter(value, requires_grad=recorded.requires_grad)
    parameter.__dict__.update(recorded.__dict__)
    for hooks in ("_backward_hooks", "_post_accumulate_grad_hooks"):
        if getattr(recorded, hooks):
            setattr(parameter, hooks, getattr(recorded, hooks))
    return parameter


def _tensors(model: nn.Module) -> Iterator[Tensor]:
    """Every tensor that the modules hold, wherever they hold it."""
    for module in model.modules():
        for value in vars(module).values():
            yield from _leaves(value)


def _leaves(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, dict):
        for item in value.values():
            yield from _leaves(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _leaves(item)


def _replaced(value: Any, which: Collection[int], replace: Callable[[Tensor], Tensor]) -> Any:
    """`value` with the tensors in `which`, by identity, replaced; dicts and lists in place."""
    if isinstance(value, Tensor):
        return replace(value) if id(value) in which else value
    if isinstance(value, dict):
        for key, item in value.items():
            value[key] = _replaced(item, which, replace)
    elif isinstance(value, list):
        value[:] = [_replaced(item, which, replace) for item in value]
    elif type(value) is tuple:
        return tuple(_replaced(item, which, replace) for item in value)
    return value
