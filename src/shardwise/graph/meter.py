"""What each op of a captured graph costs, by running it once on fake tensors of the example's sizes.

Nothing is looked up in a table of layers: FLOPs are counted on what torch dispatches, forward and backward; saved
activations are what autograd packs; random draws are the random ops that are dispatched.
"""

import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, final

import torch
from torch import Tensor, fx
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry, sdpa_backward_flop_count, sdpa_flop_count

Storage = int  # an identity, good as long as the reading that it is from


@final
@dataclass(frozen=True, slots=True)
class Reading:
    """One op, measured.

    flops_forward, flops_backward:  of the example batch
    saved:       bytes that autograd keeps for the backward pass, by storage; parameters and their casts left out
    outputs:     the storages of the results, in order
    made:        the storages that did not exist before it: of results that are no views, and those saved inside
    bytes_out:   of the results, views counted once
    working:     bytes that it takes while it runs, results and gradients included; the larger of forward and backward,
                 without the gradients of parameters
    writes:      storages that the op writes to
    draws:       random ops in it
    needs_grad:  whether a gradient flows back through a result
    value:       the result, fake
    """

    flops_forward: int
    flops_backward: int
    saved: Mapping[Storage, int]
    outputs: tuple[Storage, ...]
    made: frozenset[Storage]
    bytes_out: int
    working: int
    writes: frozenset[Storage]
    draws: int
    needs_grad: bool
    value: Any


def measure(
    module: fx.GraphModule, inputs: Sequence[Tensor], tensor_of: Callable[[fx.Node], Any]
) -> dict[fx.Node, Reading]:
    """A reading for every node of the graph but its output.

    inputs:     of the example batch, one for each placeholder; only sizes and types count
    tensor_of:  what a `get_attr` node stands for
    """
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    readings: dict[fx.Node, Reading] = {}
    remaining = iter(inputs)
    seen = _Seen()
    with mode:
        for node in module.graph.nodes:
            if node.op == "placeholder":
                readings[node] = _given(_fake(mode, next(remaining)))
            elif node.op == "get_attr":
                readings[node] = _given(_fake(mode, tensor_of(node)))
                if isinstance(tensor_of(node), torch.nn.Parameter):
                    seen.weights.update(readings[node].outputs)
            elif node.op == "call_function":
                readings[node] = _run(node, readings, seen)
                if _only_from_weights(node, readings, seen.weights):
                    seen.weights.update(readings[node].outputs)
    return readings


def storage(tensor: Tensor) -> Storage:
    return int(tensor.untyped_storage()._cdata)


def _fake(mode: FakeTensorMode, value: Any) -> Any:
    if not isinstance(value, Tensor):
        return value
    fake = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=value.device)
    return fake.requires_grad_(value.requires_grad)


def _given(value: Any) -> Reading:
    tensors = [value] if isinstance(value, Tensor) else []
    return Reading(
        flops_forward=0,
        flops_backward=0,
        saved={},
        outputs=tuple(storage(tensor) for tensor in tensors),
        made=frozenset(),
        bytes_out=0,
        working=0,
        writes=frozenset(),
        draws=0,
        needs_grad=any(tensor.requires_grad for tensor in tensors),
        value=value,
    )


def _run(node: fx.Node, readings: Mapping[fx.Node, Reading], seen: "_Seen") -> Reading:
    """Run one op apart from the others: its inputs are leaves, so that its own backward can be counted at once.

    Of ops of one kind the first is counted; the others only run, for their results.
    """
    writes = _written(node)
    leaves: list[Tensor] = []

    def leaf(source: fx.Node) -> Any:
        value = readings[source].value
        if not isinstance(value, Tensor):
            return value if not isinstance(value, list | tuple) else pytree.tree_map_only(Tensor, alone, value)
        return alone(value, keep=source in writes)

    def alone(value: Tensor, keep: bool = False) -> Tensor:
        apart = value.detach()
        if value.requires_grad and not keep:
            apart.requires_grad_()
            leaves.append(apart)
        return apart

    arguments = fx.map_arg((node.args, node.kwargs), leaf)
    given = _given_storages(node, readings)
    kind = _kind(node, readings, given, seen.weights)
    if kind in seen.costs:
        with torch.enable_grad():
            value = _call(node.target, *arguments)
    else:
        weights = sum(_bytes(leaf) for leaf in leaves if storage(leaf) in seen.weights)
        value, seen.costs[kind] = _counted(node.target, arguments, leaves, given, weights, seen)
    cost = seen.costs[kind]
    results = _tensors(value)
    seen.alive += results
    storages = {storage(result): result for result in results}
    saved = dict(_places(cost, given, results, seen))
    needs_grad = any(result.requires_grad for result in results) or (
        bool(writes) and any(readings[source].needs_grad for source in node.all_input_nodes)
    )
    if writes and needs_grad:
        value = pytree.tree_map_only(Tensor, lambda result: result.detach().requires_grad_(), value)
    return Reading(
        flops_forward=cost.flops_forward,
        flops_backward=cost.flops_backward,
        saved=saved,
        outputs=tuple(storage(result) for result in results),
        made=frozenset((storages.keys() | saved.keys()) - set(given)),
        bytes_out=sum(_bytes(result) for place, result in storages.items() if place not in given),
        working=cost.working,
        writes=frozenset(given[number] for number in cost.writes),
        draws=cost.draws,
        needs_grad=needs_grad,
        value=value,
    )


