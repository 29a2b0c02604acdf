"""How the threads of OpenMP wait for each other. Both functions have an effect only before torch is imported."""

import os
import sys

# Less than a millisecond. With its default of 300,000, GNU's OpenMP waits for about 10 ms.
_SPIN_COUNT = 10_000


def sleep_at_once() -> None:
    """Let threads sleep while they wait, unless the environment decides.

    This frees the cores for image decoding. Training steps alone would be slower.
    """
    if "torch" not in sys.modules:
        os.environ.setdefault("OMP_WAIT_POLICY", "passive")


def sleep_soon() -> None:
    """Let threads sleep after a short wait, unless the environment decides.

    In training, the next operation usually comes at once. If another program has interrupted a thread, the others
    would wait for it on cores that it needs.
    """
    if "torch" not in sys.modules and "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", str(_SPIN_COUNT))
