import os
import random
from functools import partial
from itertools import chain, product

import numpy as np
import pytest
import torch
from feed_data import Augmented, Numbers, evenly, ids, numbers_loader, one_device, packed, shared, steps
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import BatchSampler, DataLoader, RandomSampler, Subset, get_worker_info

from shardwise.data import Feed, epoch_of
from shardwise.data.randomness import mix, reseed

WORKERS = pytest.mark.parametrize("options", [{}, {"num_workers": 2, "multiprocessing_context": "fork"}])
STAYING = {"num_workers": 2, "multiprocessing_context": "fork", "persistent_workers": True}


@WORKERS
def test_each_sample_comes_once_an_epoch_in_the_order_of_one_device(options):
    """Public bug report 18: 13 samples on 2 ranks hung, or weighed some samples twice."""
    make = numbers_loader(**options)
    found = steps(shared(make), 8)
    assert [ids(step) for step in found] == one_device(make(), epochs=2)
    assert [step[0].sizes for step in found[:4]] == [[[1, 1, 0], [1, 1, 0]]] * 3 + [[[1, 0, 0], [0, 0, 0]]]
    assert [len(step[0].batches) for step in found[:4]] == [2, 2, 2, 1]
    assert [step[1].batches for step in found[3:4]] == [[]]


def test_persistent_workers_give_the_order_of_one_device_in_every_epoch():
    make = numbers_loader(**STAYING)
    assert [ids(step) for step in steps(shared(make), 12)] == one_device(make(), epochs=3)


@pytest.mark.parametrize(("persistent", "processes"), [(True, 2), (False, 4)])
def test_workers_outlive_the_epoch_where_the_loader_says_so(persistent, processes):
    class Worker(Numbers):
        def __getitem__(self, index):
            return torch.tensor(os.getpid())

    options = STAYING | {"persistent_workers": persistent}
    found = steps(shared(lambda: DataLoader(Worker(8), **options), ranks=1), 4)
    assert len(set(chain(*map(ids, found)))) == processes


@settings(deadline=None, max_examples=60)
@given(
    length=st.integers(1, 30),
    batch_size=st.integers(1, 12),
    ranks=st.integers(1, 4),
    micro_batches=st.integers(1, 4),
    drop_last=st.booleans(),
)
def test_any_sharing_out_gives_the_batches_of_one_device(length, batch_size, ranks, micro_batches, drop_last):
    def make():
        generator = torch.Generator().manual_seed(5)
        return DataLoader(Numbers(length), batch_size, shuffle=True, generator=generator, drop_last=drop_last)

    expected = one_device(make(), epochs=2)
    found = steps(shared(make, ranks=ranks, micro_batches=micro_batches, batch_size=batch_size), len(expected))
    assert [ids(step) for step in found] == expected
    for one, *others in found:
        assert all((other.sizes, other.total) == (one.sizes, one.total) for other in others)
        assert [sum(map(len, part.batches)) for part in (one, *others)] == list(map(sum, one.sizes))


def test_uneven_micro_batches_are_cut_where_the_plan_says():
    feeds = shared(numbers_loader(), ranks=2, micro_batches=2, batch_size=7)
    (step,) = steps(feeds, 1)
    assert [[len(batch) for batch in part.batches] for part in step] == [[2, 2], [2, 1]]


class ByPython:
    def __iter__(self):
        return iter(random.sample(range(13), 13))


class ByNumpy:
    def __iter__(self):
        return iter(np.random.permutation(13))


class OneAtATime:
    def __iter__(self):
        left = list(range(13))
        while left:
            yield left.pop(int(torch.randint(len(left), ())))