@final
@dataclass(frozen=True, slots=True)
class _Cost:
    """What ops of one kind have in common; storages by where they come from.

    saved_inputs, saved_results:  bytes kept for the backward pass, by number among the storages given, and by number
                                  among the results; `saved_inside` are bytes of storages that only the op itself knows
    writes:                       numbers among the storages given
    """

    flops_forward: int
    flops_backward: int
    working: int
    draws: int
    saved_inputs: Mapping[int, int]
    saved_results: Mapping[int, int]
    saved_inside: tuple[int, ...]
    writes: tuple[int, ...]


@final
class _Seen:
    """What has been learned from the ops so far.

    weights:  storages of parameters, and of what is computed from parameters alone
    alive:    tensors that are kept: a storage that is freed would lend its identity to the next
    costs:    by kind of op
    """

    def __init__(self) -> None:
        self.weights: set[Storage] = set()
        self.alive: list[Tensor] = []
        self.costs: dict[object, _Cost] = {}
        self._inside = 0

    def new_storage(self) -> Storage:
        """An identity for a storage that was not looked at: below zero, where no real one is."""
        self._inside -= 1
        return self._inside


def _given_storages(node: fx.Node, readings: Mapping[fx.Node, Reading]) -> list[Storage]:
    return list(dict.fromkeys(place for source in node.all_input_nodes for place in readings[source].outputs))


def _kind(
    node: fx.Node, readings: Mapping[fx.Node, Reading], given: Sequence[Storage], weights: set[Storage]
) -> object:
    """Equal for ops of one target whose inputs have one layout and share storages in one way."""

    def layout(value: Any) -> object:
        if not isinstance(value, Tensor):
            return type(value), value
        place = storage(value)
        shape = tuple(value.shape), value.stride(), value.storage_offset()
        return given.index(place), place in weights, value.requires_grad, value.dtype, *shape

    leaves, tree = pytree.tree_flatten(fx.map_arg((node.args, node.kwargs), lambda source: readings[source].value))
    try:
        kind = node.target, tree, tuple(layout(leaf) for leaf in leaves)
        hash(kind)
    except TypeError:  # a slice, or another constant that cannot be a key
        return object()
    return kind


def _counted(
    target: Any, arguments: Sequence[Any], leaves: Sequence[Tensor], given: Sequence[Storage], weights: int, seen: _Seen
) -> tuple[Any, _Cost]:
    """Run an op and count; `weights` are the bytes of the parameters among its leaves."""
    saved: dict[Storage, int] = {}
    with _saving(saved, seen), _Counter() as forward, torch.enable_grad():
        value = _call(target, *arguments)
    results = _tensors(value)
    with _Counter() as backward:
        gradients = _backward(results, leaves)
    numbers = {place: number for number, place in enumerate(given)}
    places = {storage(result): number for number, result in enumerate(results)}
    return value, _Cost(
        flops_forward=forward.flops,
        flops_backward=backward.flops,
        working=max(forward.allocated.peak, gradients + backward.allocated.peak - weights, 0),
        draws=forward.draws,
        saved_inputs={numbers[place]: size for place, size in saved.items() if place in numbers},
        saved_results={places[place]: size for place, size in saved.items() if place in places.keys() - numbers.keys()},
        saved_inside=tuple(size for place, size in saved.items() if place not in places.keys() | numbers.keys()),
        writes=tuple(number for place, number in numbers.items() if place in forward.written),
    )


def _places(
    cost: _Cost, given: Sequence[Storage], results: Sequence[Tensor], seen: _Seen
) -> Iterator[tuple[Storage, int]]:
    """What an op saves, by storage."""
    for number, size in cost.saved_inputs.items():
        yield given[number], size
    for number, size in cost.saved_results.items():
        yield storage(results[number]), size
    for size in cost.saved_inside:
        yield seen.new_storage(), size


def _tensors(value: Any) -> list[Tensor]:
    return [leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, Tensor)]


