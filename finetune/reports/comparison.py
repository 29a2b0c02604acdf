"""A comparison of runs: metrics, training curves, and the images on which two of them differ."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from finetune.inference.image_viewer import ImageViewer
from finetune.reports.charts import curves, line_sample
from finetune.reports.test_images import ReportImage, report_images
from finetune.runs.intervals import mcnemar
from finetune.runs.local_copies import shown_place
from finetune.runs.record import RunRecord
from finetune.runs.results import METRICS
from finetune.system.files import replace_text
from finetune.system.html_page import link_to, render
from finetune.system.messages import counted

_NUM_SHOWN = 24
_SETTINGS = (
    ("model", "backbone"),
    ("members",),
    ("model", "weights"),
    ("model", "freeze"),
    ("model", "head_init"),
    ("data", "init_args", "root"),
    ("data", "init_args", "table"),
    ("data", "init_args", "image_size"),
    ("data", "init_args", "batch_size"),
    ("trainer", "max_epochs"),
    ("trainer", "precision"),
    ("seed_everything",),
)
# The columns of steps.csv that are drawn, and what they are.
_CHARTS = {
    "val/accuracy": "validation accuracy",
    "val/mAP": "validation mAP",
    "val/loss": "validation loss",
    "train/loss_epoch": "training loss",
}


@dataclass(frozen=True)
class Pair:
    """Two runs on the same test images.

    Attributes:
        both: Number of images that both predict correctly.
        only_a: Indices into the first run's images of those that only it predicts correctly.
        only_b: The same for the second run, also into the first run's images.
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

    @property
    def num(self) -> int:
        """The number of images."""
        return self.both + self.neither + len(self.only_a) + len(self.only_b)

    @property
    def is_significant(self) -> bool:
        """Whether the runs differ significantly, at the level of 5 %."""
        return self.p < 0.05


