"""report.html: the accuracy of a run, its mistakes, and how to reproduce it, in one HTML file."""

import base64
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from finetune.runs.answers import Answers
from finetune.runs.charts import curves, reliability_chart
from finetune.runs.clock import PHASES
from finetune.runs.headline import headline, network, title
from finetune.runs.highlights import (
    NUM_SHOWN,
    ImageViewer,
    ReportImage,
    kinds,
    max_per_cell,
    report_images,
)
from finetune.runs.label_report import (
    MAX_MATRIX,
    NUM_PAIRS,
    label_charts,
    label_highlights,
    label_sections,
)
from finetune.runs.model_card import model_card, weights_and_licence
from finetune.runs.outcome import INTERVAL, num_in_split, outcome_line
from finetune.runs.record import RunRecord
from finetune.runs.statistics import (
    coverage,
    interval,
    num_reliability_bins,
    percent,
    precision_recall,
    reliability,
    unscaled,
)
from finetune.system.files import replace_text
from finetune.system.html_page import link_to, render


def write_report(
    run: RunRecord,
    viewer: ImageViewer | None,
    versions: dict[str, Any],
    is_running: bool = False,
    target: Path | None = None,
) -> Path:
    """Write the report of a run and return its path.

    Args:
        run: The content of the run's folder.
        viewer: Loads the test images; with None, the report has none.
        versions: Versions of the software of the run, by name.
        is_running: Whether the run has not ended. The page then reloads itself.
        target: File of the report; None is report.html in the run's folder.
    """
    target = target or run.path / "report.html"
    answer = headline(run)
    answers = run.answers
    augmented = run.path / "augmented.webp"
    classes = list(_classes(run))
    cells = list(_cells(answers, viewer)) if answers else []
    chosen = list(_kinds(answers, viewer)) if answers and viewer else []
    labels = label_sections(run, viewer)
    if run.label_answers and viewer:
        chosen = list(label_highlights(run, viewer))
    images = [image for cell in cells for image in cell["images"]]
    if labels is not None:
        images += [image for mistakes in labels.mistakes for image in mistakes.images]
    if run.label_answers:
        images += [image for kind in chosen for image in kind["images"]]
    replace_text(
        target,
        render(
            "runs/html_report.html",
            title=f"{title(run)}: report",
            heading=title(run),
            run=run,
            is_running=is_running,
            answer=answer,
            headline=str(answer),
            summary=list(_summary(run)),
            facts=list(_facts(run, versions)),
            charts=list(training_charts(run)),
            seconds=[
                (phase, PHASES[phase], run.seconds[phase])
                for phase in PHASES
                if run.seconds.get(phase)
            ],
            folds=list(_folds(run, target)),
            test_folder=_test_folder(run),
            classes=classes,
            cells=cells,
            labels=labels,
            why_no_images=_why_no_images(run, viewer, images),
            matrix=_matrix(run) if classes and len(classes) <= MAX_MATRIX else None,
            kinds=chosen,
            no_heat_map=next(
                (p.no_overlay for kind in chosen for p in kind["images"] if p.no_overlay), ""
            ),
            calibration=list(label_charts(run) if run.has_labels else _calibration_charts(run)),
            augmented=base64.b64encode(augmented.read_bytes()).decode()
            if augmented.is_file()
            else "",
            weights=weights_and_licence(run),
            card=model_card(run),
            look=run.about.get("first_look"),
            ranking=run.about.get("backbone_ranking"),
            corrections=run.about.get("corrections") or run.result.get("corrections"),
            address=lambda path: link_to(path, target) if Path(path).is_file() else "",
            percent=percent,
        ),
        errors="replace",
    )
    return target


def _why_no_images(run: RunRecord, viewer: ImageViewer | None, images: list[ReportImage]) -> str:
    """Return a sentence with the reason why the report has no test images; "" if it has some or needs none."""
    answers = run.answers or run.label_answers
    if answers is None or not answers.paths or any(image.image for image in images):
        return ""
    if viewer is None:
        return "The test images are not shown: the checkpoint that predicted them is missing."
    if not images:
        return ""
    return f"The test images are not shown: {answers.paths[0]} and others are missing."


