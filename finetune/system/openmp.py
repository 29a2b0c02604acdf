"""How the threads of OpenMP wait for each other. Both functions have an effect only before torch is imported."""

import os
import sys


def sleep_at_once() -> None:
    """Let threads sleep while they wait, which frees the cores for image decoding. The environment may decide."""
    if "torch" not in sys.modules:
        os.environ.setdefault("OMP_WAIT_POLICY", "passive")


def sleep_soon() -> None:
    """Let threads sleep after a wait of less than a millisecond (GNU's default: 10 ms). The environment may decide.

    In training, the next operation usually comes at once. If another program has interrupted a thread, the others
    would wait for it on cores that it needs.
    """
    if "torch" not in sys.modules and "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", "10000")
