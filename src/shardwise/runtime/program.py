"""What one rank holds of a job: its stages, and their parameters by one-device names."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from shardwise.errors import PlanError
from shardwise.graph import Graph, Ports, autocast, cut
from shardwise.job import Job, objective
from shardwise.plan import Plan
from shardwise.runtime.construction import Construction
from shardwise.runtime.mesh import Mesh
from shardwise.runtime.recompute import recompute_module
from shardwise.runtime.routes import whole
from shardwise.runtime.shards import shard
from shardwise.runtime.stage import Stage, WholeStage
from shardwise.runtime.variants import Found, Variant, Variants, Weighs, graph_stage, make_variant
from shardwise.runtime.weights import BatchWeights


@final
@dataclass(frozen=True)
class Program:
    """The stages of one rank, placed on its device.

    parameters:  those that this rank holds, by name; sharded ones as DTensors. The first pipeline rank also holds what
                 no stage reads
    buffers:     likewise
    owners:      of each parameter that several pipeline ranks hold, those ranks, in order
    trained:     of each parameter of the model, whether it is trained
    of_stage:    names of the parameters of each stage of this rank
    sharded:     modules of FSDP2, the outermost of each stage first
    whole:       the only stage of a plan that runs the user's module
    variants:    of the loss, where it was captured
    """

    parameters: Mapping[str, nn.Parameter]
    buffers: Mapping[str, Tensor]
    owners: Mapping[str, tuple[int, ...]]
    trained: Mapping[str, bool]
    of_stage: Mapping[int, frozenset[str]]
    sharded: Sequence[FSDPModule]
    whole: Variant | None = None
    variants: Variants | None = None


def whole_program(job: Job, plan: Plan, model: nn.Module, mesh: DeviceMesh | None, device: torch.device) -> Program:
    """The user's module, whole, on `device`; sharded over `mesh` where there is one."""
    model.to(device)
    if plan.recompute:
        for block in _repeated_blocks(model):
            recompute_module(block)
    sharded: list[FSDPModule] = []
    if mesh is not None:
        blocks = _repeated_blocks(model) if plan.shard_mode == "regathered" else []
        sharded = shard([*blocks, model], mesh, plan)
    parameters = dict(model.named_parameters())
    return Program(
        parameters=parameters,
        buffers=dict(model.named_buffers()),
        owners={},
        trained={name: parameter.requires_grad for name, parameter in parameters.items()},
        of_stage={0: frozenset(parameters)},
        sharded=sharded,
        whole=whole_variant(weighed_loss(job, plan, model, device), model, job, device),
    )


def weighed_loss(job: Job, plan: Plan, model: nn.Module, device: torch.device) -> Callable[[Any, Any], Any]:
    """The loss with its weight, which matters where a step has several micro-batches."""
    function = objective(job.loss)
    if plan.data_ranks * plan.micro_batches == 1 or plan.weighting not in ("rewritten", "checked"):
        return function
    weights = BatchWeights(function, model, job.precision, device)
    return lambda model, batch: weights.apply(batch, function(model, batch))


def whole_variant(function: Callable[[Any, Any], Any], model: nn.Module, job: Job, device: torch.device) -> Variant:
    """`function(model, batch)` as one stage that runs as it is."""
    stage = WholeStage(model, function, lambda: autocast(job.precision, device.type))
    return Variant(
        stages={0: stage},
        routes=whole(1),
        shapes=lambda sizes: {},
        dtypes=(),
        ranks=(),
        outputs=None,
        accepts=lambda signature, tensors: True,
        fault=lambda fields: "",
    )


