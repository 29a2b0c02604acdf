"""Tables of what was right: of each technique at the end of a fit, of averages of weights, and of the epoch kept."""

import statistics
from collections import Counter
from collections.abc import Callable, Iterable, Sequence

import numpy as np

from benchmarks.quality.plan import SMALL
from finetune.runs.best_epoch import kept_epoch

_NUM_CHOOSING = 30  # pictures: about what the default sets apart of such sets
_DRAWS = 1000
_PATIENCE = 5
_VIEWS = {
    "flip": "mirrored pictures, too",
    "five crops": "corners of pictures, too",
    "whole": "the whole shorter side, not 7/8 of it",
}


def right(digits: str) -> np.ndarray:
    """Return a digit for each picture as numbers, (num_images,)."""
    return np.array(list(map(int, digits)), float)


def epochs(record: dict) -> np.ndarray:
    """Return what was right after each epoch, (num_epochs, num_images)."""
    return np.stack(
        [right(digits) for name, digits in record["right"].items() if name.startswith("epoch ")]
    )


def at_the_end(record: dict) -> float:
    return float(epochs(record)[-1].mean())


def blocks(records: Sequence[dict], techniques: Iterable[str]) -> dict[str, str]:
    """Return what stands between the markers of docs/benchmarks.md."""
    good = [r for r in records if "right" in r]
    base = [r for r in good if r["technique"] == "default"]
    rows = {"default, the last epoch": [*map(_of(at_the_end), base)]}
    beyond, seconds = {"default, the last epoch": over_confidence(base)}, {}
    for name in techniques:
        found = [r for r in good if r["technique"] == name]
        rows[name], beyond[name] = [*map(_of(at_the_end), found)], over_confidence(found)
        if alone := [r["seconds"] for r in found if r.get("alone")]:
            seconds[name] = f"{statistics.fmean(alone):.0f} (n = {len(alone)})"
    names = dict.fromkeys(
        name for r in base for name in r["right"] if not name.startswith("epoch ")
    )
    for name in names:
        told = _VIEWS.get(name, name.replace("ema", "average of the weights, decay"))
        told = told.replace("× ", "evaluated at more pixels a side, × ")
        told = told.replace("mean of", "mean of the weights after the last epochs,")
        has = [r for r in base if name in r["right"]]
        rows[told] = [(r["set"], r["seed"], float(right(r["right"][name]).mean())) for r in has]
    del rows["default"]
    columns = [
        "technique",
        *SMALL,
        "mean of the differences to the default",
        "confidence beyond accuracy",
        "seconds",
    ]
    head = f"| {' | '.join(columns)} |\n{'| --- ' * len(columns)}|\n"
    lines = [
        _row(name, found, rows) + f" {beyond.get(name, '–')} | {seconds.get(name, '–')} |"
        for name, found in rows.items()
    ]
    return {"techniques": f"{_where(good)}{head}" + "\n".join(lines), **_kept(base)}


def _where(records: Sequence[dict]) -> str:
    """Return on how many machines of which kind and when it was measured, a paragraph."""
    days = sorted({r["date"] for r in records})
    nums = Counter(r["machine"] for r in records)
    told = ", ".join(f"{machine}: {num} runs" for machine, num in nums.most_common())
    return f"{told}; {' to '.join(dict.fromkeys((days[0], days[-1])))}.\n\n" if records else ""


def over_confidence(records: Sequence[dict]) -> str:
    """Return by how much the mean confidence of the last weights is above their accuracy, where it was looked at."""
    found = [r["confidence"] - at_the_end(r) for r in records if "confidence" in r]
    return f"{statistics.fmean(found):+.3f} (n = {len(found)})" if found else "–"


def _of(measure: Callable[[dict], float]) -> Callable[[dict], tuple[str, int, float]]:
    return lambda record: (record["set"], record["seed"], measure(record))


def _row(name: str, found: Sequence[tuple[str, int, float]], rows: dict) -> str:
    """Return the line of a technique; differences are those of runs with the same set and seed."""
    base = {(on, seed): value for on, seed, value in next(iter(rows.values()))}
    cells = []
    for on in SMALL:
        values = [value for set_, _, value in found if set_ == on]
        cells.append(f"{statistics.fmean(values):.3f}" if values else "–")
    differences = [value - base[on, seed] for on, seed, value in found if (on, seed) in base]
    if len(differences) < 2 or name.startswith("default"):
        return f"| {name} | {' | '.join(cells)} | – |"
    error = statistics.stdev(differences) / len(differences) ** 0.5
    difference = f"{statistics.fmean(differences):+.3f} ± {error:.3f} (n = {len(differences)})"
    return f"| {name} | {' | '.join(cells)} | {difference} |"


def choices(record: dict, num_draws: int = _DRAWS) -> dict[str, float]:
    """Return the accuracy on the other pictures of what some chosen at random would have kept, on average.

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
        sums["patience"] += others[kept_epoch(accuracies[:num], _NUM_CHOOSING)]
        sums["epochs"] += num / len(accuracies)
        sums["kept"] += others[kept_epoch(accuracies, _NUM_CHOOSING)]
        sums["the last"] += others[-1]
    return {name: value / num_draws for name, value in sums.items()}


def ended(accuracies: np.ndarray, patience: int = _PATIENCE) -> int:
    """Return after how many validations `--patience` ends a run: so many in turn were none higher than before."""
    best = np.maximum.accumulate(accuracies)
    for i in range(patience, len(best)):
        if best[i] == best[i - patience]:
            return i + 1
    return len(best)


def _kept(base: Sequence[dict]) -> dict[str, str]:
    columns = [
        "set",
        "runs",
        "the highest",
        f"with `--patience {_PATIENCE}`",
        "after which share of the epochs",
    ]
    columns += ["the last within a standard error", "the last"]
    lines = [f"| {' | '.join(columns)} |", "| --- " * len(columns) + "|"]
    means = []
    for on in SMALL:
        found = [choices(r) for r in base if r["set"] == on]
        if found:
            values = [statistics.fmean(f[name] for f in found) for name in found[0]]
            means.append(values)
            lines.append(
                f"| {on} | {len(found)} | " + " | ".join(f"{v:.3f}" for v in values) + " |"
            )
    if means:
        lines.append(
            "| mean | | "
            + " | ".join(f"{statistics.fmean(v):.3f}" for v in zip(*means, strict=True))
            + " |"
        )
    return {"kept_epoch": "\n".join(lines)}
