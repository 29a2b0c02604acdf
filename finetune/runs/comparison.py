"""A comparison of runs: metrics, training curves, and the images on which two of them differ."""

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from finetune.runs.charts import curves, line_sample
from finetune.runs.highlights import Lens, Shown, shown
from finetune.runs.record import RunRecord
from finetune.runs.statistics import interval, mcnemar, percent
from finetune.system.files import replace_text
from finetune.system.html_page import link_to, render

_NUM_SHOWN = 24
# runs side by side; more get a row each, so that the page is not wider than the screen
_MOST_COLUMNS = 3
_SETTINGS = (
    ("model", "backbone"),
    ("model", "members"),
    ("model", "weights"),
    ("model", "freeze"),
    ("model", "head_init"),
    ("data", "init_args", "root"),
    ("data", "init_args", "image_size"),
    ("data", "init_args", "eval_image_size"),
    ("data", "init_args", "image_size_schedule"),
    ("data", "init_args", "batch_size"),
    ("trainer", "max_epochs"),
    ("trainer", "precision"),
    ("seed_everything",),
)


@dataclass(frozen=True)
class Pair:
    """Two runs on the same test pictures.

    Attributes:
        both: Pictures that both get right.
        only_a: Places, among the first one's pictures, of those that it alone gets right.
        only_b: Of those that the second alone does.
        neither: Pictures that both get wrong.
        p: How likely two equally good ones differ at least so much.
    """

    both: int
    only_a: np.ndarray
    only_b: np.ndarray
    neither: int
    p: float


def paired(a: RunRecord, b: RunRecord) -> Pair | str:
    """Hold two runs against each other on the pictures that both were tested on, or say why that can't be done."""
    if a.answers is None or b.answers is None:
        run = a if a.answers is None else b
        return (
            f"{run.name} has no test_predictions.csv: `finetune test` on its checkpoint writes one"
        )
    names, place = a.answers.class_names, {path: i for i, path in enumerate(_places(b))}
    if names != b.answers.class_names:
        return "they have different classes"
    common = [(i, place[path]) for i, path in enumerate(_places(a)) if path in place]
    if not common or len(common) < max(len(a.answers.paths), len(b.answers.paths)):
        return f"they were tested on different images: {len(common)} are the same"
    of_a, of_b = (np.array(side) for side in zip(*common, strict=True))
    if (a.answers.labels[of_a] != b.answers.labels[of_b]).any():
        return "images of the same name are of different classes"
    right_a, right_b = a.answers.is_right[of_a], b.answers.is_right[of_b]
    only_a, only_b = of_a[right_a & ~right_b], of_a[right_b & ~right_a]
    both, neither = int((right_a & right_b).sum()), int((~right_a & ~right_b).sum())
    return Pair(both, only_a, only_b, neither, mcnemar(len(only_a), len(only_b)))


def _places(run: RunRecord) -> list[str]:
    """Return where the test pictures of a run lie, by whatever way it found them."""
    resolved = cache(os.path.realpath)  # of folders alone: two pictures may be links to one file
    paths = run.answers.paths if run.answers else ()
    return [os.path.join(resolved(os.path.dirname(path)), os.path.basename(path)) for path in paths]


def write_comparison(runs: Sequence[RunRecord], lens: Lens | None, target: Path) -> str:
    """Write a page on which runs stand side by side.

    Args:
        runs: At least two.
        lens: How to look at test pictures; None shows none.
        target: The page.

    Returns:
        What it says, in a sentence.
    """
    pair = paired(*runs) if len(runs) == 2 else None
    names = _names(runs)
    sentence = _sentence(names, pair) if pair is not None else _of_many(names, runs)
    differing: list[tuple[str, str, list[Shown]]] = []
    if isinstance(pair, Pair) and lens is not None and (answers := runs[0].answers) is not None:
        for k, chosen in enumerate((pair.only_a, pair.only_b)):
            order = chosen[np.argsort(-answers.confidence[chosen], kind="stable")][
                :_NUM_SHOWN
            ].tolist()
            told = f"{len(chosen)} images, the most confident of {names[0]} first."
            differing.append(
                (
                    f"Only {names[k]} is correct",
                    told,
                    shown(answers, order, lens, has_overlay=False),
                )
            )
    replace_text(
        target,
        render(
            "runs/comparison.html",
            title="Comparison of runs",
            sentence=sentence,
            rows=list(_rows(runs)),
            is_wide=len(runs) > _MOST_COLUMNS,
            names=names,
            samples=[line_sample(i) for i in range(len(runs))],
            pages=[link_to(str(_page(run)), target) for run in runs],
            charts=list(_charts(runs, names)),
            pair=pair if isinstance(pair, Pair) else None,
            differing=differing,
            address=lambda path: link_to(path, target) if Path(path).is_file() else "",
        ),
        errors="replace",
    )
    return sentence


