"""torchmetrics without scipy.signal and, for commands, without matplotlib; both are there for all others."""

import subprocess
import sys

import pytest

pytestmark = pytest.mark.slow

_SIGNAL = """
import torchmetrics.classification
print("scipy.signal" in sys.modules)
import scipy.signal, torchmetrics
print(scipy.signal.hilbert([1.0, 2.0]).shape, torchmetrics.Accuracy.__name__)
"""
_DRAWN = """
import matplotlib; matplotlib.use("agg")
import torch; from torchmetrics.classification import BinaryAccuracy
metric = BinaryAccuracy(); metric.update(torch.ones(2), torch.ones(2)); print(len(metric.plot()))
"""
_COMMAND = """
from finetune.system.lean_imports import import_less; import_less(has_plots=False)
import torchmetrics.classification, torch; print("matplotlib" in sys.modules)
from finetune.training.metrics import split_metrics
print(float(split_metrics(2)(torch.eye(2), torch.tensor([0, 1]))["accuracy"]))
from matplotlib.figure import Figure; print(len(Figure().axes))
"""


@pytest.mark.parametrize(
    ("code", "output"),
    [
        # a library draws metrics, too
        ("import finetune" + _SIGNAL + _DRAWN, "False\n(2,) Accuracy\n2\n"),
        ("import scipy.signal, finetune" + _SIGNAL, "True\n(2,) Accuracy\n"),
        (_SIGNAL, "True\n(2,) Accuracy\n"),  # the control
        (_COMMAND, "False\n1.0\n0\n"),
    ],
    ids=["library", "there before", "control", "command"],
)
def test_what_torchmetrics_imports(code, output):
    command = [sys.executable, "-W", "error", "-c", "import sys\n" + code]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.stdout == output, done.stderr