@pytest.mark.parametrize("sampler", [lambda: RandomSampler(range(13)), ByPython, ByNumpy, OneAtATime])
def test_a_sampler_without_a_generator_gives_all_ranks_one_order_that_the_seed_decides(sampler):
    def make():
        torch.rand(1), random.random(), np.random.rand()  # ranks come here with different global states
        return DataLoader(Numbers(13), sampler=sampler())

    first, again, other = ([ids(step) for step in steps(shared(make, seed=seed), 8)] for seed in (1, 1, 2))
    assert first == again != other
    assert sorted(chain(*first[:4])) == sorted(chain(*first[4:])) == list(range(13))
    assert first[:4] != first[4:]
    reseed(mix("order", 1, 0, 0))
    assert list(chain(*first[:4])) == list(sampler())


def test_drop_last_leaves_the_smaller_batch_out_and_the_next_epoch_as_on_one_device():
    make = numbers_loader(drop_last=True)
    assert [ids(step) for step in steps(shared(make), 6)] == one_device(make(), epochs=2)


def test_a_batch_sampler_decides_what_a_step_is():
    lists = [[3, 1, 2, 0, 12], [4], [5, 6, 7]]
    with_an_empty_one = [lists[0], [], *lists[1:]]
    found = steps(shared(lambda: DataLoader(Numbers(13), batch_sampler=with_an_empty_one), batch_size=99), 6)
    assert [ids(step) for step in found] == lists * 2


def test_a_batch_sampler_with_a_generator_gives_the_order_of_one_device():
    def make():
        sampler = RandomSampler(range(13), generator=torch.Generator().manual_seed(3))
        return DataLoader(Numbers(13), batch_sampler=BatchSampler(sampler, 5, drop_last=False))

    assert [ids(step) for step in steps(shared(make), 6)] == one_device(make(), epochs=2)


def test_a_sampler_is_told_the_epoch():
    class Rotating:
        epoch = 0

        def set_epoch(self, epoch):
            self.epoch = epoch

        def __iter__(self):
            return iter([(self.epoch + place) % 3 for place in range(3)])

    found = steps(shared(lambda: DataLoader(Numbers(3), sampler=Rotating()), batch_size=3), 3)
    assert [ids(step) for step in found] == [[0, 1, 2], [1, 2, 0], [2, 0, 1]]


def test_a_sequence_is_read_in_order():
    found = steps(shared(lambda: [torch.tensor(number) for number in range(5)]), 3)
    assert [ids(step) for step in found] == [[0, 1, 2, 3], [4], [0, 1, 2, 3]]


@WORKERS
def test_packed_micro_batches_are_collated_from_their_own_samples(options):
    data = DataLoader(Numbers(13), collate_fn=packed, **options)
    share = partial(evenly, data_ranks=1, micro_batches=2)
    step = next(Feed(data, batch_size=5, share=share, data_rank=0, loads=True, seed=0))
    assert [batch["values"].tolist() for batch in step.batches] == [[0, 1, 1, 2, 2, 2], [3, 4, 4]]
    assert [batch["offsets"].tolist() for batch in step.batches] == [[0, 1, 3, 6], [0, 1, 3]]


def test_a_rank_loads_its_own_samples_only():
    data = Numbers(13)
    share = partial(evenly, data_ranks=2, micro_batches=1)
    next(Feed(data, batch_size=4, share=share, data_rank=1, loads=True, seed=0))
    assert data.loaded == [2, 3]


def test_a_rank_that_does_not_load_counts_the_same_steps():
    share = partial(evenly, data_ranks=2, micro_batches=3)
    data = numbers_loader()()
    counting = Feed(data, batch_size=4, share=share, data_rank=0, loads=False, seed=0)
    loading = shared(numbers_loader())[0]
    for _ in range(6):
        counted, loaded = next(counting), next(loading)
        assert (counted.batches, counted.sizes, counted.total) == (None, loaded.sizes, loaded.total)
        assert counting.order_fingerprint == loading.order_fingerprint
    assert data.dataset.loaded == []
    assert counting.state() == loading.state()


def test_the_fingerprint_tells_two_orders_apart():
    one, other = (shared(lambda: DataLoader(Numbers(13), shuffle=True), seed=seed)[0] for seed in (1, 2))
    next(one), next(other)
    assert one.order_fingerprint != other.order_fingerprint


