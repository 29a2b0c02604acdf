"""A comparison of runs: metrics, training curves, and the images on which two of them differ."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from finetune.inference.image_viewer import ImageViewer
from finetune.reports.charts import curves, line_sample
from finetune.reports.test_images import ReportImage, report_images
from finetune.runs.intervals import mcnemar
from finetune.runs.local_copies import shown_place
from finetune.runs.predictions_table import Predictions
from finetune.runs.record import RunRecord
from finetune.runs.results import METRICS
from finetune.runs.tested_images import data_folder, tested_names
from finetune.system.files import replace_text
from finetune.system.html_page import link_to, render
from finetune.system.messages import counted

_NUM_SHOWN = 24
# With more runs each gets a row, so that the page is not wider than the screen.
_MOST_COLUMNS = 3
_SETTINGS = (
    ("model", "backbone"),
    ("members",),
    ("model", "weights"),
    ("model", "freeze"),
    ("model", "head_init"),
    ("data", "init_args", "root"),
    ("data", "init_args", "table"),
    ("data", "init_args", "image_size"),
    ("data", "init_args", "eval_image_size"),
    ("data", "init_args", "batch_size"),
    ("trainer", "max_epochs"),
    ("trainer", "precision"),
    ("seed_everything",),
)


@dataclass(frozen=True)
class Pair:
    """Two runs on the same test images.

    Attributes:
        both: Number of images that both predict correctly.
        only_a: Indices into the first run's images of those that only it predicts correctly.
        only_b: The same for the second run.
        neither: Number of images that both predict wrongly.
        p: Probability that two equally good runs differ at least as much (McNemar's exact test).
        folders: The data folders in which the images have the same paths; empty if it is one folder.
    """

    both: int
    only_a: np.ndarray
    only_b: np.ndarray
    neither: int
    p: float
    folders: Sequence[str] = ()


def paired(a: RunRecord, b: RunRecord) -> Pair | str:
    """Compare two runs on the images that both were tested on, or return why that is not possible."""
    first = a.predictions
    second = b.predictions
    if first is None or second is None:
        run = a if first is None else b
        return (
            f"{run.name} has no test_predictions.csv: `finetune test` on its checkpoint writes one"
        )
    images_of_a = tested_names(a)
    images_of_b = tested_names(b)
    place = {path: i for i, path in enumerate(images_of_b)}
    if first.names != second.names:
        return "they have different classes"
    if first.is_single != second.is_single:
        return "one has one class per image, the other one several labels"
    common = [(i, place[path]) for i, path in enumerate(images_of_a) if path in place]
    if not common or len(common) < max(len(first.paths), len(second.paths)):
        return f"they were tested on different images: {len(common)} are the same"
    of_a, of_b = (np.array(side) for side in zip(*common, strict=True))
    if (first.labels[of_a] != second.labels[of_b]).any():
        return "images of the same name are of different classes"
    right_a = first.is_right[of_a]
    right_b = second.is_right[of_b]
    only_a = of_a[right_a & ~right_b]
    only_b = of_a[right_b & ~right_a]
    both = int((right_a & right_b).sum())
    neither = int((~right_a & ~right_b).sum())
    folders = (data_folder(a), data_folder(b))
    return Pair(
        both,
        only_a,
        only_b,
        neither,
        mcnemar(len(only_a), len(only_b)),
        folders=() if folders[0] == folders[1] else folders,
    )


def write_comparison(runs: Sequence[RunRecord], viewer: ImageViewer | None, target: Path) -> str:
    """Write a page that compares runs.

    Args:
        runs: At least two.
        viewer: Loads the test images; with None, the page has none.
        target: The page.

    Returns:
        The result in a sentence.
    """
    pair = paired(*runs) if len(runs) == 2 else None
    names = _names(runs)
    sentence = _sentence(names, pair) if pair is not None else _sentence_of_many(names, runs)
    differing: list[tuple[str, str, list[ReportImage]]] = []
    first = runs[0].predictions
    if isinstance(pair, Pair) and viewer is not None and first is not None:
        for name, chosen, what in (
            (names[0], pair.only_a, "predictions"),
            (names[1], pair.only_b, "mistakes"),
        ):
            sentence_of = (
                f"{counted(len(chosen), 'image')}, the most confident {what} of {names[0]} first."
            )
            images = _most_confident(first, chosen, viewer)
            differing.append((f"Only {name} is correct", sentence_of, images))
    replace_text(
        target,
        render(
            "reports/comparison.html",
            title="Comparison of runs",
            heading=_heading(names, runs),
            answer=_answer(names, runs, pair),
            sentence=sentence,
            summary=list(_facts(runs)),
            why_no_images="",
            rows=list(_metrics_and_settings(runs)),
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


def _heading(names: Sequence[str], runs: Sequence[RunRecord]) -> str:
    """Return the heading, with the name of the data set first if all runs have the same."""
    what = (
        f"{names[0]} compared with {names[1]}" if len(names) == 2 else f"{len(names)} runs compared"
    )
    data_sets = {run.data_set for run in runs}
    prefix = data_sets.pop() if len(data_sets) == 1 else ""
    return f"{prefix}: {what}" if prefix else what


def _answer(
    names: Sequence[str], runs: Sequence[RunRecord], pair: Pair | str | None
) -> tuple[str, str] | None:
    """Return the main result, a number and its description; None if the tests of the runs do not compare."""
    if isinstance(pair, Pair):
        num = pair.both + pair.neither + len(pair.only_a) + len(pair.only_b)
        points = 100 * (len(pair.only_a) - len(pair.only_b)) / num
        metric = "images with all labels correct" if runs[0].has_labels else "test accuracy"
        better = names[0] if points > 0 else names[1]
        text = f"more {metric} with {better}" if points else f"difference in {metric}"
        if not is_significant(pair):
            text += ", not significant"
        return f"{abs(points):.1f} points", text
    tested = [
        (result, name, frozenset(images))
        for run, name, images in zip(runs, names, map(tested_names, runs), strict=True)
        if (result := run.facts.test) is not None
    ]
    if len({(result.metric, places) for result, _, places in tested}) != 1:
        return None
    best, name, _ = max(tested, key=lambda row: row[0].value)
    return best.value_text, f"highest test {best.metric}, {name}"


def _facts(runs: Sequence[RunRecord]) -> Iterator[tuple[str, str]]:
    """Yield the names and values of facts for the head of the page."""
    days = sorted(run.date[:10] for run in runs)
    yield "trained", days[0] if days[0] == days[-1] else f"{days[0]} to {days[-1]}"
    networks = dict.fromkeys(run.network for run in runs if run.network)
    if networks:
        yield "networks" if len(networks) > 1 else "network", ", ".join(networks)
    nums = sorted({len(run.predictions.paths) for run in runs if run.predictions is not None})
    if nums:
        yield "test images", " to ".join(f"{num:,}" for num in dict.fromkeys((nums[0], nums[-1])))


def is_significant(pair: Pair) -> bool:
    """Return whether the runs differ significantly, at the level of 5 %."""
    return pair.p < 0.05


def _most_confident(
    predictions: Predictions, chosen: np.ndarray, viewer: ImageViewer
) -> list[ReportImage]:
    """Return the first of these images, the most confident predictions first."""
    order = chosen[np.argsort(-predictions.confidence[chosen], kind="stable")][:_NUM_SHOWN]
    return report_images(predictions, [(i, 0) for i in order.tolist()], viewer)


def _page(run: RunRecord) -> Path:
    """Return the report of a run; if it has none, its folder."""
    report = run.path / "report.html"
    return report if report.is_file() else run.path


def _names(runs: Sequence[RunRecord]) -> list[str]:
    """Return the names of the runs; their paths or addresses, if two have the same name.

    Next to a version, such as `runs/fit/version_0`, a named run has its parent folders, too.
    """
    names = [run.name for run in runs]
    if any("/" in name for name in names):
        names = ["/".join(run.path.resolve().parts[-3:]) for run in runs]
    return names if len(set(names)) == len(names) else [shown_place(run.path) for run in runs]


def _sentence(names: Sequence[str], pair: Pair | str) -> str:
    if isinstance(pair, Pair):
        a, b = names
        num = pair.both + pair.neither + len(pair.only_a) + len(pair.only_b)
        alone = f"{a} alone is correct on {len(pair.only_a)}, {b} alone on {len(pair.only_b)}"
        sentence = f"{alone} of {num} test images"
        if pair.folders:
            sentence += f", which have the same paths in {' and '.join(pair.folders)}"
        if not is_significant(pair):
            return (
                f"{sentence}: no significant difference (McNemar's exact test, p = {pair.p:.2g})."
            )
        better = a if len(pair.only_a) > len(pair.only_b) else b
        return f"{sentence}: {better} is better on images like these (McNemar's exact test, p = {pair.p:.2g})."
    return f"They cannot be compared image by image: {pair}."


def _sentence_of_many(names: Sequence[str], runs: Sequence[RunRecord]) -> str:
    sentence = f"{len(names)} runs. Two runs alone are also compared image by image."
    tested = {
        name: {*images}
        for name, run, images in zip(names, runs, map(tested_names, runs), strict=True)
        if run.predictions is not None
    }
    first = next(iter(tested), "")
    if others := [name for name, places in tested.items() if places != tested[first]]:
        sentence += f" Not tested on the images of {first}: {', '.join(others)}."
    return sentence


def _metrics_and_settings(runs: Sequence[RunRecord]) -> Iterator[tuple[str, list[str]]]:
    """Yield the rows of the table: a metric, or a setting that differs, and its value for each run."""
    for metric, has_labels in (("accuracy", False), ("mAP", True)):
        if any(run.has_labels == has_labels for run in runs):
            texts = [_result(run) if run.has_labels == has_labels else "" for run in runs]
            yield f"test {metric}", texts
    for name in METRICS:
        if name in ("accuracy", "mAP"):  # the rows above have them with an interval
            continue
        values = [run.result.get(f"test/{name}") for run in runs]
        if any(value is not None for value in values):
            yield (
                f"test {name.replace('_', ' ')}",
                ["" if value is None else f"{value:.4f}" for value in values],
            )
    yield (
        "seconds",
        [f"{sum(run.facts.seconds.values()):.0f}" if run.facts.seconds else "" for run in runs],
    )
    yield "best.ckpt", ["" if run.facts.best is None else run.facts.best.weights for run in runs]
    for keys in _SETTINGS:
        values = [run.setting(*keys) for run in runs]
        if any(value != values[0] for value in values):
            yield keys[-1], [str(value) for value in values]
    prints = [run.facts.fingerprint or "" for run in runs]
    if len(set(prints)) > 1:
        yield "images", [print_[:12] for print_ in prints]


def _result(run: RunRecord) -> str:
    result = run.facts.test
    return "not tested" if result is None else f"{result.value_text} ({result.interval_text})"


def _charts(runs: Sequence[RunRecord], names: Sequence[str]) -> Iterator[str]:
    for what in ("val/accuracy", "val/mAP", "val/loss", "train/loss_epoch"):
        # A line without points stays, so that each run has the same colour in all charts.
        lines: dict[str, Any] = {
            name: run.line(what) for name, run in zip(names, runs, strict=True)
        }
        if drawn := [name for name, line in lines.items() if line[0]]:
            about = (
                what.removesuffix("_epoch")
                .replace("val/", "validation ")
                .replace("train/", "training ")
            )
            yield curves(
                lines, "epoch", about, f"{about} of {', '.join(drawn)} by epoch", has_legend=False
            )
