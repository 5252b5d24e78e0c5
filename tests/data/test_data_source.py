import random

import numpy as np
import pytest
import torch
from feed_data import Augmented, AugmentedStream, Counting, Numbers, packed, shared
from torch.utils.data import BatchSampler, DataLoader, Dataset, DistributedSampler, IterableDataset

from shardwise.data import Feed, example
from shardwise.errors import BatchError


class Endless(Dataset):
    def __getitem__(self, index):
        return torch.tensor(index)


class Prefetching(DataLoader):
    def __iter__(self):
        return map(torch.Tensor.cpu, super().__iter__())


def distributed(data):
    return DistributedSampler(data, num_replicas=2, rank=0)


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (DataLoader(Numbers(8), sampler=distributed(Numbers(8))), "has a DistributedSampler.*shuffle=True"),
        (
            DataLoader(Numbers(8), batch_sampler=BatchSampler(distributed(Numbers(8)), 2, False)),
            "has a DistributedSampler",
        ),
        (DataLoader(Numbers(8), batch_size=None), r"DataLoader\(batch_size=None\) yields batches.*session.step"),
        (Prefetching(Numbers(8)), "Prefetching iterates in its own way"),
        (Endless(), "Endless has no length.*give it __len__"),
        (DataLoader(Endless()), "Endless has no length"),
    ],
    ids=["sampler", "in a batch sampler", "ready batches", "own iteration", "no length", "loader of no length"],
)
def test_data_that_cannot_be_shared_out_is_refused_with_the_reason(data, words):
    with pytest.raises(BatchError, match=words):
        shared(lambda: data)


@pytest.mark.parametrize("data", [iter([1, 2]), {"x": 1}, "text", 5])
def test_what_is_no_data_is_refused(data):
    with pytest.raises(TypeError, match=f"data is a {type(data).__name__}; give a torch.utils.data.DataLoader"):
        shared(lambda: data)


def test_an_epoch_without_a_step_is_an_error_and_not_an_endless_loop():
    (feed,) = shared(lambda: DataLoader(Numbers(3), drop_last=True), ranks=1)
    with pytest.raises(BatchError, match=r"has not one step.*drop_last=True.*smaller batch_size"):
        next(feed)


def test_a_dataset_without_length_is_read_by_its_sampler():
    (feed,) = shared(lambda: DataLoader(Endless(), sampler=[3, 1]), ranks=1, micro_batches=1)
    assert next(feed).batches[0].tolist() == [3, 1]


@pytest.mark.parametrize(
    ("share", "rank", "words"),
    [
        (lambda samples: [[samples - 1]], 0, r"share\(4\) gave \[\[3\]\], which is not 4 samples"),
        (lambda samples: [[samples]], 1, "data_rank is 1, but the samples are shared out over 1 ranks"),
    ],
)
def test_a_share_that_does_not_add_up_is_a_slip(share, rank, words):
    feed = Feed(Numbers(8), batch_size=4, share=share, data_rank=rank, loads=True, seed=0)
    with pytest.raises(ValueError, match=words):
        next(feed)


def test_a_step_needs_a_sample():
    with pytest.raises(ValueError, match="batch_size is 0"):
        shared(lambda: Numbers(8), batch_size=0)


@pytest.mark.parametrize("data", [Numbers(5), DataLoader(Numbers(5), shuffle=True), Counting(5)])
def test_an_example_is_the_first_two_samples(data):
    assert example(data).tolist() == [0, 1]


def test_an_example_is_collated_as_the_loader_does():
    assert example(DataLoader(Numbers(5), collate_fn=packed))["offsets"].tolist() == [0, 1, 3]


def test_an_example_disturbs_no_random_state():
    generator = torch.Generator().manual_seed(1)
    loader = DataLoader(Augmented(5), shuffle=True, generator=generator)
    before = torch.get_rng_state(), generator.get_state()
    example(loader)
    assert torch.equal(torch.get_rng_state(), before[0])
    assert torch.equal(generator.get_state(), before[1])


@pytest.mark.parametrize("data", [Augmented(5), AugmentedStream(5)])
def test_an_example_is_the_same_each_time(data):
    first = example(data)
    torch.rand(1), random.random(), np.random.rand()
    assert torch.equal(example(data), first)


@pytest.mark.parametrize(("data", "count"), [(Numbers(1), 1), (Numbers(0), 0), (Counting(1), 1)])
def test_an_example_of_fewer_than_two_samples_is_refused(data, count):
    with pytest.raises(BatchError, match=f"needs two samples, but the dataset has {count}"):
        example(data)


def test_an_example_is_not_taken_from_a_stream_that_can_be_read_only_once():
    class Once(IterableDataset):
        def __init__(self):
            self.numbers = iter(range(5))

        def __iter__(self):
            return self.numbers

    data = Once()
    with pytest.raises(BatchError, match=r"Once can be read only once.*give example="):
        example(data)
    assert next(data.numbers) == 0
