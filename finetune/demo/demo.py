"""`finetune demo`: pretraining, fine-tuning and training from scratch on drawn images, offline."""

import time
from pathlib import Path

from rich.console import Console
from rich.table import Table

from finetune.commands.config_files import find
from finetune.commands.lightning_cli import run_lightning
from finetune.distributed.signals import Interrupted
from finetune.runs.folder import Run
from finetune.system.messages import check_seed

# The running statistics of random weights are not worth freezing.
_SCRATCH = ("--model.weights", "null", "--model.freeze_batch_norm", "false")


def demo(root: str = "runs/demo", seed: int = 0) -> None:
    """Pretrain a ResNet-18 on generated dishes, fine-tune it on hot dogs, and compare with training from scratch.

    The images are generated in data/sample, and the runs are written to `root`. Takes a few minutes on two cores.

    Args:
        root: Folder for the runs.
        seed: Seed of the runs; the images are always the same.
    """
    check_seed(seed)
    try:
        _demo(root, seed)
    except Interrupted as stop:  # this command has no --resume
        raise Interrupted(stop.exit_code - 128, hint="") from stop


def _demo(root: str, seed: int) -> None:
    table = Table(
        "", "test accuracy", "seconds", "images/s", title="hot dog or not, 80 training images"
    )
    source, *_ = _fit(root, "source", seed, "sample_source.yaml")
    finetuned, *numbers = _fit(
        root, "finetuned", seed, "sample.yaml", "--model.weights", str(source.checkpoint("best"))
    )
    table.add_row("fine-tuned from generated dishes", *numbers)
    scratch, *numbers = _fit(root, "scratch", seed, "sample.yaml", *_SCRATCH)
    table.add_row("from scratch", *numbers)
    print()
    Console().print(table)
    for name, run in (("pretrained", source), ("fine-tuned", finetuned), ("from scratch", scratch)):
        print(f"{name}: {run.path}")
    print(f"images with their predictions: {finetuned.file('report.html')}")
    print(f"\nnext:\n  finetune predict {finetuned.path} data/sample/target/test")


def _fit(root: str, name: str, seed: int, config: str, *options: str) -> tuple[Run, str, str, str]:
    """Run `finetune fit` and return its run, test accuracy, duration in seconds, and training images per second."""
    print(f"\n{name}: finetune fit --config {config} {' '.join(options)}", flush=True)
    run_root = str(Path(root, name))
    before = time.perf_counter()
    fitted = run_lightning(
        [
            "fit",
            "--config",
            find(config),
            *options,
            "--trainer.devices",
            "1",  # the ranks of a first fit would have ended before the next fit in this process
            "--trainer.default_root_dir",
            run_root,
            "--seed_everything",
            str(seed),
        ]
    )
    seconds = time.perf_counter() - before
    rate = len(fitted.datamodule.splits["train"]) * fitted.trainer.current_epoch / seconds
    accuracy = float(fitted.trainer.callback_metrics["test/accuracy"])
    return fitted.run, f"{accuracy:.4f}", f"{seconds:.0f}", f"{rate:.0f}"
