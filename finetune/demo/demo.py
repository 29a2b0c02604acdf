"""`finetune demo`: pretraining, fine-tuning and training from scratch on drawn images, offline."""

import json
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from rich.console import Console
from rich.table import Table

from finetune.distributed.signals import Interrupted
from finetune.fitting.build import stopped_at_once
from finetune.fitting.decide import decide
from finetune.fitting.fit import fit
from finetune.runs.folder import Run
from finetune.settings.all_commands import DemoSettings
from finetune.settings.layers import Layer, Layers, read_config, read_values

# At most, on a slow machine: its fits are shorter. Two cores without AVX-512 need less.
_SOURCE_MINUTES = 1.75
_TARGET_MINUTES = 0.6


def demo(options: DemoSettings) -> None:
    """Pretrain a ResNet-18 on generated dishes, fine-tune it on hot dogs, and compare with training from scratch.

    The images are generated in data/sample, and the runs are written to `root`. Takes about three minutes.
    """
    try:
        _demo(options.root, options.seed)
    except Interrupted as stop:  # this command has no --resume
        raise Interrupted(stop.exit_code - 128, hint="") from stop


class _Done(NamedTuple):
    """A fit that has ended.

    Attributes:
        run: Its run.
        cells: Test accuracy and duration in seconds, as the table shows them.
        length: The settings of its length.
    """

    run: Run
    cells: tuple[str, str]
    length: Mapping[str, Any]


def _demo(root: str, seed: int) -> None:
    source = _fit(root, "source", seed, "sample_source.yaml", {"minutes": _SOURCE_MINUTES})
    weights = str(source.run.checkpoint("best"))
    values = {"model.weights": weights, "minutes": _TARGET_MINUTES}
    finetuned = _fit(root, "finetuned", seed, "sample.yaml", values)
    scratch = _fit(
        root, "scratch", seed, "sample.yaml", {"model.weights": None, **finetuned.length}
    )
    table = Table("", "test accuracy", "seconds", title="hot dog or not, 40 training images")
    table.add_row("fine-tuned from generated dishes", *finetuned.cells)
    table.add_row("from scratch", *scratch.cells)
    print()
    Console().print(table)
    runs = (("pretrained", source), ("fine-tuned", finetuned), ("from scratch", scratch))
    for name, done in runs:
        print(f"{name}: {done.run.path}")
    print(f"images with their predictions: {finetuned.run.file('report.html')}")
    print(f"\nnext:\n  finetune predict {finetuned.run.path} data/sample/target/test")


def _fit(root: str, name: str, seed: int, config: str, values: Mapping[str, Any]) -> _Done:
    """Run `finetune fit`, with the values of settings on top of a config."""
    options = " ".join(
        f"--{name} {value if isinstance(value, str) else json.dumps(value)}"
        for name, value in values.items()
    )
    command = f"finetune fit --config {config} {options}".rstrip()
    print(f"\n{name}: {command}", flush=True)
    before = time.monotonic()
    of_demo = {
        **values,
        "trainer.devices": 1,  # the ranks of a first fit would have ended before the next fit
        "trainer.default_root_dir": str(Path(root, name)),
        "seed_everything": seed,
    }
    layers = Layers("fit", (read_config("fit", config),))
    layers = layers.on_top(read_values("fit", Layer("finetune demo", "python"), of_demo))
    with stopped_at_once():
        plan = decide(layers, command, before)
        fitted = fit(plan)
    accuracy = float(fitted.trainer.callback_metrics["test/accuracy"])
    cells = (f"{accuracy:.4f}", f"{time.monotonic() - before:.0f}")
    names = ("max_epochs", "limit_train_batches")
    length = {f"trainer.{name}": getattr(plan.settings.trainer, name) for name in names}
    of_length = {name: value for name, value in length.items() if value is not None}
    return _Done(fitted.run, cells, of_length)
