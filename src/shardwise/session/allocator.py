"""The allocator of a process that trains on the CPU."""

import ctypes
import sys

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # of mallopt(3)
KEEP_BYTES = 2**31 - 1  # the largest number that mallopt takes
OLD_MMAP_LIMIT = 32 * 2**20


def keep_freed_memory() -> None:
    """Let malloc keep what a step frees, for the next step to use.

    By default, glibc gives large tensors back to the kernel as they are freed, and the kernel clears every page when it
    hands them out again: a step of a small model was 5 to 7 % slower for it (benchmarks/pipeline_overhead.py). Other
    allocators, and systems without mallopt, are left as they are.
    """
    if sys.platform != "linux":
        return
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return
    # An old glibc takes no more than 32 MiB as the first, and with the second alone it would be worse off.
    if mallopt(M_MMAP_THRESHOLD, KEEP_BYTES) or mallopt(M_MMAP_THRESHOLD, OLD_MMAP_LIMIT):
        mallopt(M_TRIM_THRESHOLD, KEEP_BYTES)
