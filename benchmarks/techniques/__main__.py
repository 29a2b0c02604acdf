"""Write the tables of techniques.json into benchmarks/NOTEBOOK.md.

    python -m benchmarks.techniques

Each record has, after each epoch of a fit, a digit for each validation image: 1 where the network is right. The runs
are of the former defaults; the script that made them is not kept.
"""

import statistics
from collections import Counter
from collections.abc import Callable, Sequence

import numpy as np

from benchmarks.common.documents import ROOT, markdown, period, publish
from benchmarks.common.driver import command_line
from benchmarks.common.records import load
from benchmarks.quality.plan import SMALL
from finetune.runs.best_epoch import lowest_acceptable

RECORDS = ROOT / "benchmarks/techniques/techniques.json"
# The rows of the table.
TECHNIQUES = (
    "head ×10, rate 0.01",
    "head ×10, rate 0.003",
    "rate 0.0075",
    "rate 0.015",
    "rate 0.06",
    "batches of 16, rate 0.02",
    "batches of 8, rate 0.015",
    "AdamW, rate 0.0005",
    "mixup 0.2",
    "cutmix 1",
    "label smoothing 0.1",
    "TrivialAugment",
    "head from a probe",
    "60 epochs",
    "60 epochs, cutmix 1",
    "60 epochs, TrivialAugment",
    "60 epochs, TrivialAugment, batches of 16",
    "60 epochs, TrivialAugment, cutmix 1",
    "100 epochs",
)
_NUM_CHOOSING = 30  # images: about as many as the default sets apart of such sets
_DRAWS = 1000
_PATIENCE = 5
_VIEWS = {
    "flip": "with mirrored images",
    "five crops": "with five crops",
    "whole": "the complete shorter side, not 7/8 of it",
}


def right(digits: str) -> np.ndarray:
    """Return a digit for each image as numbers, (num_images,)."""
    return np.array(list(map(int, digits)), float)


def epochs(record: dict) -> np.ndarray:
    """Return what was right after each epoch, (num_epochs, num_images)."""
    return np.stack(
        [right(digits) for name, digits in record["right"].items() if name.startswith("epoch ")]
    )


def at_the_end(record: dict) -> float:
    return float(epochs(record)[-1].mean())


def blocks(records: Sequence[dict]) -> dict[str, str]:
    """Return the blocks of benchmarks/NOTEBOOK.md."""
    base = [r for r in records if r["technique"] == "default"]
    first = "default, the last epoch"
    rows = {first: [*map(_of(at_the_end), base)]}
    notes = {first: f"{over_confidence(base)} | –"}
    for name in TECHNIQUES:
        found = [r for r in records if r["technique"] == name]
        alone = [r["seconds"] for r in found if r.get("alone")]
        seconds = f"{statistics.fmean(alone):.0f} (n = {len(alone)})" if alone else "–"
        rows[name] = [*map(_of(at_the_end), found)]
        notes[name] = f"{over_confidence(found)} | {seconds}"
    for name in dict.fromkeys(name for r in base for name in r["right"]):
        if not name.startswith("epoch "):
            has = [r for r in base if name in r["right"]]
            rows[_label(name)] = [
                (r["set"], r["seed"], float(right(r["right"][name]).mean())) for r in has
            ]
    head = ["technique", *SMALL, "mean of the differences to the default"]
    lines = [[_row(name, found, rows), notes.get(name, "– | –")] for name, found in rows.items()]
    table = markdown([*head, "confidence minus accuracy", "seconds"], lines)
    return {"techniques": f"{_where(records)}\n\n{table}", "kept_epoch": _kept(base)}


def _label(name: str) -> str:
    """Return what a row calls another evaluation of the default's runs."""
    shown = _VIEWS.get(name, name.replace("ema", "average of the weights, decay"))
    shown = shown.replace("× ", "evaluated at more pixels a side, × ")
    return shown.replace("mean of", "mean of the weights after the last epochs,")


def _where(records: Sequence[dict]) -> str:
    """Return on which machines and when it was measured."""
    nums = Counter(r["machine"] for r in records)
    machines = ", ".join(f"{machine}: {num} runs" for machine, num in nums.most_common())
    return f"{machines}; {period({r['date'] for r in records})}."


