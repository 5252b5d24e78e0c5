"""Whether the kernel ended processes for want of memory."""

from pathlib import Path

VMSTAT = Path("/proc/vmstat")


def oom_kills(vmstat: Path = VMSTAT) -> int | None:
    """How many processes the kernel has ended for want of memory since it booted; None where it does not say."""
    try:
        lines = vmstat.read_text().splitlines()
    except OSError:  # not Linux, or a sandbox that hides it
        return None
    return next((int(line.split()[1]) for line in lines if line.startswith("oom_kill ")), None)


def oom_kills_since(before: int | None, vmstat: Path = VMSTAT) -> int | None:
    """How many of them since `oom_kills` gave `before`."""
    now = oom_kills(vmstat)
    return None if before is None or now is None else now - before
