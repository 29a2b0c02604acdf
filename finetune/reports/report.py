"""report.html: the accuracy of a run, its mistakes, and how to reproduce it, in one HTML file."""

import base64
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from finetune.inference.image_viewer import ImageViewer, image_viewer
from finetune.inference.predictor import Predictor
from finetune.reports.calibration_charts import calibration_charts
from finetune.reports.charts import curves
from finetune.reports.class_metrics import class_metrics, matrix, thresholds_of
from finetune.reports.model_card import model_card, weights_and_licence
from finetune.reports.test_images import NUM_SHOWN, highlights, image_sections, report_images
from finetune.runs.headline import INTERVAL, headline_of
from finetune.runs.intervals import interval, percent
from finetune.runs.record import RunRecord
from finetune.system.files import replace_text
from finetune.system.html_page import link_to, render
from finetune.system.progress import duration

_MOST_RATES = 5  # lines of learning rates
_MOST_OF_GROUP = 6  # images of a wrong group


def page_of(run: RunRecord, target: Path | None = None) -> Path:
    """Write the report of a run that has ended, with what its checkpoint sees, and return its path.

    Args:
        run: The run.
        target: The path of the report; None for report.html in the run's folder.
    """
    checkpoint = measured_checkpoint(run)
    if checkpoint is None:
        return write_report(run, None, {}, target=target)
    predictor = Predictor(checkpoint)
    viewer = image_viewer(predictor) if run.predictions else None
    if viewer is not None and "folds" in run.result:
        # this checkpoint has seen the images; the network of another fold predicted them
        viewer = replace(viewer, overlay=lambda *_: "The reports of the folds have heat maps.")
    return write_report(run, viewer, predictor.versions, target=target)


def measured_checkpoint(run: RunRecord) -> Path | None:
    """Return the best checkpoint of a fit, or the checkpoint of a test; None if neither exists."""
    measured = run.result.get("checkpoint")
    places = [run.checkpoint("best"), *([run.path / measured] if measured else [])]
    return next((path for path in places if path.is_file()), None)


def write_report(
    run: RunRecord,
    viewer: ImageViewer | None,
    versions: dict[str, Any],
    is_running: bool = False,
    target: Path | None = None,
) -> Path:
    """Write the report of a run and return its path.

    Args:
        run: The run.
        viewer: Loads the test images; with None, the report has none.
        versions: Versions of the software of the run, by name.
        is_running: Whether the run has not ended. The page then reloads itself.
        target: File of the report; None is report.html in the run's folder.
    """
    target = target or run.path / "report.html"
    facts = run.facts
    augmented = run.path / "augmented.webp"
    predictions = run.predictions
    sections = image_sections(predictions, viewer) if predictions else []
    kinds = (
        [
            (kind, report_images(predictions, kind.chosen, viewer, has_overlay=True))
            for kind in highlights(predictions, thresholds_of(run.result))
        ]
        if predictions and viewer
        else []
    )
    images = [image for section in sections for image in section.images]
    images += [image for _, shown in kinds for image in shown]
    paths = predictions.paths if predictions else []
    why_no_images = ""
    if paths and not any(image.image for image in images):
        missing = f"{paths[0]} and others are missing."
        if viewer is None:
            missing = "the checkpoint that predicted them is missing."
        why_no_images = f"The test images are not shown: {missing}"
    weights = weights_and_licence(run)
    text = render(
        "reports/report.html",
        title=f"{run.title}: report",
        heading=run.title,
        run=run,
        is_running=is_running,
        answer=facts.result,
        headline=run.headline_text,
        summary=list(_summary(run)),
        to_repeat=list(_facts(run, versions)),
        charts=list(training_charts(run)),
        folds=list(_folds(run, target)),
        test_folder=headline_of(run.result.get("test_folder", {})),
        one="label" if run.has_labels else "class",
        many="labels" if run.has_labels else "classes",
        metrics=class_metrics(run.result),
        matrix=matrix(run.result),
        by_group=facts.test_by_group,
        wrong_groups=_wrong_groups(run, viewer),
        sets=run.result.get("sets"),
        sections=sections,
        section_ids={section.id for section in sections},
        kinds=kinds,
        why_no_images=why_no_images,
        has_maps=any(image.overlay for image in images),
        no_heat_map=next((image.no_overlay for image in images if image.no_overlay), ""),
        calibration=list(calibration_charts(run)),
        augmented=base64.b64encode(augmented.read_bytes()).decode() if augmented.is_file() else "",
        counts=[(name, split.counts) for name, split in facts.splits.items()],
        weights=weights,
        card=model_card(run, facts.root or "the data set", weights),
        look=facts.first_look,
        ranking=facts.backbone_ranking,
        corrections=facts.corrections or run.result.get("corrections"),
        address=lambda path: link_to(path, target) if Path(path).is_file() else "",
        percent=percent,
    )
    replace_text(target, text, errors="replace")
    return target