def graph_program(
    job: Job,
    plan: Plan,
    found: Found,
    bounds: Sequence[int],
    construction: Construction,
    mesh: Mesh,
    shards: DeviceMesh | None,
    device: torch.device,
) -> Program:
    """This rank's pieces of the graph, cut at `bounds`. What other ranks hold is never made here."""
    model = construction.model
    ports = cut(found.chain, bounds)
    mine = [number for number, stage in enumerate(plan.stages) if stage.rank == mesh.place.pipeline]
    owners = _owners(ports, plan)
    if shards is not None and any(sum(name in ports[number].parameters for number in mine) > 1 for name in owners):
        raise PlanError(
            "a parameter is used by two stages of one rank, which sharding cannot hold yet; plan with one stage a "
            "rank, or without shards"
        )
    trained = {name: parameter.requires_grad for name, parameter in model.named_parameters()}
    names = [name for named in (model.named_parameters(), model.named_buffers()) for name, _ in named]
    holds = {name for number in mine for name in (*ports[number].parameters, *ports[number].buffers)}
    if mesh.place.pipeline == 0:
        holds |= set(names) - {name for stage in ports for name in (*stage.parameters, *stage.buffers)}
    found.chain.graph.capture.fill_constants(construction.materialize(holds))
    tensors = dict(model.named_parameters()) | dict(model.named_buffers())
    here = {name: value for name, value in tensors.items() if name in holds}
    for value in here.values():
        value.data = value.data.to(device)
    sharded: list[FSDPModule] = []

    def make_stage(graph: Graph, ports: Ports, number: int) -> Stage:
        stage = graph_stage(graph, ports, here.__getitem__, plan.stages[number].recompute, job.precision, device)
        if shards is not None:
            if variants.known or sharded_stages & {number}:
                raise PlanError(
                    "a second graph is needed (another kind of batch, or a Python number that changed), which stages "
                    "with sharded parameters cannot hold yet; plan without shards"
                )
            sharded_stages.add(number)
            blocks = [segment for segment in stage.segments if any(True for _ in segment.parameters())]
            sharded.extend(shard([*blocks, stage], shards, plan))
            here.update(stage.named_tensors())
        return stage

    sharded_stages: set[int] = set()
    variants = Variants(
        function=objective(job.loss),
        model=model,
        precision=job.precision,
        device=device,
        stages=len(plan.stages),
        holders=_holders(ports),
        mine=mine,
        make_stage=make_stage,
        frozen=found.chain.graph.capture.scalars,
    )
    variants.keep(make_variant(found, bounds, variants))
    return Program(
        parameters={name: value for name, value in here.items() if isinstance(value, nn.Parameter)},
        buffers={name: value for name, value in here.items() if not isinstance(value, nn.Parameter)},
        owners={name: ranks for name, ranks in owners.items() if len(ranks) > 1},
        trained=trained,
        of_stage={number: frozenset(ports[number].parameters) for number in mine},
        sharded=sharded,
        variants=variants,
    )


@contextmanager
def evaluating(program: Program) -> Iterator[None]:
    """Let the user's module be in evaluation mode; what a graph does was settled when it was captured."""
    whole = program.whole.stages[0] if program.whole is not None else None
    model = whole.model if isinstance(whole, WholeStage) else None
    modes = {module: module.training for module in model.modules()} if model is not None else {}
    for module in modes:
        module.training = False
    try:
        yield
    finally:
        for module, training in modes.items():
            module.training = training


def forward_program(
    job: Job, program: Program, function: Callable[[Any, Any], Any], weighs: Weighs, device: torch.device
) -> Variant | Variants:
    """The job's loss ("weighed") or any `function(model, batch)`, to be run forward only over the stages that train.

    Its graphs are captured in evaluation mode, and cut where the parameters are.
    """
    if program.variants is None:
        assert program.whole is not None
        if weighs == "weighed":
            return program.whole
        stage = program.whole.stages[0]
        assert isinstance(stage, WholeStage)
        return whole_variant(function, stage.model, job, device)
    trained = program.variants
    here = {**program.parameters, **program.buffers}

    def resolve(name: str) -> Any:
        value = here[name]
        return value.full_tensor() if isinstance(value, DTensor) else value

    return Variants(
        function=function,
        model=trained.model,
        precision=trained.precision,
        device=device,
        stages=trained.stages,
        holders=trained.holders,
        mine=trained.mine,
        make_stage=lambda graph, ports, number: graph_stage(graph, ports, resolve, (), job.precision, device),
        weighs=weighs,
        training=False,
    )


def _owners(ports: Sequence[Ports], plan: Plan) -> dict[str, tuple[int, ...]]:
    """The pipeline ranks that hold each parameter."""
    ranks: dict[str, list[int]] = {}
    for number, stage in enumerate(ports):
        for name in stage.parameters:
            ranks.setdefault(name, []).append(plan.stages[number].rank)
    return {name: tuple(sorted(set(found))) for name, found in ranks.items()}


def _holders(ports: Sequence[Ports]) -> dict[str, frozenset[int]]:
    """The stages that read each parameter."""
    names = {name for stage in ports for name in stage.parameters}
    return {name: frozenset(at for at, stage in enumerate(ports) if name in stage.parameters) for name in names}


def _repeated_blocks(model: nn.Module) -> list[nn.Module]:
    """The members of module lists of one class, inner ones first: what FSDP2 gathers at a time. A list is no block."""
    blocks: list[nn.Module] = []
    for module in model.modules():
        if isinstance(module, nn.ModuleList | nn.Sequential) and len({type(child) for child in module}) == 1:
            blocks += [child for child in module if any(True for _ in child.parameters())]
    return list(dict.fromkeys(block for block in reversed(blocks) if not isinstance(block, nn.ModuleList)))
