"""Compare `finetune fit FOLDER` with ten lines: scikit-learn's logistic regression on frozen features.

    pip install -e '.[dev]'
    python -m benchmarks.defaults SET ... --weights resnet18=resnet18.pt,TIMM_FOLDER [--seeds 3] [--size 128]
    python -m benchmarks.defaults --document

Each SET has train/CLASS and test/CLASS. The results go to defaults.json and into benchmarks/NOTEBOOK.md. The tables of
other benchmarks take their row of the logistic regression from defaults.json (`--seeds 0` measures it alone).
Stop at any time, and start again to continue; `--again` repeats the runs that failed.
"""

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from benchmarks.choice.__main__ import features
from benchmarks.common.documents import markdown, mean_and_spread, publish
from benchmarks.common.driver import Benchmark
from benchmarks.common.records import where_and_when
from finetune.fitting.network_choice import candidates_of
from finetune.models.candidates import Candidate

RECORDS = Path(__file__).with_name("defaults.json")
IMAGE_SIZE = 128  # of the table
STRENGTH = 0.1  # scikit-learn's C in the ten lines
LABELS = {"regression": "logistic regression", "fit": "`finetune fit FOLDER`"}


def candidates(weights: str) -> list[Candidate]:
    """Return networks with their weights: NAME=FILE, runs or folders of timm, separated by commas."""
    found: list[Candidate] = []
    for part in weights.split(","):
        name, equals, file = part.partition("=")
        found += [Candidate(name, file)] if equals else candidates_of("auto", part)
    return found


class Run(NamedTuple):
    """What identifies a record; `what` is a key of LABELS."""

    start: str
    set: str
    what: str
    seed: int
    size: int


def regression(candidate: Candidate, folder: Path, size: int) -> dict:
    """Return the test accuracy of the ten lines: standardised features, all training images."""
    from sklearn.linear_model import LogisticRegression
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import StandardScaler

    table = features(candidate, folder, size, None)
    model = make_pipeline(StandardScaler(), LogisticRegression(C=STRENGTH, max_iter=2000))
    model.fit(table["train"], table["train_y"])
    return {"accuracy": float((model.predict(table["test"]) == table["test_y"]).mean())}


def fit(candidate: Candidate, folder: Path, run: Run) -> dict:
    """Return the result of a fit with the defaults, by its own test."""
    with tempfile.TemporaryDirectory() as out:
        command = [sys.executable, "-m", "finetune", "fit", str(folder)]
        command += ["--backbone", candidate.backbone, "--weights", candidate.weights]
        command += ["--size", str(run.size), "--seed", str(run.seed), "--precision", "32-true"]
        command += ["--report", "false", "--out", out]
        began = time.monotonic()
        subprocess.run(command, check=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
        seconds = round(time.monotonic() - began)
        result = json.loads(Path(out, "fit/version_0/test.json").read_text("utf-8"))
    return {
        "seconds": seconds,
        "accuracy": result["test/accuracy"],
        "calibration_error": result["test/calibration_error"],
        "error_before": result["test/calibration_error_before_scaling"],
        "share": (result["interpolation"] or {}).get("share"),
    }


def tables(records: Sequence[dict]) -> dict[str, str]:
    """Return the Markdown tables of benchmarks/NOTEBOOK.md."""
    good = [r for r in records if "accuracy" in r and r["size"] == IMAGE_SIZE]
    fitted = {r["set"] for r in good if r["what"] == "fit"}
    sets = [name for name in dict.fromkeys(r["set"] for r in good) if name in fitted]
    rows = []
    for start in dict.fromkeys(record["start"] for record in good):
        for what in LABELS:
            wanted = (start, what)
            found = [r for r in good if (r["start"], r["what"]) == wanted and r["set"] in sets]
            if found:
                rows.append([start, LABELS[what], *cells(found, sets, what)])
    head = ["start", "what", *sets, "mean", "calibration error before and after the temperature"]
    return {"defaults": markdown(head, rows)}


def cells(records: Sequence[dict], sets: Sequence[str], what: str) -> list[str]:
    """Return the accuracies on each set, their mean if all are measured, and the calibration errors of a fit."""
    by_set = [[r["accuracy"] for r in records if r["set"] == name] for name in sets]
    means = [statistics.fmean(values) for values in by_set if values]
    mean = f"{statistics.fmean(means):.3f}" if len(means) == len(sets) else "–"
    if what == "regression":
        return [*(f"{values[0]:.3f}" if values else "–" for values in by_set), mean, "–"]
    errors = [
        f"{statistics.fmean(r[name] for r in records):.3f}"
        for name in ("error_before", "calibration_error")
    ]
    return [*(mean_and_spread(values, 3) for values in by_set), mean, ", ".join(errors)]


def main() -> None:
    runs: dict[Run, tuple[Candidate, Path]] = {}
    benchmark = Benchmark(
        RECORDS, Run, lambda records: runs, lambda records: publish(tables(records))
    )
    parser = benchmark.parser(__doc__)
    parser.add_argument("sets", nargs="*", type=Path)
    parser.add_argument("--weights", help="networks with their weights, separated by commas")
    parser.add_argument("--size", type=int, default=IMAGE_SIZE)
    parser.add_argument("--seeds", type=int, default=3)
    args = parser.parse_args()
    for candidate in [] if args.document else candidates(args.weights):
        for what, num_seeds in (("regression", 1), ("fit", args.seeds)):
            for seed in range(num_seeds):
                for folder in args.sets:
                    run = Run(candidate.backbone, folder.name, what, seed, args.size)
                    runs[run] = (candidate, folder)

    def measure(run: Run) -> dict:
        candidate, folder = runs[run]
        is_fit = run.what == "fit"
        result = fit(candidate, folder, run) if is_fit else regression(candidate, folder, run.size)
        return {**result, **where_and_when()}

    benchmark.main(args, measure)


if __name__ == "__main__":
    main()