def over_confidence(records: Sequence[dict]) -> str:
    """Return by how much the mean confidence of the last weights is above their accuracy, where it was looked at."""
    found = [r["confidence"] - at_the_end(r) for r in records if "confidence" in r]
    return f"{statistics.fmean(found):+.3f} (n = {len(found)})" if found else "–"


def _of(measure: Callable[[dict], float]) -> Callable[[dict], tuple[str, int, float]]:
    return lambda record: (record["set"], record["seed"], measure(record))


def _row(name: str, found: Sequence[tuple[str, int, float]], rows: dict) -> str:
    """Return the cells of a technique; differences are those of runs with the same set and seed."""
    base = {(on, seed): value for on, seed, value in next(iter(rows.values()))}
    cells = [name]
    for on in SMALL:
        values = [value for set_, _, value in found if set_ == on]
        cells.append(f"{statistics.fmean(values):.3f}" if values else "–")
    differences = [value - base[on, seed] for on, seed, value in found if (on, seed) in base]
    if len(differences) < 2 or name.startswith("default"):
        return " | ".join([*cells, "–"])
    error = statistics.stdev(differences) / len(differences) ** 0.5
    difference = f"{statistics.fmean(differences):+.3f} ± {error:.3f} (n = {len(differences)})"
    return " | ".join([*cells, difference])


def choices(record: dict, num_draws: int = _DRAWS) -> dict[str, float]:
    """Return the accuracy on the other images of what some chosen at random would have kept, on average.

    With `patience`, training would have been over sooner: `epochs` is after which share of its epochs.
    """
    found, rng = epochs(record), np.random.default_rng(0)
    sums = dict.fromkeys(("the highest", "patience", "epochs", "kept", "the last"), 0.0)
    for _ in range(num_draws):
        order = rng.permutation(found.shape[1])
        accuracies, others = (
            found[:, order[:_NUM_CHOOSING]].mean(1),
            found[:, order[_NUM_CHOOSING:]].mean(1),
        )
        sums["the highest"] += others[accuracies.argmax()]
        num = ended(accuracies)
        sums["patience"] += others[_chosen_epoch(accuracies[:num], _NUM_CHOOSING)]
        sums["epochs"] += num / len(accuracies)
        sums["kept"] += others[_chosen_epoch(accuracies, _NUM_CHOOSING)]
        sums["the last"] += others[-1]
    return {name: value / num_draws for name, value in sums.items()}


def _chosen_epoch(accuracies: np.ndarray, num_images: int) -> int:
    """Return the index of the validation that a fit keeps: the latest within a standard error of the highest value."""
    return int(np.flatnonzero(accuracies >= lowest_acceptable(accuracies.max(), num_images))[-1])


def ended(accuracies: np.ndarray, patience: int = _PATIENCE) -> int:
    """Return after how many validations `--patience` ends a run: this many in turn were not higher than before."""
    best = np.maximum.accumulate(accuracies)
    for i in range(patience, len(best)):
        if best[i] == best[i - patience]:
            return i + 1
    return len(best)


def _kept(base: Sequence[dict]) -> str:
    """Return how accurate the kept epoch is by each rule."""
    means = {on: [choices(r) for r in base if r["set"] == on] for on in SMALL}
    values = {
        on: [statistics.fmean(f[name] for f in found) for name in found[0]]
        for on, found in means.items()
        if found
    }
    rows = [[on, str(len(means[on])), *(f"{v:.3f}" for v in row)] for on, row in values.items()]
    totals = [statistics.fmean(column) for column in zip(*values.values(), strict=True)]
    head = ["set", "runs", "the highest", f"with `--patience {_PATIENCE}`"]
    head += ["share of the epochs until it stops", "the last within a standard error", "the last"]
    return f"{markdown(head, rows)}\n| mean | | {' | '.join(f'{v:.3f}' for v in totals)} |"


def main() -> None:
    command_line(__doc__).parse_args()
    publish(blocks(load(RECORDS)))


if __name__ == "__main__":
    main()
