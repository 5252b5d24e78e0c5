from shardwise.cost import Memory, StageBytes, peak_activations, rank_memory
from shardwise.schedule import gpipe, interleaved_one_f_one_b, one_f_one_b

STAGE = StageBytes(parameters=100, gradients=80, optimizer=160, largest=30, activations=7, working=3, sent=5)


def test_one_f_one_b_holds_the_activations_of_the_stages_that_follow():
    schedule = one_f_one_b(stages=4, micro_batches=8)
    held = [peak_activations({stage: 10}, schedule.ranks[stage])[stage] for stage in range(4)]
    assert held == [40, 30, 20, 10]


def test_gpipe_holds_all_micro_batches():
    assert peak_activations({0: 10}, gpipe(stages=2, micro_batches=8).ranks[0]) == {0: 80}


def test_stages_of_one_rank_are_added_at_one_moment():
    """Stage 0 and 2 together, which is less than the most of each."""
    schedule = interleaved_one_f_one_b(stages=4, ranks=2, micro_batches=8)
    held = peak_activations({0: 1, 2: 1}, schedule.ranks[0])
    assert sum(held.values()) == 5


def test_a_rank_holds_parameters_gradients_state_and_what_is_in_flight():
    memory = rank_memory({0: STAGE}, one_f_one_b(stages=2, micro_batches=4).ranks[0], 1, "gathered")
    assert memory == {0: Memory(parameters=100, gradients=80, optimizer=160, activations=2 * 7 + 3, buffers=5)}
    assert memory[0].total == 362


def test_shards_that_stay_gathered_hold_whole_parameters_and_gradients_beside_their_part():
    memory = rank_memory({0: STAGE}, one_f_one_b(stages=1, micro_batches=1).ranks[0], 4, "gathered")[0]
    assert (memory.parameters, memory.gradients, memory.optimizer) == (25 + 100, 20 + 80, 40)


def test_shards_that_are_gathered_each_time_hold_two_segments_beside_their_part():
    memory = rank_memory({0: STAGE}, one_f_one_b(stages=1, micro_batches=1).ranks[0], 4, "regathered")[0]
    assert (memory.parameters, memory.gradients, memory.optimizer) == (25 + 2 * 30, 20 + 30, 40)
