"""A launch that nobody interrupts, with real processes; those without a collective do without torch, to be quick."""

import json
import os
import signal
import time
from pathlib import Path
from textwrap import dedent

import pytest

from shardwise.errors import LaunchError
from shardwise.launch import Died, Outcome, Raised, describe, start_script
from shardwise.launch.devices import MOST_CPU_RANKS, devices_here


def test_each_rank_runs_the_script_as_main_with_its_arguments_and_place(script, tmp_path):
    path = script("""
        import json, os, sys
        from pathlib import Path
        names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "OMP_NUM_THREADS")
        told = {name: os.environ[name] for name in names}
        told |= {"name": __name__, "argv": sys.argv, "path": sys.path[0]}
        Path(sys.argv[2], told["RANK"]).write_text(json.dumps(told))
    """)
    bare = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
    outcome = start_script(
        path, ["--to", str(tmp_path)], devices=3, run_folder=tmp_path / "run", environment={**bare, "TEAM": "a"}
    )
    assert (outcome.exit_code, outcome.failures, outcome.finished) == (0, (), {0, 1, 2})
    assert [json.loads((tmp_path / str(rank)).read_text()) for rank in range(3)] == [
        {
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": "3",
            "LOCAL_WORLD_SIZE": "3",
            "MASTER_ADDR": "127.0.0.1",
            "OMP_NUM_THREADS": "1",
            "name": "__main__",
            "argv": [str(path), "--to", str(tmp_path)],
            "path": str(tmp_path),
        }
        for rank in range(3)
    ]


def test_rank_0_speaks_on_the_terminal_and_the_others_into_their_logs(script, tmp_path, capfd):
    path = script("import os, sys; print('out', os.environ['RANK']); print('err', os.environ['RANK'], file=sys.stderr)")
    start_script(path, devices=2, run_folder=tmp_path)
    assert capfd.readouterr() == ("out 0\n", "err 0\n")
    assert (tmp_path / "logs" / "rank-1.log").read_text() == "out 1\nerr 1\n"


def test_an_exception_is_told_with_the_users_line_and_what_the_rank_printed_before(script, tmp_path, capfd):
    path = script("""
        import os, time
        def work():
            if os.environ["RANK"] == "1":
                print("loading sample 7")
                raise ValueError("bad sample")
            time.sleep(60)
        work()
    """)
    outcome = start_script(path, devices=2, run_folder=tmp_path)
    assert outcome.exit_code == 1
    assert describe(outcome) == dedent(f"""\
        rank 1 of 2 on {os.uname().nodename} failed: ValueError: bad sample
          {path}:6 in work
            raise ValueError("bad sample")

        Traceback (most recent call last):
          File "{path}", line 8, in <module>
            work()
          File "{path}", line 6, in work
            raise ValueError("bad sample")
        ValueError: bad sample

        its last output:
          loading sample 7

        logs: {tmp_path}/logs""")
    assert capfd.readouterr() == ("", "")
    assert "ValueError: bad sample" in (tmp_path / "logs" / "rank-1.log").read_text()


def test_a_run_that_goes_on_in_its_folder_appends_and_forgets_the_failure_before(script, tmp_path):
    failing = script("import os, sys; print('first'); sys.exit(int(os.environ['RANK']))")
    assert start_script(failing, devices=2, run_folder=tmp_path).last_lines == ("first",)
    raising = script("import os; print('second'); 1 // (1 - int(os.environ['RANK']))")
    assert start_script(raising, devices=2, run_folder=tmp_path).last_lines == ("second",)
    assert start_script(script("print('third')"), devices=2, run_folder=tmp_path).exit_code == 0
    log = (tmp_path / "logs" / "rank-1.log").read_text().splitlines()
    assert [line for line in log if line in ("first", "second", "third")] == ["first", "second", "third"]


