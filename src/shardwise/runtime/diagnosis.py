"""Where a loss that is not finite began: the forward pass once more, looking at what each part gives."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from shardwise.runtime.stage import GraphStage, Stage, WholeStage


@final
@dataclass
class Inspection:
    """The first part on this rank that gave something that is not finite, as (micro-batch, stage, part)."""

    found: list[tuple[int, int, str]] = field(default_factory=list)

    def look(self, micro_batch: int, stage: int, part: str, outputs: Any) -> None:
        tensors = [leaf for leaf in pytree.tree_leaves(outputs) if isinstance(leaf, Tensor)]
        if any(tensor.is_floating_point() and not bool(torch.isfinite(tensor).all()) for tensor in tensors):
            self.found.append((micro_batch, stage, part))


@contextmanager
def inspecting(stages: Mapping[int, Stage]) -> Iterator[Inspection]:
    """Look at the outputs of every segment, or of every module where the user's module runs as it is."""
    inspection = Inspection()
    with ExitStack() as stack:
        for number, stage in stages.items():
            if isinstance(stage, GraphStage):
                stack.enter_context(_segments(stage, number, inspection))
            elif isinstance(stage, WholeStage):
                for name, module in stage.model.named_modules():
                    if not any(True for _ in module.children()):
                        handle = module.register_forward_hook(_hook(inspection, number, name))
                        stack.callback(handle.remove)
        yield inspection


@contextmanager
def _segments(stage: GraphStage, number: int, inspection: Inspection) -> Iterator[None]:
    stage.look = lambda micro_batch, part, outputs: inspection.look(micro_batch, number, part, outputs)
    try:
        yield
    finally:
        stage.look = None


def _hook(inspection: Inspection, number: int, name: str) -> Callable[[nn.Module, Any, Any], None]:
    def hook(module: nn.Module, inputs: Any, outputs: Any) -> None:
        inspection.look(0, number, name, outputs)

    return hook