def _summary(run: RunRecord) -> Iterator[tuple[str, str]]:
    """Yield names and values for the head of the page."""
    yield "date", run.date
    splits = {name: num_in_split(run.about, name) for name in _splits(run)}
    if splits:
        yield "images", ", ".join(f"{num:,} {name}" for name, num in splits.items())
        yield (
            "labels" if run.has_labels else "classes",
            f"{len(_splits(run).get('train', {}).get('counts', ())):,}",
        )
    if network(run):
        yield "network", network(run)
    size = run.setting("data", "init_args", "image_size")
    if size:
        yield "image size", f"{size} pixels"
    if run.best:
        yield "best.ckpt", run.weights_of_best
    if run.seconds:
        yield "time", _duration(sum(run.seconds.values()))
    yield "run", run.name


def _splits(run: RunRecord) -> dict[str, Any]:
    return run.about.get("splits", {})


def _duration(seconds: float) -> str:
    """Return `41 s`, `12 min` or `3 h 5 min`."""
    if seconds < 120:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    if minutes < 120:
        return f"{minutes} min"
    return f"{minutes // 60} h {minutes % 60} min"


def _facts(run: RunRecord, versions: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield names and values of what is needed to repeat the run."""
    for line in run.about.get("lines", ()):
        what, _, text = line.partition(": ")
        yield what, text
    if run.best:
        yield "best.ckpt", run.why_best
    if run.setting("seed_everything") is not None:
        yield "seed", str(run.setting("seed_everything"))
    if run.about.get("fingerprint"):
        yield "images", f"fingerprint {run.about['fingerprint']}"
    if versions:
        yield "versions", ", ".join(f"{name} {version}" for name, version in versions.items())


def training_charts(run: RunRecord) -> Iterator[str]:
    """Yield charts of the loss, the metrics and the learning rates, if they were logged."""
    best = None
    share = run.interpolation.share if run.interpolation else 1.0
    if run.best and share > 0:  # otherwise best.ckpt has the weights before training
        best = (run.best[0], "best.ckpt" if share == 1 else "part of best.ckpt")
    for what in ("loss", "mAP", "f1_micro") if run.has_labels else ("loss", "accuracy"):
        train = "train/loss_epoch" if what == "loss" else f"train/{what}"
        lines = {
            name: run.line(key)
            for name, key in (("training", train), ("validation", f"val/{what}"))
        }
        lines = {name: line for name, line in lines.items() if line[0]}
        if lines:
            last = ", ".join(
                f"{name} from {line[1][0]:.3f} to {line[1][-1]:.3f}" for name, line in lines.items()
            )
            name = what.replace("f1_micro", "micro F1")
            if len(lines) == 1:  # then there is no legend
                name = f"{next(iter(lines))} {name}"
            yield curves(lines, "epoch", name, f"The {name} by epoch: {last}.", mark=best)
    rates = {
        name.split("/")[-1].removesuffix("_no_decay"): run.line(name, "step")
        for name in run.names("lr-")
    }
    if rates := {name: line for name, line in list(rates.items())[:5] if len(line[0]) > 1}:
        yield curves(rates, "step", "learning rate", "The learning rates by step.", is_log=True)


def _folds(run: RunRecord, target: Path) -> Iterator[dict[str, Any]]:
    """Yield the result of each fold of a cross-validation, with the address of its report."""
    for row in run.result.get("folds", ()):
        page = run.path / row["run"] / "report.html"
        yield {
            **row,
            **(_mean_precision_of(row) if run.has_labels else _accuracy_of(row)),
            "address": link_to(str(page), target) if page.is_file() else "",
        }


def _accuracy_of(fold: dict[str, Any]) -> dict[str, Any]:
    num = fold["num_images"]
    share = fold["num_right"] / max(1, num)
    return {"value": share, "text": percent(share), "interval": interval(fold["num_right"], num)}


def _mean_precision_of(fold: dict[str, Any]) -> dict[str, Any]:
    value = fold["mAP"]
    if value is None:
        return {"value": -1, "text": "none", "interval": ""}
    low, high = fold[INTERVAL]
    return {"value": value, "text": f"{value:.3f}", "interval": f"{low:.3f}–{high:.3f}"}


def _test_folder(run: RunRecord) -> str:
    """Return the result of all folds together on the test folder; "" if there is none."""
    return outcome_line(run.result.get("test_folder", {}))


def _classes(run: RunRecord) -> Iterator[dict[str, Any]]:
    """Yield the metrics of each class in the test, and the class that its images are most often predicted as."""
    matrix = run.result.get("confusion_matrix") or []
    names = run.result.get("class_names", ())
    num_predicted = np.array(matrix).sum(axis=0) if matrix else []
    for i, row in enumerate(matrix):
        num = sum(row)
        right = row[i]
        others = [(count, names[j]) for j, count in enumerate(row) if j != i and count]
        yield {
            "name": names[i],
            "num": num,
            "recall": right / num if num else None,
            "interval": interval(right, num) if num else "",
            "precision": right / int(num_predicted[i]) if num_predicted[i] else None,
            "f1": 2 * right / (num + int(num_predicted[i])) if num + num_predicted[i] else None,
            "taken_for": max(others) if others else None,
        }


def _matrix(run: RunRecord) -> list[list[tuple[int, float]]]:
    """Return the number of images of each cell and its share of the row."""
    matrix = run.result["confusion_matrix"]
    return [[(count, count / max(1, sum(row))) for count in row] for row in matrix]


def _cells(answers: Answers, viewer: ImageViewer | None) -> Iterator[dict[str, Any]]:
    """Yield the cells of the confusion matrix that have images, the largest first; of many classes only mistakes."""
    names = answers.class_names
    pairs, counts = np.unique(answers.labels * len(names) + answers.predicted, return_counts=True)
    cells = [
        (count, *divmod(pair, len(names)))
        for count, pair in zip(counts.tolist(), pairs.tolist(), strict=True)
    ]
    cells.sort(key=lambda cell: (-cell[0], cell[1], cell[2]))
    if len(names) > MAX_MATRIX:
        cells = [cell for cell in cells if cell[1] != cell[2]][:NUM_PAIRS]
    most = max_per_cell([count for count, _, _ in cells])
    for count, label, predicted in cells:
        chosen = answers.of(label, predicted)[:most].tolist()
        images = report_images(answers, chosen, viewer, has_overlay=False) if viewer else []
        key = f"cell-{label}-{predicted}"
        pair_names = (names[label], names[predicted])
        yield {
            "id": key,
            "names": pair_names,
            "count": count,
            "images": images,
            "is_right": label == predicted,
        }


def _kinds(answers: Answers, viewer: ImageViewer) -> Iterator[dict[str, Any]]:
    for heading, sentence, chosen in kinds(answers):
        images = report_images(answers, chosen[:NUM_SHOWN].tolist(), viewer, has_overlay=True)
        yield {"heading": heading, "sentence": sentence, "images": images, "count": len(chosen)}


def _calibration_charts(run: RunRecord) -> Iterator[tuple[str, str]]:
    """Yield charts of calibration, each with a caption."""
    answers = run.answers
    if answers is None or not len(answers.labels):
        return
    lowest = 1 / max(2, len(answers.class_names))
    num_bins = num_reliability_bins(len(answers.labels))
    bins = {"calibrated": reliability(answers.confidence, answers.is_right, num_bins, lowest)}
    errors = [run.result.get(f"test/calibration_error{name}") for name in ("", "_before_scaling")]
    text = "" if errors[0] is None else f"Calibration error {errors[0]:.3f}"
    temperature = 1 / (run.result.get("calibration") or {"scale": [1.0]})["scale"][0]
    if errors[1] is not None and answers.probabilities is not None:
        before = unscaled(answers.probabilities, temperature)
        raw = before[np.arange(len(before)), answers.predicted]
        bins["uncalibrated"] = reliability(raw, answers.is_right, num_bins, lowest)
        text += f", {errors[1]:.3f} before temperature scaling (temperature {temperature:.3f})"
    text += (
        ". Accuracy by confidence, with 95 % intervals. On the dashed line, confidence equals accuracy; "
        "below it, the network is overconfident."
    )
    yield reliability_chart(bins, text.lstrip(". "), lowest), text.lstrip(". ")
    share, accuracy = coverage(answers.confidence, answers.is_right)
    text = "Accuracy on the most confident images, by the share of images that are classified."
    if len(share) > 1:
        line = {"": (share.tolist(), accuracy.tolist())}
        yield curves(line, "share of images classified", "accuracy", text), text
    if len(answers.class_names) == 2 and answers.probabilities is not None:
        yield from _two_classes(answers)


def _two_classes(answers: Answers) -> Iterator[tuple[str, str]]:
    assert answers.probabilities is not None
    name = answers.class_names[1]
    thresholds, precision, recall = precision_recall(
        answers.probabilities[:, 1], answers.labels == 1
    )
    text = f"Precision and recall of {name} as its threshold falls."
    yield (
        curves({"": (recall.tolist(), precision.tolist())}, f"recall of {name}", "precision", text),
        text,
    )
    lines = {
        "precision": (thresholds.tolist(), precision.tolist()),
        "recall": (thresholds.tolist(), recall.tolist()),
    }
    text = f"Precision and recall of {name} by its threshold; the default is 0.5."
    yield curves(lines, f"threshold of {name}", "", text), text
