"""`finetune by-hand`: data parallelism without a framework on Fashion-MNIST, epoch by epoch."""

from collections.abc import Sequence
from pathlib import Path

import torch

from finetune.inference.predictor import device_named
from finetune.parity.data_parallel import Epoch, train
from finetune.reports.charts import curves
from finetune.settings.all_commands import ByHandSettings
from finetune.system.files import check_target, replace_text
from finetune.system.html_page import render

_DTYPES = {"float32": torch.float32, "float64": torch.float64}


def by_hand(options: ByHandSettings) -> None:
    """Train LeNet on Fashion-MNIST on several devices with data parallelism written by hand.

    Prints test accuracy and time of training after each epoch, and draws the accuracy curve.
    """
    replicas = [device_named(name.strip()) for name in options.devices.split(",")]
    check_target(options.output, "--out")
    done: list[Epoch] = []
    for epoch in train(
        replicas,
        options.batch_size,
        options.lr,
        options.epochs,
        root=Path(options.root),
        dtype=_DTYPES[options.dtype],
        seed=options.seed,
    ):
        done.append(epoch)
        print(
            f"epoch {epoch.epoch}  test accuracy {epoch.accuracy:.4f}  time {epoch.seconds:.1f} s",
            flush=True,
        )
        _write_curve(done, options)
    print(f"accuracy curve in {options.output}")


def _write_curve(epochs: Sequence[Epoch], options: ByHandSettings) -> None:
    """Write a page with the curve of the test accuracy over epochs."""
    points = ([float(e.epoch) for e in epochs], [e.accuracy for e in epochs])
    settings = f"{options.dtype}, devices {options.devices}, batch_size {options.batch_size}"
    about = f"test accuracy by epoch, at the end {epochs[-1].accuracy:.4f}"
    page = render(
        "commands/by_hand.html",
        title="LeNet on Fashion-MNIST, data parallel by hand",
        about=f"{settings}, lr {options.lr:g}: {about}",
        chart=curves({"accuracy": points}, "epoch", "test accuracy", about),
    )
    Path(options.output).parent.mkdir(parents=True, exist_ok=True)
    replace_text(Path(options.output), page)
