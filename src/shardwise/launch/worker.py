"""What each rank runs first: `python -m shardwise.launch.worker LAUNCHER LOG RECORD SCRIPT ARGUMENTS`.

    LAUNCHER   process id of the launcher
    LOG        file to append the traceback of a failure to
    RECORD     file to leave the record of a failure in

Runs the user's script as `python SCRIPT ARGUMENTS` would, dies with the launcher, and leaves a record where the script
raises. It says nothing itself: the launcher shows the first cause once, instead of every rank showing its own.
"""

import ctypes
import os
import runpy
import signal
import socket
import sys
import sysconfig
import time
import traceback
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType

from shardwise.launch.failure import Raised, UserLine, write_record

INTERRUPTED = 128 + signal.SIGINT

_PR_SET_PDEATHSIG = 1  # from <linux/prctl.h>


def main(launcher: str, log: str, record: str, script: str, *arguments: str) -> int:
    """Run the script; returns the exit code where the script does not set its own."""
    try:
        # The launcher blocks SIGINT until here: Ctrl-C during start-up would print a traceback.
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
        _die_with(launcher=int(launcher))
        try:
            _run(script, arguments)
        except Exception as error:
            raised = raised_by(error, rank=int(os.environ["RANK"]))
            with Path(log).open("a") as lines:
                lines.write(raised.traceback)
            write_record(raised, Path(record))
            _leave_process_group()
            return 1
    except KeyboardInterrupt:
        _leave_process_group()
        return INTERRUPTED
    return 0


def raised_by(error: BaseException, rank: int) -> Raised:
    """The record of an exception on its way out of the user's script, without the frames of this module and `runpy`."""
    inner = _below_bootstrap(error.__traceback__)
    kind = type(error)
    return Raised(
        rank=rank,
        host=socket.gethostname(),
        time_seconds=time.time(),
        exception=kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}",
        message=str(error),
        traceback="".join(traceback.format_exception(kind, error, inner)),
        user_line=_user_line(inner),
    )


def _die_with(launcher: int) -> None:
    """Ask the kernel to kill this process as soon as the launcher is gone, even by kill -9 (Linux only)."""
    if sys.platform != "linux":
        return
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) failed: this rank would outlive its launcher")
    if os.getppid() != launcher:  # it died before we asked
        os.kill(os.getpid(), signal.SIGKILL)


def _run(script: str, arguments: Sequence[str]) -> None:
    sys.argv = [script, *arguments]
    # As `python SCRIPT` does. The launcher starts us with -P, so that no file in the current folder replaces torch.
    sys.path.insert(0, str(Path(script).resolve().parent))
    runpy.run_path(script, run_name="__main__")


def _leave_process_group() -> None:
    """Destroy the process group, if there is one: gloo, left alone at exit, may abort with a message of its own."""
    distributed = sys.modules.get("torch.distributed")
    if distributed is not None and distributed.is_initialized():
        distributed.destroy_process_group()


def _below_bootstrap(frames: TracebackType | None) -> TracebackType | None:
    """The frames from the first that is neither of this module nor of `runpy`; all of them where there is none such."""
    inner = frames
    while inner is not None and inner.tb_frame.f_code.co_filename in (__file__, runpy.__file__, "<frozen runpy>"):
        inner = inner.tb_next
    return inner or frames


def _user_line(frames: TracebackType | None) -> UserLine | None:
    """The innermost frame that is neither of Python, of an installed package, nor of shardwise."""
    for frame in reversed(traceback.extract_tb(frames)):
        path = Path(frame.filename)
        if not frame.filename.startswith("<") and not any(path.is_relative_to(folder) for folder in _not_the_users()):
            return UserLine(file=frame.filename, line=frame.lineno or 0, function=frame.name, source=frame.line or "")
    return None


def _not_the_users() -> set[str]:
    """Folders of Python, of installed packages and of shardwise itself."""
    installed = {sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")}
    return installed | {str(Path(__file__).parent.parent)}


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
