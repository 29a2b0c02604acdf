"""Measure `finetune fit labels.csv` on images with several labels, next to a plain script and a regression.

    pip install -e '.[dev,timm]'
    python -m benchmarks.labels SET --weights WEIGHTS/tf_efficientnet_lite0 [--seeds 3] [--size 128]
    python -m benchmarks.labels --document

SET has train/CLASS and test/CLASS. For each seed, 1,000 mosaics of its images are written into a temporary folder, with
a table. The regression is scikit-learn's, one against the rest on standardised frozen features. plain.py trains for as
many epochs as the fit. The results go to labels.json, into benchmarks/NOTEBOOK.md and docs/labels.md. Stop at any time,
and start again to continue; `--again` repeats the runs that failed.
"""

import csv
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from benchmarks.choice.__main__ import features_of
from benchmarks.common.documents import NOTEBOOK, ROOT, markdown, mean_and_spread, publish
from benchmarks.common.driver import Benchmark
from benchmarks.common.records import where_and_when
from benchmarks.labels.mosaics import NUM_MOSAICS, write_mosaics
from finetune.fitting.network_choice import candidates_of
from finetune.models.candidates import Candidate
from finetune.training.run_length import usual_epochs

RECORDS = Path(__file__).with_name("labels.json")
PAGES = (NOTEBOOK, ROOT / "docs/labels.md")
PLAIN_SCRIPT = Path(__file__).with_name("plain.py")
STRENGTH = 0.1  # scikit-learn's C
LABELS = {
    "regression": "logistic regression on frozen features",
    "plain": "plain PyTorch, AdamW at 1e-3",
    "fit": "`finetune fit labels.csv`",
}
_SECONDS = 3600  # of a run

# Shapes: N test images, K labels.


class Run(NamedTuple):
    """What identifies a record; `what` is a key of LABELS."""

    set: str
    what: str
    seed: int
    size: int


class Answers(NamedTuple):
    """The test of a run: probabilities (N, K) and predictions (N, K) bool."""

    probabilities: np.ndarray
    predicted: np.ndarray


def rows_of(table: Path, split: str) -> list[dict[str, str]]:
    """Return the rows of a split."""
    with open(table, encoding="utf-8", newline="") as file:
        return [row for row in csv.DictReader(file) if row["split"] == split]


def label_names(table: Path) -> list[str]:
    """Return the labels of the training images."""
    return sorted({name for row in rows_of(table, "train") for name in row["labels"].split(";")})


def labels_of(table: Path, split: str) -> np.ndarray:
    """Return which labels each image of a split has, (N, K) bool."""
    names = label_names(table)
    return np.array(
        [[n in row["labels"].split(";") for n in names] for row in rows_of(table, split)]
    )


def regression(candidate: Candidate, table: Path, run: Run) -> Answers:
    """Return the test of a regression for each label, on frozen features of the training images."""
    from sklearn.linear_model import LogisticRegression
    from sklearn.multiclass import OneVsRestClassifier
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import StandardScaler

    x = {}
    for split in ("train", "test"):
        paths = [str(table.parent / row["path"]) for row in rows_of(table, split)]
        x[split] = features_of(candidate, paths, run.size)
    heads = OneVsRestClassifier(LogisticRegression(C=STRENGTH, max_iter=2000))
    model = make_pipeline(StandardScaler(), heads)
    model.fit(x["train"], labels_of(table, "train"))
    probabilities = model.predict_proba(x["test"])
    return Answers(probabilities, probabilities >= 0.5)


def plain(candidate: Candidate, table: Path, run: Run) -> Answers:
    """Return the test of plain.py."""
    command = [sys.executable, str(PLAIN_SCRIPT), str(table)]
    command += ["--network", candidate.backbone.removeprefix("timm/")]
    command += ["--weights", str(Path(candidate.weights, "model.safetensors"))]
    command += ["--epochs", str(usual_epochs(NUM_MOSAICS["train"]))]
    command += ["--size", str(run.size), "--seed", str(run.seed)]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, timeout=_SECONDS)
    probabilities = np.array(json.loads(done.stdout.splitlines()[-1]))
    return Answers(probabilities, probabilities >= 0.5)