@WORKERS
def test_augmentations_depend_on_the_sample_and_not_on_ranks_micro_batches_or_workers(options):
    def drawn(ranks, micro_batches, subset, **options):
        data = Subset(Augmented(13), range(13)) if subset else Augmented(13)
        found = steps(shared(lambda: DataLoader(data, **options), ranks=ranks, micro_batches=micro_batches), 6)
        return torch.cat([batch for step in found for part in step for batch in part.batches])

    expected = drawn(1, 1, subset=False)
    assert torch.equal(drawn(2, 1, subset=True, **options), expected)
    assert len(set(expected[:, 1].tolist())) == len(expected)
    assert not torch.equal(expected[:4, 1:], expected[13:17, 1:])  # another epoch


def test_loading_leaves_the_draws_of_the_process_alone():
    feeds = shared(lambda: DataLoader(Augmented(13), shuffle=True))
    torch.manual_seed(0)
    expected = torch.rand(3)
    torch.manual_seed(0)
    steps(feeds, 5)
    assert torch.equal(torch.rand(3), expected)


def test_workers_are_started_with_the_users_dataset():
    def start(worker):
        get_worker_info().dataset.length = 100 + worker

    class Length(Numbers):
        def __getitem__(self, index):
            return torch.tensor(self.length)

    options = {"num_workers": 2, "multiprocessing_context": "fork", "worker_init_fn": start}
    found = steps(shared(lambda: DataLoader(Length(8), **options), ranks=1, micro_batches=2), 1)
    assert ids(found[0]) == [100, 100, 101, 101]


def test_what_a_collate_function_draws_depends_on_the_place_of_its_samples():
    def noisy(samples):
        return float(samples[0]), float(torch.rand(()))

    (feed,) = shared(lambda: DataLoader(Numbers(13), collate_fn=noisy), ranks=1, micro_batches=2)
    found = [batch for step in steps([feed], 8) for batch in step[0].batches]
    expected = []
    for epoch, place in product(range(2), [0, 2, 4, 6, 8, 10, 12]):
        reseed(mix("collate", 0, epoch, place))
        expected.append((place, float(torch.rand(()))))
    assert found == expected


def test_workers_of_two_data_ranks_are_seeded_apart():
    class Seed(Numbers):
        def __getitem__(self, index):
            return torch.tensor(get_worker_info().seed)

    options = {"num_workers": 1, "multiprocessing_context": "fork"}
    found = steps(shared(lambda: DataLoader(Seed(8), **options), micro_batches=1), 3)
    assert [len(set(ids(step))) for step in found] == [2, 2, 2]
    assert ids(found[0]) == ids(found[1]) != ids(found[2])  # another epoch


def test_a_sample_that_fails_to_load_is_not_passed_over():
    class FailsOnce(Numbers):
        failed = False

        def __getitem__(self, index):
            if index == 5 and not self.failed:
                self.failed = True
                raise OSError("the disk is gone")
            return super().__getitem__(index)

    (feed,) = shared(lambda: DataLoader(FailsOnce(13)), ranks=1)
    assert ids([next(feed)]) == [0, 1, 2, 3]
    with pytest.raises(OSError, match="the disk is gone"):
        next(feed)
    assert [ids([next(feed)]) for _ in range(3)] == [[4, 5, 6, 7], [8, 9, 10, 11], [12]]


def test_one_pass_ends_with_a_smaller_batch_and_leaves_the_generator_of_training_alone():
    """Public bug report 8: an evaluation with another batch size broke the training around it."""
    data = numbers_loader()()
    share = partial(evenly, data_ranks=1, micro_batches=2)
    training = Feed(data, batch_size=4, share=share, data_rank=0, loads=True, seed=0)
    found = []
    for _ in range(8):
        found.append(ids([next(training)]))
        passed = list(epoch_of(data, batch_size=6, share=share, data_rank=0, loads=True))
        assert [step.total for step in passed] == [6, 6, 1]
        assert sorted(chain(*(ids([step]) for step in passed))) == list(range(13))
    assert found == one_device(numbers_loader()(), epochs=2)
