from collections import namedtuple

import pytest
import torch

from shardwise.data import samples_in, slice_batch
from shardwise.errors import BatchError

Pair = namedtuple("Pair", ["left", "right"])


def test_every_tensor_is_cut_and_everything_else_goes_to_every_micro_batch():
    batch = {
        "x": torch.arange(6).reshape(3, 2),
        "scale": torch.tensor(2.0),
        "nested": [torch.arange(3), Pair(torch.arange(3) + 10, None)],
        "name": "train",
        "size": (224, 224),
    }
    first, second = slice_batch(batch, [2, 1])
    assert first["x"].tolist() == [[0, 1], [2, 3]]
    assert second["x"].tolist() == [[4, 5]]
    assert second["nested"][0].tolist() == [2]
    assert second["nested"][1].left.tolist() == [12]
    assert isinstance(second["nested"][1], Pair)
    for part in (first, second):
        assert (part["scale"].item(), part["name"], part["size"], part["nested"][1].right) == (
            2.0,
            "train",
            (224, 224),
            None,
        )


def test_the_slices_are_views():
    batch = torch.zeros(4)
    slice_batch(batch, [3, 1])[1].fill_(7)
    assert batch.tolist() == [0, 0, 0, 7]


def test_eight_samples_in_three_are_3_3_2():
    """Public bug report 7: a batch that does not divide failed at the loss, with a shape error."""
    assert [len(part) for part in slice_batch(torch.arange(8), [3, 3, 2])] == [3, 3, 2]


@pytest.mark.parametrize(
    ("batch", "words"),
    [
        ({"x": torch.zeros(4, 5), "mask": torch.zeros(1, 5)}, r"batch\['mask'\] has shape \(1, 5\).*4 samples"),
        ({"values": torch.zeros(9), "offsets": torch.zeros(5)}, r"batch\['values'\] has shape \(9,\).*DataLoader"),
        ((torch.zeros(4, 2), [torch.zeros(3)]), r"batch\[1\]\[0\] has shape \(3,\)"),
        (torch.zeros(7, 4, 2), r"batch has shape \(7, 4, 2\).*every tensor has that many along dimension 1"),
        ({"x": torch.zeros(4), "names": ["a", "b", "c", "d"]}, r"batch\['names'\] is a list of 4 plain values"),
        ({"x": torch.zeros(4).to_sparse()}, r"batch\['x'\] is a torch.sparse_coo tensor"),
        ({"x": torch.nested.nested_tensor([torch.zeros(2), torch.zeros(3)])}, r"batch\['x'\] is a nested tensor"),
        ({"x": torch.zeros(4), "y": object()}, r"batch\['y'\] is a object, which is neither a tensor"),
    ],
    ids=["broadcast", "packed", "remainder", "time first", "values per sample", "sparse", "nested", "opaque"],
)
def test_what_could_be_cut_in_two_ways_is_refused_by_name(batch, words):
    with pytest.raises(BatchError, match=words):
        slice_batch(batch, [2, 2])


def test_a_layout_hint_is_only_given_where_all_tensors_have_it():
    with pytest.raises(BatchError) as caught:
        slice_batch({"x": torch.zeros(7, 4), "y": torch.zeros(7)}, [2, 2])
    assert "dimension 1" not in str(caught.value)


def test_samples_are_counted_along_the_first_dimension():
    assert samples_in({"x": torch.zeros(3, 2), "y": torch.zeros(3), "scale": torch.tensor(1.0)}) == 3


def test_samples_of_unequal_tensors_are_not_counted():
    with pytest.raises(BatchError, match=r"batch\['y'\] has shape \(2,\), but batch\['x'\] has shape \(3, 2\)"):
        samples_in({"x": torch.zeros(3, 2), "y": torch.zeros(2)})


def test_a_batch_without_sized_tensors_has_no_samples_to_count():
    with pytest.raises(BatchError, match="no tensor of the batch has dimensions"):
        samples_in({"scale": torch.tensor(1.0), "name": "train"})
