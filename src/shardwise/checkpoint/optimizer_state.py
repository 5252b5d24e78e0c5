"""Name an optimizer's state by its parameters, so that it survives another plan.

    optimizer/<parameter>/exp_avg                 a tensor of the state, as it is
    optimizer/<parameter>/count:int               a plain number (int, float, bool) or None, with its type
    optimizer/<parameter>/hyperparameters:json    lr, betas, ... of the parameter's group, as UTF-8 bytes

Hyperparameters go with each parameter rather than with each group, because a stage that holds no parameter of a group
may not have that group, and groups then count differently. What says how a step is computed and not what it computes
(`foreach`, `fused`, `capturable`, `differentiable`) belongs to the device at hand and is not saved.
"""

import json
from collections.abc import Iterator, Mapping
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate
from torch.optim import Optimizer

from shardwise.checkpoint.tensors import Entry
from shardwise.errors import CheckpointError

Names: TypeAlias = Mapping[Tensor, str]
"""From a parameter to its name in the one-device model."""

_HYPERPARAMETERS = "hyperparameters:json"
_NOT_SAVED = frozenset({"params", "param_names", "foreach", "fused", "capturable", "differentiable"})
_PLAIN_TYPES = {"bool": torch.bool, "int": torch.int64, "float": torch.float64}


def flatten_optimizer(optimizer: Optimizer, names: Names) -> dict[str, Tensor]:
    """The state and hyperparameters of `optimizer` as flat tensors; tensors of the state are shared, not copied.

    raises:  CheckpointError where the state holds what is neither tensor nor number, or is of no parameter
    """
    _refuse_state_of_no_parameter(optimizer)
    flat: dict[str, Tensor] = {}
    for parameter, name, group in _named(optimizer, names):
        flat[_key(name, _HYPERPARAMETERS)] = _to_bytes(name, group)
        for part, value in optimizer.state.get(parameter, {}).items():
            suffix, tensor = _to_tensor(name, part, value)
            flat[_key(name, part + suffix)] = tensor
    return flat


def optimizer_skeleton(optimizer: Optimizer, names: Names, entries: Mapping[str, Entry]) -> dict[str, Tensor]:
    """Tensors to load into, for just that state which the checkpoint's `entries` hold of these parameters.

    State that the optimizer has already is reused; the rest is new and zero (before its first step an optimizer has
    none), laid out as the parameter where it has the parameter's shape, and else whole on each rank. The optimizer is
    not changed: after loading, `restore_optimizer` puts the tensors in.
    """
    parts = _parts_by_name(entries)
    skeleton: dict[str, Tensor] = {}
    for parameter, name, group in _named(optimizer, names):
        for part in {_HYPERPARAMETERS, *parts.get(name, ())}:
            key = _key(name, part)
            present = optimizer.state.get(parameter, {}).get(part)
            skeleton[key] = _target(parameter, part, entries.get(key, Entry((0,), torch.uint8)), present, group)
    return skeleton


def restore_optimizer(optimizer: Optimizer, names: Names, flat: Mapping[str, Tensor]) -> None:
    """Make `flat` the state of `optimizer`: the inverse of `flatten_optimizer`; other names in `flat` are passed over.

    Tensors are taken as they are, without the cast to the parameter's type that Optimizer.load_state_dict makes. State
    that `flat` does not have is dropped. A hyperparameter that is a tensor is filled in place.

    raises:  CheckpointError where a parameter is not in `flat`, or parameters of one group were saved with different
             hyperparameters
    """
    parts = _parts_by_name(flat)
    saved_groups = {name: _saved_hyperparameters(name, flat) for _, name, _ in _named(optimizer, names)}
    for group in optimizer.param_groups:
        _restore_group(group, [names[parameter] for parameter in group["params"]], saved_groups)
    for parameter, name, _ in _named(optimizer, names):
        found = dict(_from_tensor(part, flat[_key(name, part)]) for part in parts[name] if part != _HYPERPARAMETERS)
        if found:
            optimizer.state[parameter] = found
        else:
            optimizer.state.pop(parameter, None)


def _named(optimizer: Optimizer, names: Names) -> Iterator[tuple[Tensor, str, dict[str, Any]]]:
    for number, group in enumerate(optimizer.param_groups):
        for parameter in group["params"]:
            if parameter not in names:
                raise ValueError(
                    f"names lacks a parameter of shape {tuple(parameter.shape)} in group {number} of the optimizer; "
                    "name every parameter that the optimizer was made of"
                )
            yield parameter, names[parameter], group


def _refuse_state_of_no_parameter(optimizer: Optimizer) -> None:
    known = {parameter for group in optimizer.param_groups for parameter in group["params"]}
    strange = [key for key in optimizer.state if key not in known]
    if strange:
        raise CheckpointError(
            f"{type(optimizer).__name__} keeps state under {strange[0]!r}, which is no parameter of it, so no name "
            "under which another plan would find it; keep it with a parameter, or save it yourself in meta"
        )


