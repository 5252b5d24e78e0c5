"""Fill parameters and buffers from a folder of safetensors files, each rank its own part."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor

from shardwise.errors import CheckpointError
from shardwise.graph.names import named_tensors


def fill(tensors: Mapping[str, Tensor], names: Mapping[str, tuple[str, ...]], folder: Path) -> None:
    """Copy into `tensors` what the files of `folder` hold under their names.

    names:   for each tensor to fill, the names that it goes by in the model: of a tied one, any may be in the files
    raises:  CheckpointError where the folder, a name or a shape does not fit
    """
    where = _index(folder)
    wanted = {name: tensor for name, tensor in tensors.items() if name in names}
    missing = [name for name in wanted if not any(alias in where for alias in names[name])]
    if missing:
        raise CheckpointError(
            f"{folder} does not hold {len(missing)} of the model's tensors: {', '.join(missing[:3])}"
            f"{', ...' if len(missing) > 3 else ''}; it holds names like {', '.join(sorted(where)[:3])}"
        )
    for name, tensor in wanted.items():
        alias = next(alias for alias in names[name] if alias in where)
        _copy(tensor, _read(where[alias], alias), name, where[alias])


def names_of(model: nn.Module) -> dict[str, tuple[str, ...]]:
    """Every name of each parameter and buffer that a state dict holds, by the first."""
    saved = model.state_dict().keys()
    names: dict[int, list[str]] = {}
    for name, tensor in named_tensors(model):
        names.setdefault(id(tensor), []).append(name)
    return {found[0]: tuple(found) for found in names.values() if found[0] in saved}


def _index(folder: Path) -> dict[str, Path]:
    """The file of each name."""
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise CheckpointError(f"{folder} holds no *.safetensors file; give the folder that does, or leave weights out")
    where: dict[str, Path] = {}
    for file in files:
        with _open(file) as content:
            where.update(dict.fromkeys(content.keys(), file))
    return where


def _open(file: Path) -> Any:
    try:
        from safetensors import safe_open
    except ImportError as error:
        raise CheckpointError("Job.weights needs the package safetensors: pip install 'shardwise[weights]'") from error
    return safe_open(str(file), framework="pt")


def _read(file: Path, name: str) -> Tensor:
    with _open(file) as content:
        found: Tensor = content.get_tensor(name)
        return found


def _copy(tensor: Tensor, value: Tensor, name: str, file: Path) -> None:
    if tuple(tensor.shape) != tuple(value.shape):
        raise CheckpointError(f"{name} has shape {tuple(tensor.shape)}, but {tuple(value.shape)} in {file}")
    with torch.no_grad():
        if isinstance(tensor, DTensor):
            # Every rank reads the file, so nothing has to be sent.
            part = distribute_tensor(
                value.to(tensor.device, tensor.dtype), tensor.device_mesh, tensor.placements, src_data_rank=None
            )
            tensor.to_local().copy_(part.to_local())
        else:
            tensor.copy_(value)
