from dataclasses import replace
from pathlib import Path

import pytest

from shardwise.launch import Died, Outcome, Raised, UserLine, describe
from shardwise.launch.failure import first_cause_first, read_record, tells_of_lost_peer, write_record
from shardwise.launch.oom import oom_kills, oom_kills_since
from shardwise.launch.worker import raised_by

BAD_SAMPLE = Raised(
    rank=1,
    host="gpu003",
    time_seconds=12.004,
    exception="ValueError",
    message="bad sample\nin line 2",
    traceback="Traceback (most recent call last):\n  ...\nValueError: bad sample\nin line 2\n",
    user_line=UserLine(file="train.py", line=12, function="loss", source="raise ValueError(text)"),
)
LOST_PEER = Raised(
    rank=0,
    host="gpu003",
    time_seconds=12.0,
    exception="RuntimeError",
    message="[pair.cc:553] Connection closed by peer [127.0.0.1]:30095.",
    traceback="Traceback (most recent call last):\n  ...\nRuntimeError: Connection closed by peer\n",
    user_line=None,
)
KILLED = Died(rank=2, host="gpu003", time_seconds=12.01, exit_code=-9, oom_kills=None)


def outcome(*failures, exit_code=1, **changes) -> Outcome:
    plain = Outcome(
        exit_code=exit_code,
        world_size=4,
        failures=failures,
        finished=frozenset(),
        last_lines=(),
        logs=Path("runs/a/logs"),
        stuck=(),
    )
    return replace(plain, **changes)


def test_a_cause_comes_before_an_earlier_loss_of_a_peer():
    assert first_cause_first([LOST_PEER, KILLED, BAD_SAMPLE]) == (BAD_SAMPLE, KILLED, LOST_PEER)


@pytest.mark.parametrize(
    ("exception", "message"),
    [
        ("RuntimeError", "[pair.cc:537] Read error [127.0.0.1]:4765: Connection reset by peer."),
        ("RuntimeError", "[unbound_buffer.cc:78] Timed out waiting 1800000ms for recv operation to complete"),
        ("torch.distributed.DistBackendError", "NCCL communicator was aborted on rank 0."),
        ("torch.distributed.DistNetworkError", "Failed to recv, got 0 bytes. Connection was likely closed."),
        ("BrokenPipeError", "[Errno 32] Broken pipe"),
    ],
)
def test_what_torch_says_of_a_lost_peer_is_recognised(exception, message):
    assert tells_of_lost_peer(replace(LOST_PEER, exception=exception, message=message))


@pytest.mark.parametrize(
    ("exception", "message"),
    [
        ("RuntimeError", "mat1 and mat2 shapes cannot be multiplied (2x3 and 4x5)"),
        ("torch.OutOfMemoryError", "CUDA out of memory. Tried to allocate 4.2 GiB"),
        ("torch.distributed.DistNetworkError", "The server socket has failed to listen. port: 29500, EADDRINUSE"),
        ("ValueError", "connection closed by peer"),
    ],
)
def test_other_errors_are_causes_in_their_own_right(exception, message):
    assert not tells_of_lost_peer(replace(LOST_PEER, exception=exception, message=message))


def test_a_record_comes_back_as_it_was_written(tmp_path):
    for raised in (BAD_SAMPLE, LOST_PEER):
        write_record(raised, tmp_path / "rank-1.failure.json")
        assert read_record(tmp_path / "rank-1.failure.json") == raised
    assert read_record(tmp_path / "rank-2.failure.json") is None


def test_the_users_line_is_below_installed_packages_and_python(tmp_path):
    script = tmp_path / "train.py"
    script.write_text("import json\n\ndef parse():\n    json.loads('{')\n")
    names: dict = {}
    exec(compile(script.read_text(), str(script), "exec"), names)
    with pytest.raises(ValueError, match="Expecting property name") as caught:
        names["parse"]()
    raised = raised_by(caught.value, rank=3)
    assert raised.user_line == UserLine(file=str(script), line=4, function="parse", source="json.loads('{')")
    assert (raised.rank, raised.exception) == (3, "json.decoder.JSONDecodeError")


def test_the_report_of_an_exception_shows_the_users_line_first_and_then_the_rest():
    assert describe(outcome(BAD_SAMPLE, LOST_PEER, last_lines=("step 1", "step 2"))) == (
        "rank 1 of 4 on gpu003 failed: ValueError: bad sample\n"
        "  train.py:12 in loss\n"
        "    raise ValueError(text)\n"
        "\n"
        "Traceback (most recent call last):\n"
        "  ...\n"
        "ValueError: bad sample\n"
        "in line 2\n"
        "\n"
        "its last output:\n"
        "  step 1\n"
        "  step 2\n"
        "\n"
        "rank 0 failed after it: RuntimeError: [pair.cc:553] Connection closed by peer [127.0.0.1]:30095.\n"
        "logs: runs/a/logs"
    )


@pytest.mark.parametrize(
    ("exit_code", "kills", "words"),
    [
        (-9, None, "killed by SIGKILL (kill -9, or out of memory?)"),
        (-9, 0, "killed by SIGKILL (kill -9: the kernel counted no process that ran out of memory)"),
        (
            -9,
            2,
            "killed by SIGKILL (out of memory, most likely: the kernel ended 2 process(es) for it during this run)",
        ),
        (-11, 0, "killed by SIGSEGV (a crash in native code; the stack is in its output)"),
        (-15, 0, "killed by SIGTERM (sent from outside)"),
        (3, 0, "exit code 3 without an exception (sys.exit or os._exit)"),
    ],
)
def test_the_report_of_a_dead_rank_names_the_signal_or_the_code(exit_code, kills, words):
    died = replace(KILLED, exit_code=exit_code, oom_kills=kills)
    assert describe(outcome(died)) == f"rank 2 of 4 on gpu003 failed: {words}\n\nlogs: runs/a/logs"


def test_the_report_fits_a_screen_whatever_the_traceback():
    deep = replace(BAD_SAMPLE, traceback="".join(f"line {number}\n" for number in range(1000)))
    report = describe(outcome(deep, *[LOST_PEER] * 63, last_lines=("step",) * 10)).splitlines()
    assert len(report) < 55
    assert "  ... 975 lines left out; they are in runs/a/logs/rank-1.log" in report
    assert report[-2:] == ["and 59 ranks more", "logs: runs/a/logs"]


def test_a_peer_that_left_early_is_named_where_only_its_loss_was_seen():
    assert "exit code 0 before it: rank 2, 3; a rank that leaves early breaks what the others wait for" in describe(
        outcome(LOST_PEER, finished=frozenset({3, 2}))
    )


def test_processes_that_even_kill_does_not_end_are_named():
    assert "stuck in the kernel: process 17, 18\n" in describe(outcome(KILLED, stuck=(17, 18)))


def test_success_needs_no_words_and_an_interrupt_few():
    assert describe(outcome(exit_code=0)) == ""
    assert describe(outcome(exit_code=130)) == "ended by SIGINT\n\nlogs: runs/a/logs"


def test_the_kernels_count_of_processes_ended_for_memory(tmp_path):
    vmstat = tmp_path / "vmstat"
    vmstat.write_text("nr_free_pages 17\noom_kill 5\n")
    assert oom_kills(vmstat) == 5
    assert oom_kills_since(3, vmstat) == 2
    assert oom_kills_since(None, vmstat) is None
    assert oom_kills(tmp_path / "absent") is None