def _key(name: str, part: str) -> str:
    return f"optimizer/{name}/{part}"


def _parts_by_name(keys: Mapping[str, object]) -> dict[str, list[str]]:
    parts: dict[str, list[str]] = {}
    for key in sorted(keys):
        if key.startswith("optimizer/"):
            name, _, part = key.removeprefix("optimizer/").rpartition("/")
            parts.setdefault(name, []).append(part)
    return parts


def _to_tensor(name: str, part: str, value: object) -> tuple[str, Tensor]:
    """The suffix that tells the type of a plain value, and the tensor that holds it."""
    if not isinstance(part, str) or "/" in part or ":" in part:
        raise CheckpointError(f"the optimizer calls a state of {name!r} {part!r}; use a name without '/' and ':'")
    if isinstance(value, Tensor):
        return "", value
    if value is None:
        return ":none", torch.empty(0, dtype=torch.uint8)
    kind = type(value).__name__
    if kind not in _PLAIN_TYPES:
        raise CheckpointError(
            f"the optimizer keeps {part!r} of {name!r} as {kind}; only tensors, numbers and None can be saved"
        )
    return f":{kind}", torch.tensor(value, dtype=_PLAIN_TYPES[kind])


def _from_tensor(part: str, tensor: Tensor) -> tuple[str, Any]:
    plain_part, _, kind = part.partition(":")
    if not kind:
        return part, tensor
    return plain_part, None if kind == "none" else tensor.item()


def _target(parameter: Tensor, part: str, entry: Entry, present: object, group: Mapping[str, Any]) -> Tensor:
    if isinstance(present, Tensor) and (tuple(present.shape), present.dtype) == (entry.shape, entry.dtype):
        return present
    if ":" in part:
        return torch.zeros(entry.shape, dtype=entry.dtype)
    if part == "step":  # as Optimizer.load_state_dict has it: on the host, except where the step runs on the device
        on_device = group.get("capturable") or group.get("fused")
        return torch.zeros(entry.shape, dtype=entry.dtype, device=parameter.device if on_device else "cpu")
    if entry.shape == tuple(parameter.shape):
        return torch.zeros_like(parameter, dtype=entry.dtype, requires_grad=False)
    whole = torch.zeros(entry.shape, dtype=entry.dtype, device=parameter.device)
    if not isinstance(parameter, DTensor) or not entry.shape:
        return whole
    mesh = parameter.device_mesh
    return DTensor.from_local(whole, mesh, [Replicate()] * mesh.ndim, run_check=False)


def _to_bytes(name: str, group: Mapping[str, Any]) -> Tensor:
    saved = {key: _to_json(name, key, value) for key, value in group.items() if key not in _NOT_SAVED}
    return torch.frombuffer(bytearray(json.dumps(saved, sort_keys=True), "utf-8"), dtype=torch.uint8)


def _to_json(name: str, key: str, value: object) -> Any:
    if isinstance(value, Tensor) and value.numel() == 1:
        return value.item()
    if isinstance(value, list | tuple):
        return [_to_json(name, key, part) for part in value]
    if value is None or isinstance(value, bool | int | float | str):
        return value
    raise CheckpointError(
        f"the hyperparameter {key!r} of {name!r} is {type(value).__name__}; only numbers, text, None and lists of them "
        "can be saved"
    )


def _saved_hyperparameters(name: str, flat: Mapping[str, Tensor]) -> dict[str, Any]:
    key = _key(name, _HYPERPARAMETERS)
    if key not in flat:
        raise CheckpointError(
            f"{key!r} is missing: no optimizer state of {name!r} was saved; load what was saved of it"
        )
    saved: dict[str, Any] = json.loads(bytes(flat[key].tolist()))
    return saved


def _restore_group(group: dict[str, Any], names: list[str], saved: Mapping[str, dict[str, Any]]) -> None:
    for name in names[1:]:
        if saved[name] != saved[names[0]]:
            raise CheckpointError(
                f"one group of the optimizer holds {names[0]!r}, saved with {saved[names[0]]}, and {name!r}, saved "
                f"with {saved[name]}; group the parameters as they were when saved"
            )
    if names:
        group.update({key: _like(group.get(key), value) for key, value in saved[names[0]].items()})


def _like(present: object, saved: Any) -> Any:
    """`saved`, in the type that the optimizer holds now: JSON knows neither tuples nor tensors."""
    if isinstance(present, Tensor):
        return present.fill_(saved)
    if isinstance(present, tuple):
        return tuple(_like(old, new) for old, new in zip(present, saved, strict=True))
    return saved
