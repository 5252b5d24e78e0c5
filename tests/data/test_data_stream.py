from functools import partial
from itertools import chain

import pytest
import torch
from feed_data import Augmented, AugmentedStream, Counting, evenly, ids, shared, steps
from torch.utils.data import DataLoader, IterableDataset

from shardwise.data import Feed
from shardwise.errors import BatchError


@pytest.mark.parametrize("options", [{}, {"num_workers": 1, "multiprocessing_context": "fork"}])
def test_each_sample_of_a_stream_comes_once_an_epoch_and_in_order(options):
    found = steps(shared(lambda: DataLoader(Counting(13), **options)), 8)
    assert [ids(step) for step in found] == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11], [12]] * 2


def test_a_rank_that_does_not_load_counts_a_stream_by_reading_it():
    share = partial(evenly, data_ranks=2, micro_batches=1)
    counting = Feed(Counting(5), batch_size=4, share=share, data_rank=0, loads=False, seed=0)
    assert [(step.batches, step.total) for step in (next(counting) for _ in range(3))] == [
        (None, 4),
        (None, 1),
        (None, 4),
    ]


def test_drop_last_leaves_the_end_of_a_stream_out():
    found = steps(shared(lambda: DataLoader(Counting(6), batch_size=4, drop_last=True)), 2)
    assert [ids(step) for step in found] == [[0, 1, 2, 3], [0, 1, 2, 3]]


def test_a_stream_is_told_the_epoch():
    class Epochs(IterableDataset):
        epoch = 0

        def set_epoch(self, epoch):
            self.epoch = epoch

        def __iter__(self):
            return iter([torch.tensor(self.epoch)] * 2)

    assert [ids(step) for step in steps(shared(Epochs), 3)] == [[0, 0], [1, 1], [2, 2]]


def test_a_stream_that_shuffles_by_the_global_generator_does_so_alike_on_every_rank():
    class Shuffled(IterableDataset):
        def __iter__(self):
            return iter(torch.randperm(13))

    feeds = shared(Shuffled)
    torch.rand(1)
    found = [ids(step) for step in steps(feeds, 4)]
    assert sorted(chain(*found)) == list(range(13))


def test_a_stream_draws_what_a_dataset_with_the_same_samples_draws():
    def noisy(samples):
        return torch.stack(samples) + torch.rand(())

    def drawn(data):
        found = steps(shared(lambda: DataLoader(data, collate_fn=noisy), micro_batches=1), 8)
        return torch.cat([batch for step in found for part in step for batch in part.batches])

    assert torch.equal(drawn(AugmentedStream(13)), drawn(Augmented(13)))


def test_several_workers_on_a_stream_are_refused():
    with pytest.raises(BatchError, match=r"Counting, an IterableDataset, with 2 workers.*num_workers=1"):
        shared(lambda: DataLoader(Counting(13), num_workers=2))


def test_a_stream_that_can_be_read_only_once_ends_with_an_error_and_not_in_a_loop():
    class Once(IterableDataset):
        def __init__(self):
            self.numbers = iter([torch.tensor(1), torch.tensor(2)])

        def __iter__(self):
            return self.numbers

    (feed,) = shared(Once, ranks=1)
    next(feed)
    with pytest.raises(BatchError, match=r"epoch 1 of the data has not one step.*can be read again"):
        next(feed)
