"""Recompute whole modules: keep only their inputs, and run them again in the backward pass."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint


def recomputed(
    function: Callable[..., Any], buffers: Sequence[Tensor], *inputs: Any, own_draws: bool, **keywords: Any
) -> Any:
    """`function(*inputs)`, which runs again in the backward pass; `buffers` are updated by the first run only.

    own_draws:  whether the random ops seed themselves; else they are given the same random state again
    """

    def contexts() -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
        return nullcontext(), _unchanged(buffers)

    return checkpoint(
        function, *inputs, use_reentrant=False, preserve_rng_state=not own_draws, context_fn=contexts, **keywords
    )


def recompute_module(module: nn.Module) -> None:
    """Let every training call of `module` be recomputed."""
    forward = module.forward

    def again(*inputs: Any, **keywords: Any) -> Any:
        if not (module.training and torch.is_grad_enabled()):
            return forward(*inputs, **keywords)
        return recomputed(forward, list(module.buffers()), *inputs, own_draws=False, **keywords)

    module.forward = again


@contextmanager
def _unchanged(buffers: Sequence[Tensor]) -> Iterator[None]:
    kept = [buffer.clone() for buffer in buffers]
    try:
        yield
    finally:
        with torch.no_grad():
            for buffer, before in zip(buffers, kept, strict=True):
                buffer.copy_(before)