def _page(run: RunRecord) -> Path:
    """Return the report of a run; where it has none, its folder."""
    report = run.path / "report.html"
    return report if report.is_file() else run.path


def _names(runs: Sequence[RunRecord]) -> list[str]:
    """Return what each run is called: where two would be called alike, where they lie."""
    names = [run.name for run in runs]
    return names if len(set(names)) == len(names) else [str(run.path) for run in runs]


def _sentence(names: Sequence[str], pair: Pair | str) -> str:
    if isinstance(pair, Pair):
        a, b = names
        num = pair.both + pair.neither + len(pair.only_a) + len(pair.only_b)
        told = f"Of {num} test images, only {a} is correct on {len(pair.only_a)}, only {b} on {len(pair.only_b)}"
        if pair.p >= 0.05:
            return f"{told}: no significant difference (McNemar's exact test, p = {pair.p:.2g})."
        better = a if len(pair.only_a) > len(pair.only_b) else b
        return f"{told}: {better} is better on images like these (McNemar's exact test, p = {pair.p:.2g})."
    return f"They cannot be compared image by image: {pair}."


def _of_many(names: Sequence[str], runs: Sequence[RunRecord]) -> str:
    told = f"{len(names)} runs. Two runs alone are also compared image by image."
    tested = {
        name: {*_places(run)}
        for name, run in zip(names, runs, strict=True)
        if run.answers is not None
    }
    first = next(iter(tested), "")
    if others := [name for name, places in tested.items() if places != tested[first]]:
        told += f" Not tested on the images of {first}: {', '.join(others)}."
    return told


def _rows(runs: Sequence[RunRecord]) -> Iterator[tuple[str, list[str]]]:
    yield "test accuracy", [_accuracy(run) for run in runs]
    for name in ("f1", "loss", "calibration_error"):
        values = [run.result.get(f"test/{name}") for run in runs]
        if any(value is not None for value in values):
            yield (
                f"test {name.replace('_', ' ')}",
                ["" if value is None else f"{value:.4f}" for value in values],
            )
    yield "seconds", [f"{sum(run.seconds.values()):.0f}" if run.seconds else "" for run in runs]
    yield "best epoch", [str(run.best[0] if run.best else "") for run in runs]
    for keys in _SETTINGS:
        values = [run.setting(*keys) for run in runs]
        if any(value != values[0] for value in values):
            yield keys[-1], [str(value) for value in values]
    prints = [str(run.about.get("fingerprint", "")) for run in runs]
    if len(set(prints)) > 1:
        yield "training pictures", [print_[:12] for print_ in prints]


def _accuracy(run: RunRecord) -> str:
    matrix: list[list[int]] = run.result.get("confusion_matrix") or []
    num, right = sum(map(sum, matrix)), sum(row[i] for i, row in enumerate(matrix))
    return f"{percent(right / num)} ({interval(right, num)})" if num else "not tested"


def _charts(runs: Sequence[RunRecord], names: Sequence[str]) -> Iterator[str]:
    for what in ("val/accuracy", "val/loss", "train/loss_epoch"):
        found = [(name, run.line(what)) for name, run in zip(names, runs, strict=True)]
        lines: dict[str, Any] = dict(found)  # one without points keeps its colour
        if drawn := [name for name, line in found if line[0]]:
            about = (
                what.removesuffix("_epoch")
                .replace("val/", "validation ")
                .replace("train/", "training ")
            )
            yield curves(
                lines, "epoch", about, f"{about} of {', '.join(drawn)} by epoch", has_legend=False
            )
