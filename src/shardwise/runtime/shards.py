"""Shard parameters by FSDP2, and tell which of them a step used."""

from collections.abc import Callable, Mapping, Sequence
from typing import final

import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard

from shardwise.errors import PlanError
from shardwise.plan import Plan


def shard(modules: Sequence[nn.Module], mesh: DeviceMesh, plan: Plan) -> list[FSDPModule]:
    """Shard `modules`, inner ones first; returns them outermost first. Gradients are summed, not averaged.

    A parameter that is a single number stays whole on every rank: there is nothing to shard.

    raises:  PlanError where a parameter has a gradient hook: FSDP2 puts another parameter into its place
    """
    sharded: list[FSDPModule] = []
    for module in modules:
        for name, parameter in module.named_parameters():
            if parameter._backward_hooks or getattr(parameter, "_post_accumulate_grad_hooks", None):
                raise PlanError(
                    f"parameter {name} has a gradient hook, which sharding would lose; plan with replicas or stages"
                )
        numbers = {parameter for parameter in module.parameters() if parameter.dim() == 0}
        fully_shard(
            module, mesh=mesh, reshard_after_forward=plan.shard_mode == "regathered", ignored_params=numbers or None
        )
        assert isinstance(module, FSDPModule)
        module.set_gradient_divide_factor(1.0)
        module.set_force_sum_reduction_for_comms(True)
        module.set_reduce_scatter_unused_params(True)
        sharded.append(module)
    return sharded[::-1]


@final
class UsedShards:
    """Takes away the gradient of what no rank used in a step.

    FSDP2 reduces zeros for it; an optimizer that finds a gradient of zeros moves the parameter nevertheless, by its
    momentum or weight decay, where one device would leave it alone.

    parameters:  sharded ones, by name
    group:       the ranks that share the samples of a step
    """

    def __init__(
        self, sharded: Sequence[FSDPModule], parameters: Mapping[str, nn.Parameter], group: dist.ProcessGroup
    ) -> None:
        self._parameters = parameters
        self._group = group
        self._used: set[str] = set()
        for module in sharded:
            self._watch(module)

    def finish(self) -> None:
        """Gradients are reduced: keep those of what some rank used."""
        used = torch.tensor([name in self._used for name in self._parameters], dtype=torch.int32)
        self._used.clear()
        used = used.to(next(iter(self._parameters.values())).device)
        dist.all_reduce(used, dist.ReduceOp.MAX, self._group)
        for parameter, by_any in zip(self._parameters.values(), used.tolist(), strict=True):
            if not by_any:
                parameter.grad = None

    def _watch(self, module: FSDPModule) -> None:
        """Gradients come to the gathered parameters, which stand in the place of the shards while these are gathered.

        FSDP2 makes them once and then only frees and fills their memory, so that a hook stays.
        """
        assert isinstance(module, nn.Module)
        names = {id(parameter): name for name, parameter in self._parameters.items()}
        places = [
            (part, key, names[id(parameter)])
            for part in module.modules()
            for key, parameter in part._parameters.items()
            if id(parameter) in names
        ]
        module.unshard()
        for part, key, name in places:
            gathered = part._parameters[key]
            if gathered is not None and gathered is not self._parameters[name]:
                gathered.register_post_accumulate_grad_hook(self._note(name))
        module.reshard()

    def _note(self, name: str) -> Callable[[Tensor], None]:
        return lambda _: self._used.add(name)