def paired(a: RunRecord, b: RunRecord) -> Pair | str:
    """Compare two runs on the images that both were tested on, or return why that is not possible."""
    first = a.predictions
    second = b.predictions
    if first is None or second is None:
        run = a if first is None else b
        return (
            f"{run.name} has no test_predictions.csv: `finetune test` on its checkpoint writes one"
        )
    if first.names != second.names:
        return "they have different classes"
    if first.is_single != second.is_single:
        return "one has one class per image, the other one several labels"
    place = {path: i for i, path in enumerate(b.tested_names)}
    common = [(i, place[path]) for i, path in enumerate(a.tested_names) if path in place]
    if not common or len(common) < max(len(first.paths), len(second.paths)):
        return f"they were tested on different images: {len(common)} are the same"
    of_a, of_b = (np.array(side) for side in zip(*common, strict=True))
    if (first.labels[of_a] != second.labels[of_b]).any():
        return "images of the same name are of different classes"
    right_a = first.is_right[of_a]
    right_b = second.is_right[of_b]
    only_a = of_a[right_a & ~right_b]
    only_b = of_a[right_b & ~right_a]
    return Pair(
        both=int((right_a & right_b).sum()),
        only_a=only_a,
        only_b=only_b,
        neither=int((~right_a & ~right_b).sum()),
        p=mcnemar(len(only_a), len(only_b)),
        folders=() if a.data_folder == b.data_folder else (a.data_folder, b.data_folder),
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
    names = _names(runs)
    pair = paired(*runs) if len(runs) == 2 else None
    differing: list[tuple[str, str, list[ReportImage]]] = []
    answer = None
    if isinstance(pair, Pair):
        answer = _difference(names, runs, pair)
        sentence = _sentence(names, pair)
        differing = list(_differing(names, runs[0], pair, viewer))
    else:
        sentence = _sentence_of_many(names, runs)
        if pair is not None:
            sentence = f"They cannot be compared image by image: {pair}."
    what = " compared with ".join(names) if len(names) == 2 else f"{len(names)} runs compared"
    data_sets = {run.data_set for run in runs}
    prefix = data_sets.pop() if len(data_sets) == 1 else ""
    text = render(
        "reports/comparison.html",
        title="Comparison of runs",
        heading=f"{prefix}: {what}" if prefix else what,
        answer=answer,
        sentence=sentence,
        why_no_images="",
        rows=list(_metrics_and_settings(runs)),
        names=names,
        samples=[line_sample(i) for i in range(len(runs))],
        pages=[link_to(run.path / "report.html", target) for run in runs],
        charts=list(_charts(runs, names)),
        pair=pair if isinstance(pair, Pair) else None,
        differing=differing,
        address=lambda path: link_to(path, target) if Path(path).is_file() else "",
    )
    replace_text(target, text, errors="replace")
    return sentence


def _difference(names: Sequence[str], runs: Sequence[RunRecord], pair: Pair) -> tuple[str, str]:
    """Return the difference of two runs in points, and its description."""
    points = 100 * (len(pair.only_a) - len(pair.only_b)) / pair.num
    metric = "images with all labels correct" if runs[0].has_labels else "test accuracy"
    better = names[0] if points > 0 else names[1]
    text = f"more {metric} with {better}" if points else f"difference in {metric}"
    return f"{abs(points):.1f} points", text if pair.is_significant else f"{text}, not significant"


def _differing(
    names: Sequence[str], first: RunRecord, pair: Pair, viewer: ImageViewer | None
) -> Iterator[tuple[str, str, list[ReportImage]]]:
    """Yield heading, sentence and images on which only one of the runs is correct."""
    predictions = first.predictions
    if viewer is None or predictions is None:
        return
    for name, chosen, what in (
        (names[0], pair.only_a, "predictions"),
        (names[1], pair.only_b, "mistakes"),
    ):
        order = chosen[np.argsort(-predictions.confidence[chosen], kind="stable")][:_NUM_SHOWN]
        images = report_images(predictions, [(i, 0) for i in order.tolist()], viewer)
        num = counted(len(chosen), "image")
        yield (
            f"Only {name} is correct",
            f"{num}, the most confident {what} of {names[0]} first.",
            images,
        )


def _names(runs: Sequence[RunRecord]) -> list[str]:
    """Return the names of the runs; their paths or addresses, if two have the same name.

    Next to a version, such as `runs/fit/version_0`, a named run has its parent folders, too.
    """
    names = [run.name for run in runs]
    if any("/" in name for name in names):
        names = ["/".join(run.path.resolve().parts[-3:]) for run in runs]
    return names if len(set(names)) == len(names) else [shown_place(run.path) for run in runs]


def _sentence(names: Sequence[str], pair: Pair) -> str:
    a, b = names
    alone = f"{a} alone is correct on {len(pair.only_a)}, {b} alone on {len(pair.only_b)}"
    sentence = f"{alone} of {pair.num} test images"
    if pair.folders:
        sentence += f", which have the same paths in {' and '.join(pair.folders)}"
    better = a if len(pair.only_a) > len(pair.only_b) else b
    result = (
        f"{better} is better on images like these"
        if pair.is_significant
        else "no significant difference"
    )
    return f"{sentence}: {result} (McNemar's exact test, p = {pair.p:.2g})."


def _sentence_of_many(names: Sequence[str], runs: Sequence[RunRecord]) -> str:
    sentence = f"{len(names)} runs. Two runs alone are also compared image by image."
    tested = {
        name: set(run.tested_names)
        for name, run in zip(names, runs, strict=True)
        if run.predictions is not None
    }
    first = next(iter(tested), "")
    if others := [name for name, images in tested.items() if images != tested[first]]:
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
            what = f"test {name.replace('_', ' ')}"
            yield what, ["" if value is None else f"{value:.4f}" for value in values]
    seconds = [run.facts.seconds for run in runs]
    yield "seconds", [f"{value:.0f}" if value else "" for value in seconds]
    yield "trained", [run.date for run in runs]
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
    for column, what in _CHARTS.items():
        # A line without points stays, so that each run has the same colour in all charts.
        lines = {name: run.line(column) for name, run in zip(names, runs, strict=True)}
        if drawn := [name for name, line in lines.items() if len(line[0]) > 1]:
            about = f"{what} of {', '.join(drawn)} by epoch"
            yield curves(lines, "epoch", what, about, has_legend=False)
