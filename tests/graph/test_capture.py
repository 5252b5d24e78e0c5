"""A capture is what the loss does to tensors, for batches of many sizes, and leaves no trace."""

import copy
import random
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from graph.in_turn import run
from graph.models import (
    FEATURES,
    Averaging,
    Gpt,
    ResNet,
    captured,
    ids,
    linear,
    next_token,
    numbers,
    refusal,
    tensors_of,
)
from shardwise.errors import BatchError
from shardwise.graph import Draws, capture, cut, read, shapes

DRAWS = Draws(seed=1, step=2, micro_batch=3, device=torch.device("cpu"))


def test_batch_and_length_stay_open_and_sizes_of_one_do_not():
    assert captured(Gpt(), ids(2, 7), next_token).graph.capture.dynamic == (frozenset({0, 1}),)
    assert captured(linear(), numbers(2, 8)).graph.capture.dynamic == (frozenset({0}),)
    assert captured(linear(), numbers(1, 8)).graph.capture.dynamic == (frozenset(),)


def test_a_size_that_the_loss_takes_for_a_number_is_frozen():
    def loss(model: nn.Module, x: Tensor) -> list[Any]:
        return [model(x).square().sum() / int(x.shape[0])] if x.shape[0] == 3 else [model(x).square().sum()]

    assert captured(linear(), numbers(3, 8), loss).graph.capture.dynamic == (frozenset(),)


def test_the_length_of_a_tensor_stays_open():
    """Python's `len` gives a plain number, which would hold for the example alone."""

    def loss(model: nn.Module, x: Tensor) -> list[Any]:
        return [model(x).square().sum() / len(x)]

    model = linear()
    chain = captured(model, numbers(2, 8), loss)
    assert chain.graph.capture.dynamic == (frozenset({0}),)
    for batch in (numbers(3, 8), numbers(5, 8)):
        torch.testing.assert_close(run(chain, [0], tensors_of(model), [batch], DRAWS), loss(model, batch))


def test_shapes_of_what_is_sent_follow_the_sizes_of_the_batch():
    chain = captured(Gpt(), ids(2, 7), next_token)
    (hidden,) = cut(chain, [0, chain.cuts["before h.1"]])[1].inputs
    of = shapes(chain.graph, [hidden])
    assert of(((5, 11),)) == {hidden: ((5, 10, FEATURES), torch.float64)}


def test_python_of_the_loss_is_gone_and_its_dicts_none_and_plain_values_stay():
    def loss(model: nn.Module, batch: dict[str, Any]) -> dict[str, Any]:
        value = model(batch["x"]) if batch["weights"] is None else model(batch["x"]) * batch["weights"]
        return {"value": batch["scale"] * value.sum(), "weight": None, "metrics": {"samples": 3}}

    chain = captured(linear(), {"x": numbers(3, 8), "weights": None, "scale": 0.5}, loss)
    assert [op.target for op in chain.graph.ops] == ["aten.linear.default", "aten.sum.default", "aten.mul.Tensor"]
    assert [field.path for field in chain.graph.capture.signature.fields] == ["['x']"]
    assert chain.graph.outputs[1:] == (None, 3)


def test_a_signature_takes_a_batch_apart_and_puts_it_together():
    batch = {"x": [numbers(2, 3), None], "kind": "train", "y": numbers(2)}
    signature, tensors = read(batch)
    assert [field.path for field in signature.fields] == ["['x'][0]", "['y']"]
    assert signature.sizes == ((2, 3), (2,))
    again = signature.assemble([2 * tensor for tensor in tensors])
    assert again["kind"] == "train"
    assert again["x"][1] is None
    assert torch.equal(again["y"], 2 * batch["y"])


def test_a_batch_with_something_else_in_it_names_the_place():
    with pytest.raises(BatchError, match=r"batch\['image'\]\[0\] is a object, which is neither a tensor nor a plain"):
        read({"image": [object()]})


@pytest.mark.parametrize(("model", "batch"), [(Averaging, numbers(3, 8)), (ResNet, numbers(3, 3, 6, 6))])
def test_a_capture_changes_neither_the_model_nor_the_batch_nor_any_generator(model, batch):
    module = model()
    before = copy.deepcopy(module.state_dict()), batch.clone(), {id(p) for p in module.parameters()}
    states = torch.get_rng_state(), random.getstate(), np.random.get_state()[2]
    captured(module, batch)
    assert {id(p) for p in module.parameters()} == before[2]
    torch.testing.assert_close(module.state_dict(), before[0], rtol=0, atol=0)
    assert torch.equal(batch, before[1])
    assert torch.equal(torch.get_rng_state(), states[0])
    assert (random.getstate(), np.random.get_state()[2]) == states[1:]


def test_a_branch_on_a_value_is_refused_with_its_line_and_nothing_is_printed(capfd):
    """On its way out of torch the error printed the whole graph so far, thousands of lines."""

    def loss(model: nn.Module, x: Tensor) -> list[Any]:
        if x.sum() > 0:
            return [model(x).sum()]
        return [model(x).square().sum()]

    reason = refusal(linear(), numbers(3, 8), loss)
    assert reason.startswith("Python asks for the value of a tensor")
    assert reason.endswith("if x.sum() > 0:)")
    assert "graph/test_capture.py:" in reason
    assert capfd.readouterr() == ("", "")


def test_an_error_of_the_model_is_a_refusal_with_its_line():
    def loss(model: nn.Module, x: Tensor) -> list[Any]:
        return [model(x[:, :3]).sum()]

    reason = refusal(linear(), numbers(3, 8), loss)
    assert reason.endswith("return [model(x[:, :3]).sum()])")


def test_a_capture_on_a_sharded_or_dropped_parameter_needs_only_its_shape():
    model = linear()
    wanted = captured(model, numbers(3, 8)).graph.fingerprint
    model.weight.data = torch.empty((), dtype=torch.float64).expand(8, 8)
    assert captured(model, numbers(3, 8)).graph.fingerprint == wanted


def test_a_graph_knows_the_types_that_autocast_will_give():
    model = nn.Linear(8, 8)
    found = capture(lambda model, x: [model(x).sum()], model, torch.ones(2, 8), precision="bf16")
    kinds = {node.meta["val"].dtype for node in found.module.graph.nodes if str(node.target) == "aten.linear.default"}
    assert kinds == {torch.bfloat16}