@pytest.mark.parametrize("rank", [0, 1])
def test_kill_9_of_a_rank_inside_a_collective_names_that_rank(all_reduce_for_ever, tmp_path, rank):
    outcome, seconds = timed(all_reduce_for_ever, f"kill {rank}", tmp_path)
    first, *others = outcome.failures
    assert isinstance(first, Died)
    assert (outcome.exit_code, first.rank, first.exit_code) == (1, rank, -signal.SIGKILL)
    assert all(isinstance(other, Raised) and other.rank == 1 - rank for other in others)
    assert seconds < 15
    assert f"rank {rank} of 2 on {os.uname().nodename} failed: killed by SIGKILL (" in describe(outcome)


def test_an_exception_while_the_other_rank_waits_in_a_collective_comes_first(all_reduce_for_ever, tmp_path, capfd):
    outcome, seconds = timed(all_reduce_for_ever, "raise 1", tmp_path)
    first = outcome.failures[0]
    assert isinstance(first, Raised)
    assert (outcome.exit_code, first.rank, first.exception, first.message) == (1, 1, "ValueError", "bad sample")
    assert seconds < 15
    assert "Traceback" not in capfd.readouterr().err


def test_a_rank_that_leaves_without_an_exception_is_told_by_its_code(script, tmp_path):
    path = script("import os, time; os._exit(3) if os.environ['RANK'] == '1' else time.sleep(60)")
    outcome, seconds = timed(path, "", tmp_path)
    assert "rank 1 of 2 on" in describe(outcome)
    assert "failed: exit code 3 without an exception" in describe(outcome)
    assert seconds < 5


def test_a_rank_that_raised_but_hangs_on_its_way_out_has_failed_all_the_same(script, tmp_path):
    path = script("""
        import os, threading, time
        threading.Thread(target=time.sleep, args=(60,)).start()
        1 // int(os.environ["RANK"])
        time.sleep(60)
    """)
    outcome, seconds = timed(path, "", tmp_path)
    assert [failure.rank for failure in outcome.failures] == [0]
    assert seconds < 5


def test_a_slow_cause_still_comes_before_the_loss_it_caused(script, tmp_path):
    path = script("""
        import os, signal, time
        if os.environ["RANK"] == "0":
            raise ConnectionResetError("Connection reset by peer")
        time.sleep(1)
        os.kill(os.getpid(), signal.SIGSEGV)
    """)
    outcome, _ = timed(path, "", tmp_path)
    assert [(type(failure), failure.rank) for failure in outcome.failures] == [(Died, 1), (Raised, 0)]


def test_a_rank_that_ignores_sigterm_is_killed_when_another_fails(script, tmp_path):
    path = script("""
        import os, signal, time
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        time.sleep(0.3)
        1 // int(os.environ["RANK"])
        open("ready", "w")
        time.sleep(60)
    """)
    outcome, seconds = timed(path, "", tmp_path)
    assert outcome.exit_code == 1
    assert 5 < seconds < 10


def test_a_script_that_is_not_there_starts_nothing(tmp_path):
    with pytest.raises(LaunchError, match=r"cannot read the script .*/absent\.py: No such file"):
        start_script(tmp_path / "absent.py", devices=2, run_folder=tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_a_script_that_is_not_python_starts_nothing_and_names_the_line(script, tmp_path):
    with pytest.raises(LaunchError, match=r"train.py:2 is not Python \(expected ':'\): while True$"):
        start_script(script("x = 1\nwhile True\n    pass"), devices=2, run_folder=tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_a_rank_does_not_launch_ranks(script, tmp_path):
    inside = {"RANK": "1", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "MASTER_ADDR": "a", "MASTER_PORT": "1"}
    with pytest.raises(LaunchError, match=r"rank 1 of 4 already \(RANK is set\).* run the script itself"):
        start_script(script("pass"), devices=2, run_folder=tmp_path / "run", environment=inside)


def test_no_device_is_a_slip(script, tmp_path):
    with pytest.raises(ValueError, match="devices is 0; give at least 1"):
        start_script(script("pass"), devices=0, run_folder=tmp_path / "run")


def test_this_machine_has_a_device_and_not_too_many():
    assert 1 <= devices_here() <= MOST_CPU_RANKS


def timed(path: Path, action: str, folder: Path) -> tuple[Outcome, float]:
    begin = time.monotonic()
    outcome = start_script(path, [action, str(folder / "ready")], devices=2, run_folder=folder / "run")
    return outcome, time.monotonic() - begin
