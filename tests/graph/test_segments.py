"""A model is a chain of segments, with a name for every place where it may be cut."""

from itertools import pairwise

from torch import Tensor, nn

from graph.models import Averaging, Gpt, captured, ids, linear, next_token, numbers


def test_segments_cover_the_ops_in_order():
    chain = captured(Gpt(), ids(), next_token)
    assert chain.segments[0].ops.start == 0
    assert chain.segments[-1].ops.stop == len(chain.graph.ops)
    assert all(one.ops.stop == other.ops.start for one, other in pairwise(chain.segments))
    assert sum(segment.flops for segment in chain.segments) == chain.graph.flops
    assert sum(segment.work for segment in chain.segments) == chain.graph.work


def test_repeated_blocks_are_segments_of_one_kind_that_begin_where_the_blocks_do():
    chain = captured(Gpt(blocks=6), ids(), next_token)
    blocks = [segment for segment in chain.segments if segment.flops == 3 * (6912 + 2304) + 3456 + 8640]
    assert [chain.name(block.ops.start) for block in blocks] == [f"before h.{number}" for number in range(6)]
    assert len({block.kind for block in blocks}) == 1
    assert len({segment.kind for segment in chain.segments if segment not in blocks}) > 1


def test_blocks_of_another_size_are_of_another_kind():
    model = nn.Sequential(*(layer for width in (8, 8, 16) for layer in (nn.Linear(8, width), nn.Linear(width, 8))))
    chain = captured(model.double(), numbers(3, 8))
    kinds = {chain.name(segment.ops.start): segment.kind for segment in chain.segments if segment.ops.start}
    assert kinds["before 2"] != kinds["before 4"]


def test_a_name_finds_its_position_and_a_position_its_name():
    chain = captured(Gpt(), ids(), next_token)
    assert [chain.name(position) for position in chain.cuts.values()] == list(chain.cuts)
    assert len(set(chain.cuts.values())) == len(chain.cuts)
    assert list(chain.cuts.values()) == [k for k in range(1, len(chain.graph.ops)) if chain.graph.widths[k] is not None]
    assert {"before h.0", "before h.1.qkv", "in h.2 after h.2.drop", "before head"} <= chain.cuts.keys()


def test_names_are_the_same_for_batches_of_another_size():
    assert list(captured(Gpt(), ids(3, 7), next_token).cuts) == list(captured(Gpt(), ids(4, 9), next_token).cuts)


def test_a_module_that_is_called_twice_has_a_name_for_each_call():
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = linear(), linear()

        def forward(self, x: Tensor) -> Tensor:
            return self.a(self.b(self.a(x)))

    assert list(captured(Twice(), numbers(3, 8)).cuts)[:2] == ["before b", "before a@1"]


def test_a_region_without_gradient_is_part_of_the_call_that_it_stands_in():
    chain = captured(nn.Sequential(linear(), Averaging()), numbers(3, 8))
    regions = [op.calls for op in chain.graph.ops if op.target == "wrap_with_set_grad_enabled"]
    assert regions == [("1",)]
