"""What an op costs is what torch would do: known formulas hold."""

import pytest
import torch
from torch import Tensor, nn

from graph.models import GptBlock, captured, linear, numbers
from shardwise.graph import Chain

# B batch, T tokens, D features in and out, H heads, W width of a head, C channels, P pixels of an image

B, T, D = 3, 6, 8


def flops(chain: Chain, target: str) -> list[tuple[int, int]]:
    return [(op.flops_forward, op.flops_backward) for op in chain.graph.ops if op.target == target]


def saved(chain: Chain) -> int:
    """Bytes kept for the backward pass, each storage once."""
    return sum({place: size for op in chain.graph.ops for place, size in op.saved.items()}.values())


def test_a_linear_layer_multiplies_once_forward_and_twice_backward_but_the_first_has_no_gradient_of_its_input():
    once = 2 * B * D * D
    chain = captured(nn.Sequential(linear(), linear()), numbers(B, D))
    assert flops(chain, "aten.linear.default") == [(once, once), (once, 2 * once)]


def test_a_frozen_layer_has_no_gradient_of_its_weight():
    model = nn.Sequential(linear(), linear())
    model[1].requires_grad_(False)
    once = 2 * B * D * D
    assert flops(captured(model, numbers(B, D)), "aten.linear.default") == [(once, once), (once, once)]


def test_fused_attention_multiplies_twice_forward_and_five_times_backward():
    heads, width = 2, 4
    once = 2 * B * heads * T * T * width
    mask = torch.ones(T, T, dtype=torch.bool).tril()
    chain = captured(GptBlock(), numbers(B, T, D), lambda block, x: [block(x, mask).sum()])
    assert flops(chain, "aten.scaled_dot_product_attention.default") == [(2 * once, 5 * once)]


def test_a_convolution_multiplies_each_window():
    channels, pixels = 4, 36
    once = 2 * B * pixels * 9 * channels * channels
    model = nn.Sequential(*(nn.Conv2d(channels, channels, 3, padding=1).double() for _ in range(2)))
    assert flops(captured(model, numbers(B, channels, 6, 6)), "aten.conv2d.default") == [
        (once, once),
        (once, 2 * once),
    ]


def test_a_sparse_gradient_is_read_as_a_dense_one_is():
    sparse, dense = (captured(nn.Embedding(100, D, sparse=sparse), torch.arange(B)) for sparse in (True, False))
    assert [op.bytes_out for op in sparse.graph.ops] == [op.bytes_out for op in dense.graph.ops]
    assert saved(sparse) == saved(dense)


def test_activations_are_counted_once_however_many_ops_keep_them_and_weights_never():
    """The first layer keeps the batch, ReLU its output, which the second layer keeps too, and the square its input."""
    chain = captured(nn.Sequential(linear(), nn.ReLU(), linear()), numbers(B, D))
    assert saved(chain) == 3 * B * D * 8
    assert sum(sum(op.saved.values()) for op in chain.graph.ops) == 4 * B * D * 8


def test_a_cast_of_a_weight_is_no_activation():
    model = nn.Linear(D, D, bias=False)
    chain = captured(model, torch.ones(B, D), lambda model, x: [(x.bfloat16() @ model.weight.bfloat16()).sum()])
    assert saved(chain) == B * D * 2


def test_what_is_frozen_keeps_nothing():
    model = nn.Sequential(linear(), nn.Tanh(), linear())
    model[0].requires_grad_(False)
    without = captured(model, numbers(B, D))
    assert saved(without) == 2 * B * D * 8, "the input of the second layer, and that of the square"


@pytest.mark.parametrize(
    ("model", "draws"),
    [
        (nn.Dropout(0.5), 1),
        (nn.Dropout(0.0), 0),
        (nn.RReLU(), 1),
        (nn.GRU(D, D, num_layers=3, dropout=0.5, dtype=torch.float64), 2),
    ],
    ids=["dropout", "dropout of nothing", "rrelu", "gru"],
)
def test_draws_are_counted_as_the_reference_counts_them(model, draws):
    def loss(modules: nn.Module, x: Tensor) -> list[Tensor]:
        output = modules[1](modules[0](x))
        return [(output[0] if isinstance(output, tuple) else output).sum()]

    chain = captured(nn.ModuleList([linear(), model]), numbers(B, T, D), loss)
    assert sum(op.draws for op in chain.graph.ops) == draws


def test_a_parameter_that_the_loss_does_not_read_is_named():
    model = nn.ModuleDict({"used": linear(), "idle": linear()})
    graph = captured(model, numbers(B, D), lambda model, x: [model["used"](x).sum()]).graph
    assert [parameter.name for parameter in graph.parameters] == ["used.weight", "used.bias"]
    assert graph.unused == ("idle.weight", "idle.bias")
