from textwrap import dedent

from plan_jobs import changed

from shardwise.plan import Alternative
from shardwise.plan.report import as_text, size_text


def test_a_report_shows_stages_mesh_schedule_notes_and_what_was_not_chosen():
    plan = changed(alternatives=(Alternative(name="4 replicas", reason="it is short by 4.2 GiB"),))
    lines = [line.rstrip() for line in as_text(plan).splitlines()]
    assert "\n".join(lines) == dedent("""\
        4x cpu: 2 pipeline ranks x 2 replicas, predicted 0.25 s a step
        stage  rank  from             to             FLOPs    memory     sent  recomputed
        0      0     the start        blocks.1.down    75%   3.0 GiB  4.0 KiB
        1      1     before blocks.2  head             25%  99 bytes  0 bytes  2 segments
        batch of 16: 2 data ranks x 4 micro-batches of 2; 1f1b, fp32, weighed: samples
        note: a note
        not chosen: 4 replicas: it is short by 4.2 GiB""")


def test_uneven_micro_batches_show_their_range():
    assert "3 micro-batches of 2 to 3" in as_text(changed(micro_batches=3))


def test_sizes_are_in_the_unit_that_people_use():
    assert [size_text(size) for size in (0, 1023, 1024, 2**20, 5 * 2**40)] == [
        "0 bytes", "1023 bytes", "1.0 KiB", "1.0 MiB", "5120.0 GiB",
    ]  # fmt: skip
