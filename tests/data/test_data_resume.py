import itertools
import json

import pytest
import torch
from feed_data import Augmented, Counting, Numbers, ids, numbers_loader, shared, steps
from torch.utils.data import BatchSampler, DataLoader, RandomSampler

from shardwise.errors import CheckpointError

WORKERS = {"num_workers": 2, "multiprocessing_context": "fork", "prefetch_factor": 4}


def shuffled_by_the_seed():
    return DataLoader(Numbers(13), shuffle=True)


def by_batch_sampler():
    sampler = RandomSampler(range(13), generator=torch.Generator().manual_seed(3))
    return DataLoader(Numbers(13), batch_sampler=BatchSampler(sampler, 4, drop_last=False))


def augmented():
    return DataLoader(Augmented(13), shuffle=True, generator=torch.Generator().manual_seed(3))


def stream():
    return DataLoader(Counting(13))


def through_json(state):
    return json.loads(json.dumps(state))


@pytest.mark.parametrize(
    "make", [numbers_loader(), numbers_loader(drop_last=True), shuffled_by_the_seed, by_batch_sampler, stream]
)
@pytest.mark.parametrize("at", range(9))
def test_a_run_resumed_at_any_step_goes_on_as_if_uninterrupted(make, at):
    uninterrupted = [ids(step) for step in steps(shared(make), 11)]
    feeds = shared(make)
    steps(feeds, at)
    resumed = shared(make, ranks=3, micro_batches=1)
    for feed in resumed:
        feed.restore(through_json(feeds[0].state()))
    assert [ids(step) for step in steps(resumed, 11 - at)] == uninterrupted[at:]


def test_what_was_loaded_ahead_was_not_consumed():
    """Public bug report 23: after a resume with prefetching, the samples that waited in the workers were lost."""
    make = numbers_loader(60, **WORKERS)
    uninterrupted = [ids(step) for step in steps(shared(make), 20)]
    feeds = shared(make)
    steps(feeds, 3)
    (alone,) = shared(numbers_loader(60), ranks=1, micro_batches=1)
    alone.restore(through_json(feeds[1].state()))
    assert [ids([next(alone)]) for _ in range(17)] == uninterrupted[3:]


def test_resuming_at_another_batch_size_goes_on_at_the_very_next_sample():
    feeds = shared(numbers_loader())
    steps(feeds, 2)
    order = [sample for step in steps(shared(numbers_loader()), 4) for sample in ids(step)]
    (resumed,) = shared(numbers_loader(), ranks=1, batch_size=3)
    resumed.restore(feeds[0].state())
    assert [ids([next(resumed)]) for _ in range(2)] == [order[8:11], order[11:]]


def test_a_feed_goes_back_to_its_own_earlier_state_with_workers_that_stay():
    (feed,) = shared(numbers_loader(persistent_workers=True, **WORKERS), ranks=1)
    steps([feed], 20)  # into the second epoch, whose workers are those of the first
    state = feed.state()
    expected = [ids(step) for step in steps([feed], 6)]
    feed.restore(state)
    assert [ids(step) for step in steps([feed], 6)] == expected


def test_augmentations_of_a_resumed_run_are_those_of_the_uninterrupted_one():
    (feed,) = shared(augmented, ranks=1)
    steps([feed], 5)
    state, expected = feed.state(), next(feed)
    (resumed,) = shared(augmented, ranks=1, micro_batches=3)
    resumed.restore(state)
    assert torch.equal(torch.cat(next(resumed).batches), torch.cat(expected.batches))


def test_indices_are_skipped_without_loading_their_samples():
    feeds = shared(lambda: Numbers(13), ranks=1)
    steps(feeds, 2)
    data = Numbers(13)
    (resumed,) = shared(lambda: data, ranks=1)
    resumed.restore(feeds[0].state())
    next(resumed)
    assert data.loaded == [8, 9, 10, 11]


def test_an_order_that_cannot_be_repeated_is_refused():
    passes = itertools.count()

    class NeverTheSame:
        def __iter__(self):
            shift = next(passes)
            return iter([(place + shift) % 13 for place in range(13)])

    (feed,) = shared(lambda: DataLoader(Numbers(13), sampler=NeverTheSame()), ranks=1)
    next(feed)
    with pytest.raises(CheckpointError, match=r"other samples for the first 4 of epoch 0.*set_epoch"):
        feed.restore(feed.state())


def test_a_dataset_that_shrank_is_refused():
    (feed,) = shared(lambda: Numbers(13), ranks=1)
    steps([feed], 3)
    (smaller,) = shared(lambda: Numbers(10), ranks=1)
    with pytest.raises(CheckpointError, match="12 samples of epoch 0 were consumed, but the sampler now gives only 10"):
        smaller.restore(feed.state())


def test_a_stream_that_shrank_is_refused():
    (feed,) = shared(stream, ranks=1)
    steps([feed], 3)
    (smaller,) = shared(lambda: Counting(10), ranks=1)
    smaller.restore(feed.state())
    with pytest.raises(CheckpointError, match="12 samples of epoch 0 were consumed, but the stream now ends after 10"):
        next(smaller)


def test_a_state_with_other_generators_is_refused():
    (feed,) = shared(numbers_loader(), ranks=1)
    (other,) = shared(shuffled_by_the_seed, ranks=1)
    with pytest.raises(CheckpointError, match="holds 1 generators, but the DataLoader and its samplers have 0"):
        other.restore(feed.state())


def test_a_state_of_something_else_is_refused():
    (feed,) = shared(numbers_loader(), ranks=1)
    with pytest.raises(CheckpointError, match=r"is no position in the data \(KeyError: 'consumed'\)"):
        feed.restore({"epoch": 1})
