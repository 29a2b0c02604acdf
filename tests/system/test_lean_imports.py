"""torchmetrics without scipy.signal, which is there for all others."""

import subprocess
import sys

import pytest


@pytest.mark.parametrize(("first", "is_there"), [("finetune", False), ("sys", True), ("scipy.signal, finetune", True)])
def test_scipy_signal_is_not_imported_with_torchmetrics(first, is_there):
    code = (
        f"import sys, {first}, torchmetrics.classification; print('scipy.signal' in sys.modules);"
        "import scipy.signal, torchmetrics;"
        "print(scipy.signal.hilbert([1.0, 2.0]).shape, torchmetrics.Accuracy.__name__)"
    )
    done = subprocess.run([sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, timeout=120)
    assert done.stdout == f"{is_there}\n(2,) Accuracy\n", done.stderr