def _stored(value: Any) -> Iterator[Tensor]:
    """The tensors in it that have a storage: a sparse one consists of two."""
    for tensor in _tensors(value):
        if tensor.layout is torch.sparse_coo:
            yield from (tensor._indices(), tensor._values())
        else:
            yield tensor


def _call(target: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    return target(*args, **kwargs)


def _backward(results: Sequence[Tensor], leaves: Sequence[Tensor]) -> int:
    """Run it; the bytes of the gradients that it is given."""
    roots = [result for result in results if result.requires_grad and result.grad_fn is not None]
    if not roots or not leaves:
        return 0
    gradients = [torch.empty_like(root) for root in roots]
    torch.autograd.grad(roots, leaves, gradients, allow_unused=True)
    return sum(_bytes(gradient) for gradient in gradients)


def _written(node: fx.Node) -> set[fx.Node]:
    """The inputs that the op says it writes to: they cannot be leaves. What it writes below that is seen as it runs."""
    if not isinstance(node.target, torch._ops.OpOverload):
        return set()
    given = pytree.tree_leaves(_written_arguments(node.target, node.args, node.kwargs))
    return {item for item in given if isinstance(item, fx.Node)}


def _written_arguments(target: torch._ops.OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Any]:
    """Those of the arguments that `target` writes to."""
    named = dict(zip((argument.name for argument in target._schema.arguments), args, strict=False)) | dict(kwargs)
    written = [
        named[argument.name]
        for argument in target._schema.arguments
        if argument.alias_info is not None and argument.alias_info.is_write and argument.name in named
    ]
    if target in _BATCH_NORMS and named["training"]:
        written += [named["running_mean"], named["running_var"]]
    return written


# Their schemas do not tell that they update the running statistics.
_BATCH_NORMS = frozenset({torch.ops.aten.native_batch_norm.default, torch.ops.aten.cudnn_batch_norm.default})


def _only_from_weights(node: fx.Node, readings: Mapping[fx.Node, Reading], weights: set[Storage]) -> bool:
    places = [place for source in node.all_input_nodes for place in readings[source].outputs]
    return bool(places) and all(place in weights for place in places)


def _bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


@contextmanager
def _saving(saved: dict[Storage, int], seen: _Seen) -> Iterator[None]:
    def pack(tensor: Tensor) -> Tensor:
        seen.alive.append(tensor.detach())
        if storage(tensor) not in seen.weights:
            saved[storage(tensor)] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        yield


@final
@dataclass
class _Counter(TorchDispatchMode):
    """Counts what is dispatched below it."""

    flops: int = 0
    draws: int = 0
    allocated: "_Allocated" = field(default_factory=lambda: _Allocated())
    written: set[Storage] = field(default_factory=set)

    def __post_init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch's class has no types

    def __torch_dispatch__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = function(*args, **(kwargs or {}))
        count = _FLOPS.get(function._overloadpacket)
        if count is not None:
            self.flops += int(count(*args, **(kwargs or {}), out_val=result))
        self.draws += torch.Tag.nondeterministic_seeded in function.tags
        self.allocated.see(result, (args, kwargs))
        written = pytree.tree_leaves(_written_arguments(function, args, kwargs or {}))
        self.written.update(storage(tensor) for tensor in _stored(written))
        return result


@final
class _Allocated:
    """Bytes of the tensors that come into being and go again."""

    def __init__(self) -> None:
        self.peak = 0
        self._live = 0
        self._known: dict[Storage, weakref.ref[Any]] = {}

    def see(self, result: Any, given: Any) -> None:
        before = {storage(tensor) for tensor in _stored(given)}
        for tensor in _stored(result):
            place = storage(tensor)
            if place not in before and place not in self._known:
                self._add(place, tensor.untyped_storage())
        self.peak = max(self.peak, self._live)

    def _add(self, place: Storage, made: torch.UntypedStorage) -> None:
        size = made.nbytes()

        def gone(_: object) -> None:
            self._live -= size
            del self._known[place]

        self._known[place] = weakref.ref(made, gone)
        self._live += size


def _cpu_attention(query: Tensor, key: Tensor, value: Tensor, *_: Any, **__: Any) -> int:
    return int(sdpa_flop_count(query.shape, key.shape, value.shape))


def _cpu_attention_backward(gradient: Tensor, query: Tensor, key: Tensor, value: Tensor, *_: Any, **__: Any) -> int:
    return int(sdpa_backward_flop_count(gradient.shape, query.shape, key.shape, value.shape))


# torch has no formula for the fused attention of CPUs.
_FLOPS: dict[Any, Callable[..., int]] = {
    **flop_registry,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: _cpu_attention,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward: _cpu_attention_backward,
}
