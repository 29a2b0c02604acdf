"""Measure `finetune fit FOLDER` beside ten lines: scikit-learn's logistic regression on frozen features.

    pip install -e '.[dev]'
    python -m benchmarks.defaults SET ... --weights resnet18=resnet18.pt,TIMM_FOLDER [--seeds 3] [--size 128]
    python -m benchmarks.defaults --document

Each SET has train/CLASS and test/CLASS. Each result is added to defaults.json as soon as it is there, and is not
measured again: stop at any time, start again to go on. The tables of docs/benchmarks.md are written in the end, and by
`--document` alone.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from benchmarks.choice.__main__ import features
from benchmarks.common.documents import ROOT, fill, mean_and_spread
from benchmarks.common.records import load, save, where_and_when
from finetune.commands.backbone_choice import candidates_of
from finetune.models.candidates import Candidate

RECORDS = Path(__file__).with_name("defaults.json")
STRENGTH = 0.1  # scikit-learn's C, of the ten lines


def regression(candidate: Candidate, folder: Path, size: int) -> dict:
    """Return the test accuracy of the ten lines: standardised features, all training images."""
    from sklearn.linear_model import LogisticRegression
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import StandardScaler

    found = features(candidate, folder, size, None)
    model = make_pipeline(StandardScaler(), LogisticRegression(C=STRENGTH, max_iter=2000))
    model.fit(found["train"], found["train_y"])
    return {"accuracy": float((model.predict(found["test"]) == found["test_y"]).mean())}


def fit(candidate: Candidate, folder: Path, size: int, seed: int) -> dict:
    """Return what a fit with the defaults gives, by its own test."""
    options = [
        "--backbone",
        candidate.backbone,
        "--weights",
        candidate.weights,
        "--size",
        size,
        "--seed",
        seed,
    ]
    with tempfile.TemporaryDirectory() as out:
        more = ["--precision", "32-true", "--report", "false", "--out", out]
        began = time.monotonic()
        command = [sys.executable, "-m", "finetune", "fit", folder, *options, *more]
        subprocess.run([*map(str, command)], check=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
        result = json.loads((Path(out) / "fit/version_0/test.json").read_text("utf-8"))
        return {"seconds": round(time.monotonic() - began), **of_test(result)}


def of_test(result: dict) -> dict:
    """Return what a record holds of a run's test.json."""
    names = {"accuracy": "accuracy", "calibration_error": "calibration_error"}
    names |= {"calibration_error_before_scaling": "error_before"}
    values = {short: result[f"test/{name}"] for name, short in names.items()}
    return {**values, "share": (result["interpolation"] or {}).get("share")}


def tables(records: Sequence[dict]) -> dict[str, str]:
    """Return the Markdown tables of docs/benchmarks.md."""
    sets = list(dict.fromkeys(record["set"] for record in records))
    lines = [f"| start | what | {' | '.join(sets)} | mean | calibration error before and after |"]
    lines.append("| --- | --- |" + " --- |" * (len(sets) + 2))
    for start in dict.fromkeys(record["start"] for record in records):
        for what, label in (
            ("regression", "logistic regression"),
            ("fit", "`finetune fit FOLDER`"),
        ):
            found = [r for r in records if (r["start"], r["what"]) == (start, what)]
            by_set = [[r["accuracy"] for r in found if r["set"] == name] for name in sets]
            if not found:
                continue
            cells = [
                mean_and_spread(values, 3) if what == "fit" else f"{values[0]:.3f}"
                for values in by_set
            ]
            mean = (
                f"{statistics.fmean(statistics.fmean(values) for values in by_set):.3f}"
                if all(by_set)
                else "–"
            )
            errors = "–"
            if what == "fit":
                errors = ", ".join(
                    f"{statistics.fmean(r[n] for r in found):.3f}"
                    for n in ("error_before", "calibration_error")
                )
            lines.append(f"| {start} | {label} | {' | '.join(cells)} | {mean} | {errors} |")
    return {"defaults": "\n".join(lines)}


def main() -> None:
    parser = argparse.ArgumentParser("python -m benchmarks.defaults")
    parser.add_argument("sets", nargs="*", type=Path)
    parser.add_argument("--weights")
    parser.add_argument("--size", type=int, default=128)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--document", action="store_true")
    options = parser.parse_args()
    records = load(RECORDS)
    jobs = []
    if not options.document:
        for candidate in candidates_of("auto", options.weights):
            jobs += [(candidate, folder, "regression", 0) for folder in options.sets]
            jobs += [
                (candidate, folder, "fit", seed)
                for seed in range(options.seeds)
                for folder in options.sets
            ]
    for candidate, folder, what, seed in jobs:
        key = {
            "start": candidate.backbone,
            "set": folder.name,
            "what": what,
            "seed": seed,
            "size": options.size,
        }
        if any(key.items() <= record.items() for record in records):
            continue
        is_fit = what == "fit"
        found = (
            fit(candidate, folder, options.size, seed)
            if is_fit
            else regression(candidate, folder, options.size)
        )
        records.append({**key, **found, **where_and_when()})
        save(RECORDS, records)
    fill(ROOT / "docs/benchmarks.md", tables(records))


if __name__ == "__main__":
    main()
