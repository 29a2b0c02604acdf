"""`finetune demo`: pretraining, fine-tuning and training from scratch on drawn images, offline."""

import time
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from rich.console import Console
from rich.table import Table

from finetune.distributed.signals import Interrupted
from finetune.fitting.build import stopped_at_once
from finetune.fitting.decide import decide
from finetune.fitting.fit import fit
from finetune.runs.folder import Run
from finetune.settings.all_commands import DemoSettings
from finetune.settings.layers import Layer, Layers, read_config, read_values

# The running statistics of random weights are not worth freezing.
_SCRATCH = MappingProxyType({"model.weights": None, "model.freeze_batch_norm": False})


def demo(options: DemoSettings) -> None:
    """Pretrain a ResNet-18 on generated dishes, fine-tune it on hot dogs, and compare with training from scratch.

    The images are generated in data/sample, and the runs are written to `root`. Takes a few minutes on two cores.
    """
    try:
        _demo(options.root, options.seed)
    except Interrupted as stop:  # this command has no --resume
        raise Interrupted(stop.exit_code - 128, hint="") from stop


def _demo(root: str, seed: int) -> None:
    table = Table(
        "", "test accuracy", "seconds", "images/s", title="hot dog or not, 80 training images"
    )
    source, *_ = _fit(root, "source", seed, "sample_source.yaml", {})
    weights = {"model.weights": str(source.checkpoint("best"))}
    finetuned, *numbers = _fit(root, "finetuned", seed, "sample.yaml", weights)
    table.add_row("fine-tuned from generated dishes", *numbers)
    scratch, *numbers = _fit(root, "scratch", seed, "sample.yaml", _SCRATCH)
    table.add_row("from scratch", *numbers)
    print()
    Console().print(table)
    for name, run in (("pretrained", source), ("fine-tuned", finetuned), ("from scratch", scratch)):
        print(f"{name}: {run.path}")
    print(f"images with their predictions: {finetuned.file('report.html')}")
    print(f"\nnext:\n  finetune predict {finetuned.path} data/sample/target/test")


def _fit(
    root: str, name: str, seed: int, config: str, values: Mapping[str, Any]
) -> tuple[Run, str, str, str]:
    """Run `finetune fit` and return its run, test accuracy, duration in seconds, and training images per second."""
    options = " ".join(
        f"--{name} {'null' if value is None else value}" for name, value in values.items()
    )
    command = f"finetune fit --config {config} {options}".rstrip()
    print(f"\n{name}: {command}", flush=True)
    before = time.perf_counter()
    of_demo = {
        **values,
        "trainer.devices": 1,  # the ranks of a first fit would have ended before the next fit
        "trainer.default_root_dir": str(Path(root, name)),
        "seed_everything": seed,
    }
    layers = Layers("fit", (read_config("fit", config),))
    layers = layers.on_top(read_values("fit", Layer("finetune demo", "python"), of_demo))
    with stopped_at_once():
        fitted = fit(decide(layers, command, time.monotonic()))
    seconds = time.perf_counter() - before
    rate = len(fitted.data.splits["train"]) * fitted.trainer.current_epoch / seconds
    accuracy = float(fitted.trainer.callback_metrics["test/accuracy"])
    return fitted.run, f"{accuracy:.4f}", f"{seconds:.0f}", f"{rate:.0f}"