def fit(candidate: Candidate, table: Path, run: Run) -> Answers:
    """Return the test of a fit with the defaults."""
    with tempfile.TemporaryDirectory() as out:
        command = [sys.executable, "-m", "finetune", "fit", str(table)]
        command += ["--backbone", candidate.backbone, "--weights", candidate.weights]
        command += ["--size", str(run.size), "--seed", str(run.seed)]
        command += ["--report", "false", "--out", out]
        environment = {**os.environ, "FINETUNE_CACHE": f"{out}/cache"}
        subprocess.run(command, check=True, env=environment, timeout=_SECONDS)
        predictions = Path(out, "fit/version_0/test_predictions.csv")
        with open(predictions, encoding="utf-8", newline="") as file:
            rows = list(csv.DictReader(file))
    names = label_names(table)
    return Answers(
        np.array([[float(row[f"p_{name}"]) for name in names] for row in rows]),
        np.array([[name in row["predicted"].split(";") for name in names] for row in rows]),
    )


METHODS: dict[str, Callable[[Candidate, Path, Run], Answers]] = {
    "regression": regression,
    "plain": plain,
    "fit": fit,
}


def result_of(answers: Answers, labels: np.ndarray) -> dict[str, float]:
    """Return the metrics of a test by scikit-learn, from the labels (N, K)."""
    from sklearn.metrics import average_precision_score, f1_score

    return {
        "mAP": float(average_precision_score(labels, answers.probabilities, average="macro")),
        "f1_micro": float(f1_score(labels, answers.predicted, average="micro")),
    }


def measure(run: Run, candidate: Candidate, source: Path) -> dict:
    """Return the result of a run and its circumstances."""
    with tempfile.TemporaryDirectory() as folder:
        table = write_mosaics(source, Path(folder, "mosaics"), run.seed)
        answers = METHODS[run.what](candidate, table, run)
        result = result_of(answers, labels_of(table, "test"))
    return {**result, "load": round(os.getloadavg()[1], 1), **where_and_when()}


def tables(records: Sequence[dict]) -> dict[str, str]:
    """Return the Markdown table of the pages."""
    good = [r for r in records if "mAP" in r]
    by_run = {(r["set"], r["size"], r["what"], r["seed"]): r for r in good}
    rows = []
    for what, label in LABELS.items():
        found = [r for r in good if r["what"] == what]
        if not found:
            continue
        differences = []
        for r in found:
            own_fit = by_run.get((r["set"], r["size"], "fit", r["seed"]))
            if own_fit is not None:
                differences.append(own_fit["mAP"] - r["mAP"])
        metrics = [mean_and_spread([r[name] for r in found], 3) for name in ("mAP", "f1_micro")]
        ahead = "–" if what == "fit" else _mean_difference(differences)
        rows.append([label, *metrics, ahead])
    head = ["what", "mAP", "micro F1", "mAP of the fit minus this one, paired"]
    return {"labels": markdown(head, rows)}


def _mean_difference(differences: Sequence[float]) -> str:
    """Return the mean of differences and its standard error."""
    if len(differences) < 2:
        return "–"
    error = statistics.stdev(differences) / len(differences) ** 0.5
    return f"{statistics.fmean(differences):+.3f} ± {error:.3f} (n = {len(differences)})"


def main() -> None:
    runs: dict[Run, tuple[Candidate, Path]] = {}
    benchmark = Benchmark(
        RECORDS, Run, lambda records: runs, lambda records: publish(tables(records), PAGES)
    )
    parser = benchmark.parser(__doc__)
    parser.add_argument("set", nargs="?", type=Path)
    parser.add_argument("--weights", help="folder of timm with config.json and weights")
    parser.add_argument("--size", type=int, default=128)
    parser.add_argument("--seeds", type=int, default=3)
    args = parser.parse_args()
    if not args.document:
        if args.set is None or args.weights is None:
            parser.error("SET and --weights are needed")
        candidate = candidates_of("auto", args.weights)[0]
        for seed in range(args.seeds):
            for what in LABELS:
                runs[Run(args.set.name, what, seed, args.size)] = (candidate, args.set)
    benchmark.main(args, lambda run: measure(run, *runs[run]))


if __name__ == "__main__":
    main()
