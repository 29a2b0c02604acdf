"""Images, their comparison with Pillow's, and the peak memory of a call."""

import contextlib
import ctypes
import io
import os
import resource
from collections.abc import Callable
from pathlib import Path

import numpy as np
from PIL import Image


def encode(pixels: np.ndarray | Image.Image, format: str, **options) -> bytes:
    buffer = io.BytesIO()
    image = pixels if isinstance(pixels, Image.Image) else Image.fromarray(pixels)
    image.save(buffer, format, **options)
    return buffer.getvalue()


def in_memory(num_bytes: int, act: Callable[[], object]) -> bool:
    """Whether a copy of this process can do something in this many bytes more than it has."""
    child = os.fork()
    if not child:
        code = 1
        with contextlib.suppress(Exception):  # a MemoryError, or what Pillow and torch make of it
            # what this process has freed, and kept, is not to be had for nothing
            ctypes.CDLL(None).malloc_trim(0)
            Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
            before, address_space = memory("VmHWM"), memory("VmSize")
            # nor is the machine's
            resource.setrlimit(resource.RLIMIT_AS, (address_space + num_bytes + 2**28,) * 2)
            act()
            code = int(memory("VmHWM") - before > num_bytes)
        os._exit(code)
    return os.waitpid(child, 0)[1] == 0


def memory(name: str) -> int:
    """Return what Linux reports about the memory of this process, in bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * int(next(line for line in lines if line.startswith(f"{name}:")).split()[1])


def random_image(height: int, width: int) -> np.ndarray:
    return (
        np.random.default_rng(height * 1000 + width)
        .integers(0, 256, (height, width, 3))
        .astype(np.uint8)
    )


def pillow(image: np.ndarray, height: int, width: int) -> np.ndarray:
    return np.array(Image.fromarray(image).resize((width, height), Image.Resampling.BILINEAR))


# They round their weights and the step between the directions each in its own way.
def assert_alike(result: np.ndarray, expected: np.ndarray) -> None:
    difference = np.abs(result.astype(int) - expected)
    assert result.dtype == np.uint8 and result.shape == expected.shape
    assert difference.max() <= 2 and difference.mean() < 0.3
