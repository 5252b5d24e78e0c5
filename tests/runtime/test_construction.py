"""A model that is made from its record is the model that its factory makes, to the bit, in whole and in part."""

import pytest
import torch
from torch import nn

import shardwise
import zoo
from shardwise.runtime.construction import construct


def job(model):
    return shardwise.Job(
        model=model, loss=lambda model, batch: 0, optimizer=lambda named: torch.optim.SGD(named), batch_size=1, seed=5
    )


def state(model):
    named = [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]
    return dict(named)


def same(tensor, other):
    return tensor.dtype == other.dtype and torch.equal(tensor, other) and tensor.stride() == other.stride()


@pytest.mark.parametrize("name", zoo.CASES)
def test_every_second_tensor_equals_the_real_ones_and_so_does_the_generator(name):
    asked = job(zoo.CASES[name].model)
    wanted = asked.build()
    after = torch.get_rng_state()
    found = construct(asked)
    assert found.ops is not None
    held = list(state(wanted))[::2]
    found.materialize(held)
    assert torch.equal(torch.get_rng_state(), after)
    made = state(found.model)
    tied = {id(made[name]) for name in held}
    for key, tensor in state(wanted).items():
        assert made[key].shape == tensor.shape
        assert made[key].requires_grad == tensor.requires_grad
        if id(made[key]) in tied:
            assert same(made[key], tensor), key
        else:
            assert made[key].untyped_storage().nbytes() <= tensor.element_size()


def test_a_whole_model_trains_as_the_real_one():
    asked = job(zoo.CASES["lstm"].model)
    found = construct(asked)
    found.materialize(state(found.model))
    batch = zoo.CASES["lstm"].batch(2, 0)
    torch.manual_seed(0)
    wanted = zoo.CASES["lstm"].loss(asked.build(), batch)
    torch.manual_seed(0)
    assert torch.equal(zoo.CASES["lstm"].loss(found.model, batch), wanted)


def test_a_tensor_that_is_neither_parameter_nor_buffer_is_real():
    class Scaled(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(2, 2)
            self.scales = [torch.randn(2), torch.tensor([1.0, 2.0])]

    found = construct(job(Scaled))
    found.materialize(())
    assert [scale.tolist() for scale in found.model.scales] == [scale.tolist() for scale in job(Scaled).build().scales]


def test_a_weight_that_is_computed_from_another_comes_out_of_both():
    class Halves(nn.Module):
        def __init__(self):
            super().__init__()
            whole = torch.empty(4, 2)
            nn.init.orthogonal_(whole)
            self.first, self.second = nn.Parameter(whole[:2].clone()), nn.Parameter(whole[2:] @ whole.T)

    found = construct(job(Halves))
    found.materialize(["second"])
    assert same(found.model.second, job(Halves).build().second)


def test_a_factory_that_reads_values_is_built_for_real_and_says_so():
    def reads():
        model = nn.Linear(2, 2)
        model.rate = float(torch.rand(()))
        return model

    with pytest.warns(UserWarning, match="reads values"):
        found = construct(job(reads))
    assert found.ops is None
    found.materialize(["weight"])
    assert same(found.model.weight, job(reads).build().weight)
    assert found.model.bias.untyped_storage().nbytes() == 4
