"""What planning needs to know of a job: its graph, its parameters, its optimizer, and what couples its samples.

Nothing of real size is allocated where it can be helped: the model is built on the meta device and then stands on fake
CPU tensors, so that attention stays one fused op and a model larger than this machine can be planned.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, final

import torch
from torch import Tensor, fx, nn
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException, FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.nn.modules.batchnorm import _BatchNorm

from shardwise.cost import OptimizerState, probe_optimizer
from shardwise.graph import Capture, Chain, Refusal, capture, chain, read, read_graph
from shardwise.job import Batch, Job, objective
from shardwise.plan.weighting import Weighing, check_of_batch, rewrite, sample_weight, weigh


@final
@dataclass(frozen=True)
class Sketch:
    """A job, read for planning.

    samples:    of the example batch
    graph:      as a chain of segments, or why it cannot be cut
    weighing:   how micro-batches are weighed, or why the batch must not be split; None where nothing was captured
    weight:     of one sample of the example, on average; 1 where it is not known
    tensors:    bytes of each parameter and buffer, by name, a tied one once
    gradients:  bytes of each trained parameter
    couples:    what makes samples depend on each other, "" where nothing was found
    notes:      what the user should know of how it was read
    """

    samples: int
    graph: Chain | Refusal
    weighing: Weighing | Refusal | None
    weight: float
    tensors: Mapping[str, int]
    gradients: Mapping[str, int]
    optimizer: OptimizerState
    couples: str
    notes: tuple[str, ...]


def sketch_job(job: Job, example: Batch) -> Sketch:
    """Build, capture and measure `job` on a batch like `example`, of at least two samples.

    raises:  LossError where the loss returns nothing that can be trained on; BatchError where the batch holds what is
             no tensor and no plain value
    """
    model, notes = _build(job)
    samples = count_samples(example)
    captured = capture(objective(job.loss), model, example, precision=job.precision)
    fields = read(example)[1]
    weighing = None if isinstance(captured, Refusal) else _weigh(captured, fields)
    trained = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    tensors = dict(model.named_parameters()) | dict(model.named_buffers())
    return Sketch(
        samples=samples,
        graph=captured if isinstance(captured, Refusal) else _read(captured, model, fields, samples),
        weighing=weighing,
        weight=_weight(captured, weighing, fields, samples),
        tensors={name: _bytes(tensor) for name, tensor in tensors.items()},
        gradients={name: parameter.nbytes for name, parameter in trained.items()},
        optimizer=probe_optimizer(job.optimizer, trained),
        couples=_couples(captured, model),
        notes=notes,
    )


def _weigh(captured: Capture, fields: Sequence[Tensor]) -> Weighing | Refusal:
    """As `weigh`; what the run would refuse of each batch like the example is refused now."""
    weighing = weigh(captured)
    if isinstance(weighing, Refusal):
        return weighing
    wrong = check_of_batch(captured, weighing.guards)(fields)
    return Refusal(wrong) if wrong else weighing


def _weight(
    captured: Capture | Refusal, weighing: Weighing | Refusal | None, fields: Sequence[Tensor], samples: int
) -> float:
    if isinstance(captured, Refusal) or not isinstance(weighing, Weighing):
        return 1.0
    return sample_weight(rewrite(captured, weighing), fields, samples)


def count_samples(batch: Batch) -> int:
    """The first dimension that most tensors share; of equals the smaller one (tokens of packed samples are more)."""
    _, tensors = read(batch)
    sizes = Counter(len(tensor) for tensor in tensors if tensor.dim())
    return min(sizes, key=lambda size: (-sizes[size], size), default=1)


def _build(job: Job) -> tuple[nn.Module, tuple[str, ...]]:
    """The model on fake tensors, or for real where its factory reads values; a note says so."""
    with torch.random.fork_rng(devices=[]):
        try:
            with torch.device("meta"):
                model = job.build()
        except Exception as error:  # whatever the user's code raises where a tensor has no values
            reason = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
            return job.build(), (f"the model was built for real to plan it: its factory reads values ({reason})",)
    _make_fake(model, FakeTensorMode(shape_env=ShapeEnv(), allow_non_fake_inputs=True))
    return model, ()


def _make_fake(model: nn.Module, mode: FakeTensorMode) -> None:
    """Let every tensor of the modules stand on a fake CPU; tied ones stay tied."""
    fakes: dict[int, Tensor] = {}
    originals: list[Tensor] = []  # kept, since a tensor that is freed would lend its identity to the next

    def fake(tensor: Tensor) -> Tensor:
        if id(tensor) not in fakes:
            originals.append(tensor)
            with mode:
                empty = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="cpu")
            parameter = isinstance(tensor, nn.Parameter)
            fakes[id(tensor)] = nn.Parameter(empty, tensor.requires_grad) if parameter else empty
        return fakes[id(tensor)]

    for module in model.modules():
        places: tuple[dict[str, Any], ...] = (module._parameters, module._buffers, vars(module))
        for place in places:
            place.update({key: fake(value) for key, value in place.items() if isinstance(value, Tensor)})


def _bytes(tensor: Tensor) -> int:
    parts = (tensor._indices(), tensor._values()) if tensor.layout is torch.sparse_coo else (tensor,)
    return sum(part.nbytes for part in parts)


def _read(captured: Capture, model: nn.Module, fields: Sequence[Tensor], samples: int) -> Chain | Refusal:
    if samples < 2:
        return Refusal(f"the example has {samples} sample, which fixes every size; give an example of two or more")
    for name, tensor in model.named_buffers():
        if tensor.layout is not torch.strided:
            return Refusal(f"{name} is a {tensor.layout} tensor, which no stage can hold; make it dense (to_dense())")
    try:
        return chain(read_graph(captured, model, fields))
    except (DynamicOutputShapeException, DataDependentOutputException) as error:
        return Refusal(f"the size of a value depends on the data ({error}), so that its cost cannot be told")


def _couples(captured: Capture | Refusal, model: nn.Module) -> str:
    if isinstance(captured, Refusal):
        training = any(isinstance(module, _BatchNorm) and module.training for module in model.modules())
    else:
        training = any(_is_batch_norm_in_training(node) for node in captured.module.graph.nodes)
    return "BatchNorm takes its statistics from one micro-batch of one replica" if training else ""


def _is_batch_norm_in_training(node: fx.Node) -> bool:
    if node.target not in _BATCH_NORMS:
        return False
    schema = node.target._schema.arguments
    given: dict[str, Any] = dict(zip((argument.name for argument in schema), node.args, strict=False)) | node.kwargs
    return bool(given.get("training", given.get("train")))


_BATCH_NORMS = frozenset(
    {
        torch.ops.aten.batch_norm.default,
        torch.ops.aten.native_batch_norm.default,
        torch.ops.aten._native_batch_norm_legit.default,
        torch.ops.aten.cudnn_batch_norm.default,
    }
)
