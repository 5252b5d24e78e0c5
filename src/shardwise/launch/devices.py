"""How many devices this machine has for one process each."""

import os
from pathlib import Path

MOST_CPU_RANKS = 8  # ranks on a CPU are for trying things out

_TOPOLOGY = Path("/sys/devices/system/cpu")
_NVIDIA_DRIVER = (Path("/proc/driver/nvidia/version"), Path("/dev/dxg"))  # Linux, and Linux on Windows


def devices_here() -> int:
    """All CUDA devices; where there is none, a device is a physical core, and at most `MOST_CPU_RANKS` are given."""
    return _cuda_devices() or min(_physical_cores(), MOST_CPU_RANKS)


def _cuda_devices() -> int:
    if not any(path.exists() for path in _NVIDIA_DRIVER):
        return 0
    import torch  # takes two seconds, which a launcher without a GPU need not wait for

    return torch.cuda.device_count()


def _physical_cores() -> int:
    """Cores among the processors that we may run on, hyper-threads of one core counted once."""
    return len({_siblings(processor) for processor in os.sched_getaffinity(0)})


def _siblings(processor: int) -> str:
    path = _TOPOLOGY / f"cpu{processor}" / "topology" / "thread_siblings_list"
    return path.read_text() if path.exists() else str(processor)
