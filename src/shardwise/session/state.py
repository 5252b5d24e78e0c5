"""A session as what a checkpoint holds, and back: everything that makes the next step the same."""

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch import distributed as dist

from shardwise.checkpoint import (
    Checkpoint,
    flatten_optimizer,
    load_part,
    optimizer_skeleton,
    restore_optimizer,
    save,
)
from shardwise.errors import CheckpointError
from shardwise.job import Job
from shardwise.runtime import Engine


def save_engine(
    engine: Engine, folder: Path, step: int, job: Mapping[str, Any], data: Mapping[str, Any] | None
) -> Path:
    """Write a checkpoint of the state after `step` steps; every rank calls it.

    data:  the position in the data, which is of what was used
    """
    state = _model_state(engine, buffers=engine.mesh.data_rank == 0)
    if engine.optimizer is not None:
        state |= flatten_optimizer(engine.optimizer, _names(engine))
    state[_random_key()] = torch.get_rng_state()
    meta = {
        "step": step,
        "job": dict(job),
        "data": data,
        "scheduler": _first(_scheduler_state(engine)),
        "loss_scale": [engine.loss_scale.value, engine.loss_scale.good_steps],
    }
    return save(folder, step, state, meta)


def load_engine(engine: Engine, checkpoint: Checkpoint, job: Mapping[str, Any]) -> Mapping[str, Any]:
    """Fill `engine` with the state of `checkpoint`, whatever plan wrote it; every rank calls it. Returns its meta.

    raises:  CheckpointError where it is of another job
    """
    different = [
        f"{key}: {checkpoint.meta['job'].get(key)!r} there, {value!r} here"
        for key, value in job.items()
        if checkpoint.meta["job"].get(key) != value
    ]
    if different:
        raise CheckpointError(
            f"{checkpoint.path} is of another job ({'; '.join(different)}); choose another run folder with --run, or "
            "start over with --fresh"
        )
    state = _model_state(engine, buffers=True)
    if engine.optimizer is not None:
        state |= optimizer_skeleton(engine.optimizer, _names(engine), checkpoint.entries)
    random = torch.get_rng_state()
    if _random_key() in checkpoint.entries:
        state[_random_key()] = random
    load_part(checkpoint, state)
    if engine.optimizer is not None:
        restore_optimizer(engine.optimizer, _names(engine), state)
    torch.set_rng_state(random)
    meta = checkpoint.meta
    if engine.scheduler is not None and meta["scheduler"] is not None:
        engine.scheduler.load_state_dict({**engine.scheduler.state_dict(), **meta["scheduler"]})
    engine.loss_scale.value, engine.loss_scale.good_steps = meta["loss_scale"]
    return meta


def describe_job(job: Job, engine: Engine) -> dict[str, Any]:
    """What must be equal for a checkpoint to be of the same job."""
    shapes = sorted((name, tuple(p.shape)) for name, p in engine.program.parameters.items())
    everywhere: list[Any] = [shapes]
    if dist.is_initialized():
        everywhere = [None] * dist.get_world_size()
        dist.all_gather_object(everywhere, shapes)
    parameters = sorted({(name, tuple(shape)) for part in everywhere for name, shape in part})
    return {
        "batch_size": job.batch_size,
        "precision": job.precision,
        "clip_grad_norm": job.clip_grad_norm,
        "seed": job.seed,
        "parameters": hashlib.blake2b(repr(parameters).encode(), digest_size=8).hexdigest(),
    }


def _model_state(engine: Engine, *, buffers: bool) -> dict[str, Tensor]:
    """Replicas update buffers each for itself: those of the first are kept, and all are filled."""
    held: dict[str, Tensor] = {name: p.detach() for name, p in engine.program.parameters.items()}
    if buffers:
        held |= engine.program.buffers
    return {f"model/{name}": tensor for name, tensor in held.items()}


def _names(engine: Engine) -> dict[Any, str]:
    return {parameter: name for name, parameter in engine.program.parameters.items()}


def _random_key() -> str:
    return f"random/rank-{dist.get_rank() if dist.is_initialized() else 0}"


def _scheduler_state(engine: Engine) -> dict[str, Any] | None:
    """Its numbers. Learning rates by group are the optimizer's, since each stage has groups of its own."""
    if engine.scheduler is None:
        return None
    state: dict[str, Any] = _numbers(engine.scheduler.state_dict())
    return state


def _numbers(value: Any) -> Any:
    """What JSON can hold of a scheduler's state, schedulers inside it included."""
    if isinstance(value, Mapping):
        return {key: _numbers(item) for key, item in value.items() if key not in _BY_GROUP and _is_plain(item)}
    if isinstance(value, list | tuple):
        return [_numbers(item) for item in value]
    return value


def _is_plain(value: Any) -> bool:
    if isinstance(value, Mapping | list | tuple):
        return all(_is_plain(item) for item in (value.values() if isinstance(value, Mapping) else value))
    return isinstance(value, int | float | bool | str | type(None))


_BY_GROUP = ("base_lrs", "_last_lr")


def _first(state: dict[str, Any] | None) -> dict[str, Any] | None:
    """The state of the first rank that has one: stages without trained parameters have none."""
    if not dist.is_initialized():
        return state
    everywhere: list[dict[str, Any] | None] = [None] * dist.get_world_size()
    dist.all_gather_object(everywhere, state)
    return next((each for each in everywhere if each is not None), None)
