"""Gradients of a step: summed over replicas and tied copies, divided by the weight, and their true norm."""

from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import final

import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch.distributed.tensor import DTensor

from shardwise.errors import PlanError
from shardwise.runtime.host_sum import host_sum

BUCKET_BYTES = 25 * 2**20  # large enough to fill a link, small enough to start early


@final
class ReplicaSum:
    """Sums gradients over replicas while the last backward pass is still running.

    Parameters are shared out over buckets in the order in which their gradients come; a bucket starts once all its
    gradients of the last micro-batch are there and the buckets before it have started, so that all ranks start them in
    one order whatever their branches do. What no gradient came for joins in at the end, with zeros. A parameter that no
    rank used keeps no gradient.

    A gradient moves into its bucket as it comes, still in the cache, and what autograd made for it is free at once: the
    buckets are the only memory of gradients, kept from step to step.

    CPU ranks of one machine sum behind the backward pass, through memory that they share: there is nothing to hide, for
    whatever moves the numbers takes its time from the same cores.
    """

    def __init__(
        self, parameters: Mapping[str, nn.Parameter], group: dist.ProcessGroup, stages: Iterable[Collection[str]]
    ) -> None:
        """stages:  the names that each stage of this rank reads: a gradient is whole behind the last of its stages"""
        self._parameters = dict(reversed([(name, p) for name, p in parameters.items() if p.requires_grad]))
        self._group = group
        self._stages_of = Counter(name for names in stages for name in names)
        parts = _split(self._parameters)
        like = [(sum(p.numel() for p in part.values()), next(iter(part.values()))) for part in parts]
        on_cpu = all(p.device.type == "cpu" for p in self._parameters.values())
        self._host = host_sum([(length, p.dtype) for length, p in like], group) if on_cpu else None
        flats = (
            [torch.empty(length, dtype=p.dtype, device=p.device) for length, p in like]
            if self._host is None
            else self._host.own
        )
        self._buckets = [_Bucket(part, flat) for part, flat in zip(parts, flats, strict=True)]
        self._bucket_of = {name: bucket for bucket in self._buckets for name in bucket.views}
        for name, parameter in self._parameters.items():
            parameter.register_post_accumulate_grad_hook(lambda _, name=name: self._came(name))
        self._reset()

    def arm(self, names: Collection[str]) -> None:
        """The next backward pass is the last of the step for a stage with these parameters: their buckets may start."""
        for name in names:
            self._left[name] -= 1
            if name in self._parameters and self._left[name] == 0:
                self._armed.add(name)

    def complete(self, names: Collection[str]) -> None:
        """No gradient comes any more for these."""
        for name in names:
            self._ready(name)

    def finish(self) -> None:
        """Start what has not started, and wait: every gradient is the sum over replicas."""
        used = torch.tensor([p.grad is not None for p in self._parameters.values()], dtype=torch.int32)
        used = used.to(next(iter(self._parameters.values())).device) if self._parameters else used
        self._armed.update(self._parameters)
        self.complete(self._parameters)
        work = dist.all_reduce(used, dist.ReduceOp.MAX, self._group, async_op=True)
        assert work is not None
        for each in (*self._works, work):
            each.wait()
        if self._host is not None:
            self._host.sum()
        for (name, parameter), by_any in zip(self._parameters.items(), used.tolist(), strict=True):
            parameter.grad = self._bucket_of[name].views[name] if by_any else None
        self._reset()

    def _reset(self) -> None:
        self._armed: set[str] = set()
        self._left = self._stages_of.copy()
        self._started = 0
        self._works: list[dist.Work] = []
        for bucket in self._buckets:
            bucket.missing.update(bucket.views)

    def _came(self, name: str) -> None:
        self._bucket_of[name].take(name)
        self._ready(name)

    def _ready(self, name: str) -> None:
        if name in self._armed:
            self._bucket_of[name].missing.discard(name)
            self._start_ready()

    def _start_ready(self) -> None:
        for bucket in self._buckets[self._started :]:
            if bucket.missing:
                return
            self._started += 1
            bucket.clear_unused()
            if self._host is not None:
                continue
            work = dist.all_reduce(bucket.flat, group=self._group, async_op=True)
            assert work is not None
            self._works.append(work)


@final
class _Bucket:
    """Gradients of one type in one tensor, that are summed together.

    views:    of each parameter's part, in its shape
    missing:  names of parameters whose gradient is not whole yet
    """

    def __init__(self, parameters: Mapping[str, nn.Parameter], flat: Tensor) -> None:
        sizes = [parameter.numel() for parameter in parameters.values()]
        self.flat = flat
        parts = zip(parameters.items(), flat.split(sizes), strict=True)
        self.views = {name: part.view(parameter.shape) for (name, parameter), part in parts}
        self.missing: set[str] = set()
        self._parameters = parameters

    def take(self, name: str) -> None:
        """Move the gradient of a parameter here, unless it is: later micro-batches add to it in place."""
        parameter, view = self._parameters[name], self.views[name]
        gradient = parameter.grad
        if gradient is not None and gradient.is_sparse:
            raise PlanError(
                f"{name} has a sparse gradient, which replicas cannot sum: make its module with sparse=False, and take "
                "an optimizer for dense gradients; or plan without replicas"
            )
        if gradient is not None and gradient.data_ptr() != view.data_ptr():
            view.copy_(gradient)
            parameter.grad = view

    def clear_unused(self) -> None:
        for name, parameter in self._parameters.items():
            if parameter.grad is None:
                self.views[name].zero_()


def _split(parameters: Mapping[str, nn.Parameter]) -> list[dict[str, nn.Parameter]]:
    """In order, of one type and about BUCKET_BYTES together."""
    parts: list[dict[str, nn.Parameter]] = []
    size, dtype = 0, None
    for name, parameter in parameters.items():
        if not parts or size >= BUCKET_BYTES or parameter.dtype != dtype:
            parts.append({})
            size, dtype = 0, parameter.dtype
        parts[-1][name] = parameter
        size += parameter.numel() * parameter.element_size()
    return parts


def sum_tied(copies: Sequence[tuple[nn.Parameter, dist.ProcessGroup]]) -> None:
    """Give every stage's copy of a tied parameter the sum of the gradients of all copies.

    copies:  this rank's, each with the group of the ranks that have one, in the same order on all of them
    """
    for parameter, group in copies:
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        dist.all_reduce(local(parameter.grad), group=group)


def divide(parameters: Sequence[nn.Parameter], by: float) -> None:
    gradients = [local(p.grad) for p in parameters if p.grad is not None]
    if gradients and by != 1.0:
        torch._foreach_div_(gradients, by)


def square(counted: Sequence[nn.Parameter], device: torch.device) -> Tensor:
    """The squares of all numbers of these parameters' gradients, summed: a scalar of float64.

    A norm of half precision is taken in float32: the loss scale is still in it, which float16 has no room for.
    """
    of_type: dict[torch.dtype, list[Tensor]] = defaultdict(list)
    for gradient in (local(p.grad) for p in counted if p.grad is not None):
        if gradient.numel():
            of_type[gradient.dtype].append(gradient)
    total = torch.zeros((), dtype=torch.float64, device=device)
    for dtype, gradients in of_type.items():
        norms = torch._foreach_norm(gradients, 2, torch.promote_types(dtype, torch.float32))
        total += torch.stack(norms).double().square().sum()
    return total


def local(tensor: Tensor) -> Tensor:
    """The part of a sharded tensor that is here."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
