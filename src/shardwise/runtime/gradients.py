"""Gradients of a step: summed over replicas and tied copies, divided by the weight, and their true norm."""

from collections.abc import Collection, Mapping, Sequence
from typing import final

import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch.distributed.tensor import DTensor

BUCKET_BYTES = 25 * 2**20  # large enough to fill a link, small enough to start early


@final
class ReplicaSum:
    """Sums gradients over replicas while the last backward pass is still running.

    Parameters are shared out over buckets in the order in which their gradients come; a bucket starts once all its
    gradients of the last micro-batch are there and the buckets before it have started, so that all ranks start them in
    one order whatever their branches do. What no gradient came for joins in at the end, with zeros. A parameter that no
    rank used keeps no gradient.
    """

    def __init__(self, parameters: Mapping[str, nn.Parameter], group: dist.ProcessGroup) -> None:
        self._parameters = dict(reversed([(name, p) for name, p in parameters.items() if p.requires_grad]))
        self._group = group
        self._buckets = _buckets(self._parameters)
        self._bucket_of = {name: at for at, bucket in enumerate(self._buckets) for name in bucket}
        self._flats: dict[int, Tensor] = {}
        for name, parameter in self._parameters.items():
            parameter.register_post_accumulate_grad_hook(lambda _, name=name: self._came(name))
        self._reset()

    def arm(self, names: Collection[str]) -> None:
        """The next backward pass is the last of the step for these parameters: their buckets may start."""
        self._armed.update(name for name in names if name in self._parameters)

    def complete(self, names: Collection[str]) -> None:
        """No gradient comes any more for these."""
        for name in names:
            self._came(name)

    def finish(self) -> None:
        """Start what has not started, and wait: every gradient is the sum over replicas."""
        used = torch.tensor([p.grad is not None for p in self._parameters.values()], dtype=torch.int32)
        used = used.to(next(iter(self._parameters.values())).device) if self._parameters else used
        self.arm(self._parameters)
        self.complete(self._parameters)
        dist.all_reduce(used, dist.ReduceOp.MAX, self._group)
        by_any = dict(zip(self._parameters, used.tolist(), strict=True))
        for work, flat, names in self._works:
            work.wait()
            for name, part in zip(names, flat.split([self._parameters[n].numel() for n in names]), strict=True):
                parameter = self._parameters[name]
                parameter.grad = part.view(parameter.shape) if by_any[name] else None
        self._reset()

    def _reset(self) -> None:
        self._armed: set[str] = set()
        self._missing = [set(bucket) for bucket in self._buckets]
        self._works: list[tuple[dist.Work, Tensor, Sequence[str]]] = []

    def _came(self, name: str) -> None:
        if name in self._armed:
            self._missing[self._bucket_of[name]].discard(name)
            self._start_ready()

    def _flat(self, at: int, parts: Sequence[Tensor]) -> Tensor:
        """The gradients of a bucket in one tensor, kept from step to step: new memory is slow to come by."""
        size = sum(part.numel() for part in parts)
        if at not in self._flats or self._flats[at].numel() != size:
            self._flats[at] = torch.empty(size, dtype=parts[0].dtype, device=parts[0].device)
        return torch.cat(list(parts), out=self._flats[at])

    def _start_ready(self) -> None:
        for at in range(len(self._works), len(self._buckets)):
            if self._missing[at]:
                return
            names = self._buckets[at]
            parameters = [self._parameters[name] for name in names]
            parts = [(torch.zeros_like(p) if p.grad is None else p.grad).reshape(-1) for p in parameters]
            flat = self._flat(at, parts)
            work = dist.all_reduce(flat, group=self._group, async_op=True)
            assert work is not None
            self._works.append((work, flat, names))


def _buckets(parameters: Mapping[str, nn.Parameter]) -> list[list[str]]:
    """Names in order, of one type and about BUCKET_BYTES together."""
    buckets: list[list[str]] = []
    size, dtype = 0, None
    for name, parameter in parameters.items():
        if not buckets or size >= BUCKET_BYTES or parameter.dtype != dtype:
            buckets.append([])
            size, dtype = 0, parameter.dtype
        buckets[-1].append(name)
        size += parameter.numel() * parameter.element_size()
    return buckets


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


def norm(counted: Sequence[nn.Parameter], group: dist.ProcessGroup | None, device: torch.device) -> float:
    """The 2-norm of the gradient of the whole model.

    counted:  this rank's parameters, a tied one on one rank only
    group:    the ranks that hold one copy of the model between them
    """
    gradients = [local(p.grad) for p in counted if p.grad is not None and local(p.grad).numel()]
    squares = torch.zeros((), dtype=torch.float64, device=device)
    for part in torch._foreach_norm(gradients) if gradients else ():
        squares += part.double() ** 2
    if group is not None:
        dist.all_reduce(squares, group=group)
    return float(squares.sqrt())


def local(tensor: Tensor) -> Tensor:
    """The part of a sharded tensor that is here."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
