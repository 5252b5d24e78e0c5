from textwrap import dedent

from shardwise.schedule import StageCosts, draw, interleaved_one_f_one_b, one_f_one_b, simulate
from shardwise.schedule.costs import unit_costs


def test_one_f_one_b_is_a_staircase():
    timeline = simulate(one_f_one_b(stages=3, micro_batches=3), unit_costs(3))
    assert draw(timeline) == dedent("""\
        time      0    1    2    3    4    5    6    7    8    9    10   11   12   13   14
        stage 0   F0   F1   F2   .    .    .    .    B0   --   .    B1   --   .    B2   --
        stage 1   .    F0   F1   .    .    B0   --   F2   B1   --   .    B2   --   .    .
        stage 2   .    .    F0   B0   --   F1   B1   --   F2   B2   --   .    .    .    .""")


def test_a_rank_with_several_stages_shows_which_one_runs():
    timeline = simulate(interleaved_one_f_one_b(stages=4, ranks=2, micro_batches=1), unit_costs(4))
    assert draw(timeline) == dedent("""\
        time     0      1      2      3      4      5      6      7      8      9      10     11
        rank 0   F0.0   .      F2.0   .      .      .      B2.0   --     .      .      B0.0   --
        rank 1   .      F1.0   .      F3.0   B3.0   --     .      .      B1.0   --     .      .""")


def test_communication_shows_as_waiting():
    costs = StageCosts(forwards=(1.0, 1.0), backwards=(2.0, 2.0), latency_seconds=1.0)
    assert draw(simulate(one_f_one_b(stages=2, micro_batches=1), costs)) == dedent("""\
        time      0    1    2    3    4    5    6    7
        stage 0   F0   .    .    .    .    .    B0   --
        stage 1   .    .    F0   B0   --   .    .    .""")


def test_columns_can_be_wider_than_what_runs():
    timeline = simulate(one_f_one_b(stages=2, micro_batches=1), unit_costs(2))
    assert draw(timeline, column_seconds=2.0) == dedent("""\
        time      0    1    2
        stage 0   F0   .    B0
        stage 1   F0   B0   .""").replace("F0   .    B0", ".    .    B0", 1)
