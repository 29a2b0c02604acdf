"""What this machine is, and how its C library hands out memory, which on a CPU is a tenth of a training step."""

import ctypes
import os
import platform
from pathlib import Path

_M_TRIM_THRESHOLD, _M_MMAP_MAX = -1, -4  # of malloc.h
_TRIM_THRESHOLD, _MMAP_MAX = 128 * 1024, 65536  # glibc's defaults
_is_kept = False
# glibc's own
_VARIABLES = {
    "MALLOC_TRIM_THRESHOLD_",
    "MALLOC_MMAP_MAX_",
    "MALLOC_MMAP_THRESHOLD_",
    "GLIBC_TUNABLES",
}


def processor() -> str:
    """Return the processor's name."""
    file = Path("/proc/cpuinfo")
    lines = file.read_text("utf-8").splitlines() if file.exists() else []
    return next(
        (line.split(":")[1].strip() for line in lines if line.startswith("model name")),
        platform.processor(),
    )


def num_cores() -> int:
    """Return how many cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def keep_freed_memory() -> bool:
    """Let what one step frees serve the next; say whether the C library can.

    glibc by itself asks the system for each large tensor and gives it back when the tensor is freed, so that every step
    waits for the system to clear every page again. The process then stays as large as it was at its largest. Other C
    libraries are left alone, and so is one that its environment variables already tell what to do. PyTorch's tuning
    guide advises another allocator, preloaded, for the same reason.
    """
    if _VARIABLES & os.environ.keys():
        return False
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError, TypeError):  # there is none: musl's, macOS's, Windows'
        return False
    global _is_kept
    _is_kept = bool(mallopt(_M_MMAP_MAX, 0)) and bool(mallopt(_M_TRIM_THRESHOLD, -1))
    return _is_kept


def give_freed_memory_back() -> None:
    """Undo `keep_freed_memory`, in a process that goes on with something else."""
    global _is_kept
    if _is_kept:
        libc = ctypes.CDLL(None)
        libc.mallopt(_M_MMAP_MAX, _MMAP_MAX)
        libc.mallopt(_M_TRIM_THRESHOLD, _TRIM_THRESHOLD)
        libc.malloc_trim(0)
    _is_kept = False