def _summary(run: RunRecord) -> Iterator[tuple[str, str]]:
    """Yield names and values for the head of the page."""
    facts = run.facts
    yield "date", run.date
    if facts.splits:
        yield "images", ", ".join(f"{split.num:,} {name}" for name, split in facts.splits.items())
        counts = facts.splits["train"].counts if "train" in facts.splits else ()
        yield "labels" if run.has_labels else "classes", f"{len(counts):,}"
    if run.network:
        yield "network", run.network
    size = run.setting("data", "init_args", "image_size")
    if size:
        yield "image size", f"{size} pixels"
    if facts.best:
        yield "best.ckpt", facts.best.weights
    if "unfamiliar" in run.result:
        yield (
            "unlike the training images",
            f"{percent(run.result['unfamiliar'])} of test (5 % is usual)",
        )
    if facts.seconds:
        yield "time", duration(facts.seconds)
    yield "run", run.name


def _facts(run: RunRecord, versions: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield names and values of what is needed to repeat the run."""
    for line in run.facts.lines:
        what, _, text = line.partition(": ")
        yield what, text
    if run.facts.best:
        yield "best.ckpt", run.facts.best.why
    if run.setting("seed_everything") is not None:
        yield "seed", str(run.setting("seed_everything"))
    if run.facts.fingerprint:
        yield "images", f"fingerprint {run.facts.fingerprint}"
    if versions:
        yield "versions", ", ".join(f"{name} {version}" for name, version in versions.items())


def training_charts(run: RunRecord) -> Iterator[str]:
    """Yield charts of the loss, the metrics and the learning rates, if they were logged."""
    best = run.facts.best
    # the weights before training have no place in a chart
    mark = (best.epoch, "best.ckpt") if best and best.epoch else None
    for metric in ("loss", "mAP", "f1_micro") if run.has_labels else ("loss", "accuracy"):
        train = "train/loss_epoch" if metric == "loss" else f"train/{metric}"
        both = {"training": run.line(train), "validation": run.line(f"val/{metric}")}
        lines = {split: line for split, line in both.items() if len(line[0]) > 1}
        if lines:
            ends = ", ".join(
                f"{split} from {values[0]:.3f} to {values[-1]:.3f}"
                for split, (_, values) in lines.items()
            )
            name = metric.replace("f1_micro", "micro F1")
            if len(lines) == 1:  # then there is no legend
                name = f"{next(iter(lines))} {name}"
            yield curves(lines, "epoch", name, f"The {name} by epoch: {ends}.", mark=mark)
    rates = {
        name.split("/")[-1].removesuffix("_no_decay"): run.line(name, "step")
        for name in run.names("lr-")
    }
    rates = {name: line for name, line in list(rates.items())[:_MOST_RATES] if len(line[0]) > 1}
    if rates:
        yield curves(rates, "step", "learning rate", "The learning rates by step.")


def _wrong_groups(run: RunRecord, viewer: ImageViewer | None) -> list[dict[str, Any]]:
    """Return the groups with a wrong answer, the most confident first, and the first images of each."""
    groups = run.group_predictions
    images = run.predictions
    if groups is None or images is None or images.groups is None:
        return []
    wrong = np.flatnonzero(~groups.is_right)
    order = wrong[np.argsort(-groups.confidence[wrong], kind="stable")][:NUM_SHOWN].tolist()
    shown = []
    for i in order:
        own = [j for j, group in enumerate(images.groups) if group == groups.paths[i]]
        chosen = [(j, int(images.probabilities[j].argmax())) for j in own[:_MOST_OF_GROUP]]
        shown.append(
            {
                "name": groups.paths[i],
                "label": ", ".join(groups.named(groups.labels[i])),
                "predicted": ", ".join(groups.named(groups.decided[i])),
                "confidence": float(groups.confidence[i]),
                "num_images": len(own),
                "images": report_images(images, chosen, viewer) if viewer else [],
            }
        )
    return shown


def _folds(run: RunRecord, target: Path) -> Iterator[dict[str, Any]]:
    """Yield the result of each fold of a cross-validation, with the address of its report."""
    for row in run.result.get("folds", ()):
        page = run.path / row["run"] / "report.html"
        address = link_to(page, target) if page.is_file() else ""
        if not run.has_labels:
            value = row["num_right"] / max(1, row["num_images"])
            text = percent(value)
            ends = interval(row["num_right"], row["num_images"])
        elif row["mAP"] is None:
            value = -1.0
            text = "none"
            ends = ""
        else:
            value = row["mAP"]
            text = f"{value:.3f}"
            ends = "{:.3f}–{:.3f}".format(*row[INTERVAL])
        yield {**row, "value": value, "text": text, "interval": ends, "address": address}
