"""A launcher that is asked to end, or is killed, as a process of its own."""

import contextlib
import os
import pty
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

START_AND_TELL = """
import signal, sys
from pathlib import Path
from shardwise.launch import describe, start_script

signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell may have started us with SIGINT ignored
outcome = start_script(Path(sys.argv[1]), sys.argv[3:], devices=2, run_folder=Path(sys.argv[2]))
print(describe(outcome), file=sys.stderr)
sys.exit(outcome.exit_code)
"""


def test_rank_0_has_the_terminal_of_the_launcher_and_only_rank_0(script, tmp_path):
    path = script("import os, sys; print(os.environ['RANK'], sys.stdin.isatty(), sys.stdout.isatty())")
    ours, terminal = pty.openpty()
    with started(path, tmp_path, stdin=terminal, stdout=terminal) as launcher:
        assert launcher.wait(20) == 0
    os.close(terminal)
    assert os.read(ours, 100).split() == [b"0", b"True", b"True"]
    os.close(ours)
    assert (tmp_path / "run" / "logs" / "rank-1.log").read_text() == "1 False False\n"


def test_ctrl_c_ends_ranks_in_a_collective_without_a_traceback(all_reduce_for_ever, tmp_path):
    ready = tmp_path / "ready"
    with started(all_reduce_for_ever, tmp_path, "go on", str(ready), stderr=subprocess.PIPE) as launcher:
        wait_until(ready.exists)
        os.killpg(launcher.pid, signal.SIGINT)
        _, told = launcher.communicate(timeout=20)
    assert launcher.returncode == 130
    assert told == f"ended by SIGINT\n\nlogs: {tmp_path}/run/logs\n"
    assert "Traceback" not in (tmp_path / "run" / "logs" / "rank-1.log").read_text()


def test_ctrl_c_while_the_ranks_are_starting_is_as_quiet(script, tmp_path):
    with started(script("import time; time.sleep(60)"), tmp_path, stderr=subprocess.PIPE) as launcher:
        wait_until((tmp_path / "run" / "logs" / "rank-1.log").exists)
        launcher.send_signal(signal.SIGINT)
        _, told = launcher.communicate(timeout=20)
    assert told == f"ended by SIGINT\n\nlogs: {tmp_path}/run/logs\n"
    assert (tmp_path / "run" / "logs" / "rank-1.log").read_text() == ""


WITH_CHILDREN = """
import os, signal, subprocess, sys, time
from pathlib import Path
child = subprocess.Popen(["sleep", "60"])
Path(sys.argv[1], os.environ["RANK"]).write_text(f"{os.getpid()} {child.pid} ")
if sys.argv[2] == "stubborn":
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
time.sleep(60)
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_ending_the_launcher_ends_what_the_ranks_had_started(script, tmp_path, number):
    with started(script(WITH_CHILDREN), tmp_path, str(tmp_path), "obedient") as launcher:
        processes = pids_of(tmp_path)
        launcher.send_signal(number)
        assert launcher.wait(20) == 128 + number
    wait_until(lambda: not any(map(alive, processes)))
    assert len(processes) == 4


def test_a_second_ctrl_c_kills_ranks_that_do_not_listen(script, tmp_path):
    with started(script(WITH_CHILDREN), tmp_path, str(tmp_path), "stubborn") as launcher:
        processes = pids_of(tmp_path)
        time.sleep(0.3)
        launcher.send_signal(signal.SIGINT)
        time.sleep(0.5)
        assert launcher.poll() is None
        launcher.send_signal(signal.SIGINT)
        assert launcher.wait(3) == 130
    wait_until(lambda: not any(map(alive, processes)))
    assert len(processes) == 4


def test_kill_9_of_the_launcher_leaves_no_rank_behind(script, tmp_path):
    path = script("""
        import os, sys, time
        from pathlib import Path
        Path(sys.argv[1], os.environ["RANK"]).write_text(f"{os.getpid()} ")
        time.sleep(60)
    """)
    with started(path, tmp_path, str(tmp_path)) as launcher:
        processes = pids_of(tmp_path)
        launcher.kill()
        wait_until(lambda: not any(map(alive, processes)))
    assert len(processes) == 2


@contextlib.contextmanager
def started(path: Path, folder: Path, *arguments: str, **streams) -> Iterator[subprocess.Popen]:
    """A launcher of two ranks in a process group of its own, as a shell would start it; gone afterwards."""
    command = [sys.executable, "-c", START_AND_TELL, str(path), str(folder / "run"), *arguments]
    launcher = subprocess.Popen(command, process_group=0, text=True, **streams)
    try:
        yield launcher
    finally:
        launcher.kill()
        launcher.wait()


def pids_of(folder: Path) -> list[int]:
    """Process numbers that both ranks have written, each ending with a blank."""
    paths = [folder / "0", folder / "1"]
    wait_until(lambda: all(path.exists() and path.read_text().endswith(" ") for path in paths))
    return [int(number) for path in paths for number in path.read_text().split()]


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def wait_until(condition: Callable[[], bool], timeout_seconds: float = 20.0) -> None:
    deadline = time.monotonic() + timeout_seconds
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError(f"still not so after {timeout_seconds} s")
        time.sleep(0.02)
