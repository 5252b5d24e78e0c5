from shardwise.data.randomness import mix


def test_no_two_uses_share_a_seed():
    seeds = {mix(use, 1, 2, 3) for use in ("order", "sample", "collate", "worker")}
    assert len(seeds) == 4


def test_seed_epoch_and_place_each_count():
    assert len({mix("sample", *key) for key in [(0, 0, 0), (1, 0, 0), (0, 1, 0), (0, 0, 1)]}) == 4
