"""Measure what each technique gives on validation pictures of four small sets, for docs/benchmarks.md.

    pip install -e '.[dev]'
    python -m benchmarks.techniques --sets SETS --weights resnet18.pt [--alone] [--minutes 60] [--only NAMES]

SETS holds satellite, flowers, clothing and trash, each with train/CLASS. 30 % of train are set apart and alone are
looked at: the test pictures are for recipes that are finished. Each run is added to techniques.json beside this as soon
as it is there and not done again: stop at any time, start again to go on. `--document` only writes the documents.
"""

import argparse
import json
import os
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from benchmarks.common.documents import ROOT, fill
from benchmarks.common.records import load, where_and_when
from benchmarks.common.resume import measure_all
from benchmarks.peers import measure
from benchmarks.quality.plan import SEEDS, SMALL
from benchmarks.techniques import watch
from benchmarks.techniques.documents import blocks

RECORDS = ROOT / "benchmarks/techniques/techniques.json"
TRIVIAL = ("--data.augmentations", "[{class_path: TrivialAugment}]")
SMALLER = ("--batch", "16", "--model.optimizer.lr", "0.02")
# The defaults of `finetune fit` when the runs were recorded, against which each technique is held.
FORMER = (
    *("--model.head_init", "xavier", "--model.freeze_batch_norm", "false"),
    *("--model.optimizer", "torch.optim.SGD", "--model.optimizer.lr", "0.03"),
)
# name: what is added to `finetune fit SET --size 128` and FORMER
TECHNIQUES: dict[str, tuple[str, ...]] = {
    "default": (),
    "head ×10, rate 0.01": ("--model.optimizer.lr", "0.01", "--model.head_lr_multiplier", "10"),
    "head ×10, rate 0.003": ("--model.optimizer.lr", "0.003", "--model.head_lr_multiplier", "10"),
    "rate 0.0075": ("--model.optimizer.lr", "0.0075"),
    "rate 0.015": ("--model.optimizer.lr", "0.015"),
    "rate 0.06": ("--model.optimizer.lr", "0.06"),
    "batches of 16, rate 0.02": SMALLER,
    "batches of 8, rate 0.015": ("--batch", "8", "--model.optimizer.lr", "0.015"),
    "AdamW, rate 0.0005": (
        "--model.optimizer",
        "torch.optim.AdamW",
        "--model.optimizer.lr",
        "0.0005",
    ),
    "mixup 0.2": ("--data.mixup", "0.2"),
    "cutmix 1": ("--data.cutmix", "1"),
    "label smoothing 0.1": ("--model.label_smoothing", "0.1"),
    "TrivialAugment": TRIVIAL,
    "96 pixels in the first half": ("--data.image_size_schedule", "96,128"),
    "head from a probe": ("--model.head_init", "probe"),
    "60 epochs": ("--epochs", "60"),
    "60 epochs, cutmix 1": ("--epochs", "60", "--data.cutmix", "1"),
    "60 epochs, TrivialAugment": ("--epochs", "60", *TRIVIAL),
    "60 epochs, TrivialAugment, batches of 16": ("--epochs", "60", *TRIVIAL, *SMALLER),
    "60 epochs, TrivialAugment, cutmix 1": ("--epochs", "60", *TRIVIAL, "--data.cutmix", "1"),
    "100 epochs": ("--epochs", "100"),
}


class Run(NamedTuple):
    """What there is one record of."""

    technique: str
    set: str
    seed: int


def plan() -> Iterator[Run]:
    """Yield all runs: each technique on each set, then with the next seed."""
    yield from (Run(name, on, seed) for seed in SEEDS for name in TECHNIQUES for on in SMALL)


def command(run: Run, sets: Path, weights: Path, out: Path) -> list[str]:
    """Return the command of a run; the splits have the run's seed, too."""
    common = f"--size 128 --seed {run.seed} --data.split_seed {run.seed} --data.val_fraction 0.3"
    # Averages and views are looked at in the default's runs: they would take a third of the others' time.
    common += " --trainer.callbacks+ benchmarks.techniques.watch.Watch"
    common += f" --trainer.callbacks.is_brief {str(run.technique != 'default').lower()}"
    common += " --test_after_fit false --report false"
    # Nothing of ours looks at the validation pictures until the end: the callback does.
    common += " --trainer.check_val_every_n_epoch 1000"
    program = [sys.executable, "-m", "finetune", "fit", str(sets / run.set)]
    settings = [*FORMER, *TECHNIQUES[run.technique]]
    return [*program, *common.split(), *settings, "--weights", str(weights), "--out", str(out)]


def train(run: Run, sets: Path, weights: Path, is_alone: bool) -> dict:
    """Return the record of a run."""
    with tempfile.TemporaryDirectory() as folder:
        file, out = Path(folder, "right.json"), Path(folder, "out")
        try:
            done = measure.run(
                command(run, sets, weights, out), {watch.FILE: str(file)}, Path(folder, "clock.txt")
            )
            found = {
                **json.loads(file.read_text("utf-8")),
                "seconds": round(done["seconds"], 1),
                "alone": is_alone,
            }
        except (measure.Failed, OSError, ValueError) as error:
            found = {
                "failed": str(error)
                .replace(str(sets), "SETS")
                .replace(str(weights), "WEIGHTS")[:200]
            }
    return {**run._asdict(), **found, **where_and_when()}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--sets", type=Path, help="folder of the four sets")
    parser.add_argument("--weights", type=Path, help="state dict of ResNet-18 to start from")
    parser.add_argument("--only", nargs="*", help="names of techniques and sets; all without it")
    parser.add_argument(
        "--alone",
        action="store_true",
        help="nothing else is busy on this machine: the seconds count",
    )
    parser.add_argument(
        "--minutes", type=float, default=float("inf"), help="start no run after this time"
    )
    parser.add_argument("--document", action="store_true", help="run nothing")
    args = parser.parse_args()
    has_failed = False
    if not args.document:
        if not (args.sets and args.weights):
            parser.error("--sets and --weights are needed to measure")
        wanted = set(args.only or [])
        if unknown := wanted - {*TECHNIQUES, *SMALL}:
            parser.error(
                f"--only: {', '.join(unknown)} are none of {', '.join([*TECHNIQUES, *SMALL])}"
            )
        techniques, sets = wanted & TECHNIQUES.keys() or TECHNIQUES, wanted & {*SMALL} or SMALL

        def choose(records: list[dict]) -> Run | None:
            done = {Run(*(r[name] for name in Run._fields)) for r in records}
            chosen = (run for run in plan() if run.technique in techniques and run.set in sets)
            return next((run for run in chosen if run not in done), None)

        # For the callback, in the fits.
        os.environ["PYTHONPATH"] = os.pathsep.join(
            filter(None, [str(ROOT), os.environ.get("PYTHONPATH")])
        )
        places = args.sets.resolve(), args.weights.resolve()
        has_failed = measure_all(
            RECORDS, choose, lambda run: train(run, *places, args.alone), args.minutes
        )
    fill(ROOT / "docs/benchmarks.md", blocks(load(RECORDS), TECHNIQUES))
    sys.exit(has_failed)


if __name__ == "__main__":
    main()
