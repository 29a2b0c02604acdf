"""torchmetrics without scipy.signal and, for commands, without matplotlib; both are there for all others."""

import subprocess
import sys

import pytest

pytestmark = pytest.mark.slow


@pytest.mark.parametrize(("first", "is_there"), [("finetune", False), ("sys", True), ("scipy.signal, finetune", True)])
def test_scipy_signal_is_not_imported_with_torchmetrics(first, is_there):
    code = (
        f"import sys, {first}, torchmetrics.classification; print('scipy.signal' in sys.modules);"
        "import scipy.signal, torchmetrics;"
        "print(scipy.signal.hilbert([1.0, 2.0]).shape, torchmetrics.Accuracy.__name__)"
    )
    done = subprocess.run([sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, timeout=120)
    assert done.stdout == f"{is_there}\n(2,) Accuracy\n", done.stderr


@pytest.mark.parametrize("has_plots", [True, False])
def test_commands_do_not_import_matplotlib_with_torchmetrics(has_plots):
    code = (
        f"import sys; from finetune.system.lean_imports import import_less; import_less(has_plots={has_plots});"
        "import torchmetrics.classification, torch; print('matplotlib' in sys.modules);"
        "from finetune.training.metrics import split_metrics;"
        "print(float(split_metrics(2)(torch.eye(2), torch.tensor([0, 1]))['accuracy']));"
        "from matplotlib.figure import Figure; print(len(Figure().axes))"
    )
    done = subprocess.run([sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, timeout=120)
    assert done.stdout == f"{has_plots}\n1.0\n0\n", done.stderr


def test_a_metric_can_be_drawn_where_finetune_is_a_library():
    code = (
        "import matplotlib; matplotlib.use('agg'); import finetune, torch;"
        "from torchmetrics.classification import BinaryAccuracy;"
        "metric = BinaryAccuracy(); metric.update(torch.ones(2), torch.ones(2)); print(len(metric.plot()))"
    )
    done = subprocess.run([sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, timeout=120)
    assert done.stdout == "2\n", done.stderr
