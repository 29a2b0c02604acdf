"""The processor and its cores, and settings of its threads and of the memory allocator."""

import ctypes
import os
import platform
import sys
from pathlib import Path

# of malloc.h
_M_TRIM_THRESHOLD = -1
_M_MMAP_MAX = -4
# glibc's defaults
_TRIM_THRESHOLD = 128 * 1024
_MMAP_MAX = 65536
_is_kept = False
# environment variables that configure glibc's allocator
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


def sleep_at_once() -> None:
    """Let waiting threads of OpenMP sleep, which frees the cores for image decoding, unless the environment decides.

    This has an effect only before torch is imported, as `sleep_soon`.
    """
    if "torch" not in sys.modules:
        os.environ.setdefault("OMP_WAIT_POLICY", "passive")


def sleep_soon() -> None:
    """Let threads of OpenMP sleep after a wait of less than a millisecond (GNU's default: 10 ms).

    In training, the next operation usually comes at once. If another program has interrupted a thread, the others
    would wait for it on cores that it needs.
    """
    if "torch" not in sys.modules and "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", "10000")


def keep_freed_memory() -> bool:
    """Let glibc reuse the memory that one training step frees for the next step.

    By default glibc requests memory for each large tensor from the system and returns it when the tensor is freed.
    Every step then waits while the system clears each page again. With this setting the process keeps the memory of
    its peak. Nothing changes with another C library, or if environment variables configure the allocator. PyTorch's
    tuning guide recommends preloading another allocator for the same reason.

    Returns:
        Whether glibc has accepted the setting.
    """
    if _VARIABLES & os.environ.keys():
        return False
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError, TypeError):  # not glibc: musl, macOS, Windows
        return False
    global _is_kept
    _is_kept = bool(mallopt(_M_MMAP_MAX, 0)) and bool(mallopt(_M_TRIM_THRESHOLD, -1))
    return _is_kept


def give_freed_memory_back() -> None:
    """Undo `keep_freed_memory`, in a process that does other work afterwards."""
    global _is_kept
    if _is_kept:
        libc = ctypes.CDLL(None)
        libc.mallopt(_M_MMAP_MAX, _MMAP_MAX)
        libc.mallopt(_M_TRIM_THRESHOLD, _TRIM_THRESHOLD)
        libc.malloc_trim(0)
    _is_kept = False
