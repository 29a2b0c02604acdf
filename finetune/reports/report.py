"""report.html: the accuracy of a run, its mistakes, and how to reproduce it, in one HTML file."""

import base64
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from finetune.inference.image_viewer import ImageViewer
from finetune.reports.calibration_charts import calibration_charts
from finetune.reports.charts import curves
from finetune.reports.class_metrics import class_metrics, thresholds_of
from finetune.reports.class_sections import image_sections, matrix
from finetune.reports.model_card import model_card, weights_and_licence
from finetune.reports.test_images import Highlights, ReportImage, highlights, report_images
from finetune.runs.clock import PHASES
from finetune.runs.headline import INTERVAL, headline_of
from finetune.runs.intervals import interval, percent
from finetune.runs.record import RunRecord
from finetune.system.files import replace_text
from finetune.system.html_page import link_to, render
from finetune.system.progress import duration


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
    facts = run.facts
    augmented = run.path / "augmented.webp"
    sections = image_sections(run.predictions, viewer) if run.predictions else []
    kinds = list(_highlights(run, viewer)) if viewer else []
    images = [image for section in sections for image in section.images]
    images += [image for _, shown in kinds for image in shown]
    replace_text(
        target,
        render(
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
            seconds=[
                (phase, PHASES[phase], facts.seconds[phase])
                for phase in PHASES
                if facts.seconds.get(phase)
            ],
            folds=list(_folds(run, target)),
            test_folder=_test_folder(run),
            one="label" if run.has_labels else "class",
            many="labels" if run.has_labels else "classes",
            metrics=class_metrics(run.result),
            matrix=matrix(run.result),
            sections=sections,
            section_ids={section.id for section in sections},
            kinds=kinds,
            why_no_images=_why_no_images(run, viewer, images),
            has_maps=any(image.overlay for image in images),
            no_heat_map=next((image.no_overlay for image in images if image.no_overlay), ""),
            calibration=list(calibration_charts(run)),
            augmented=base64.b64encode(augmented.read_bytes()).decode()
            if augmented.is_file()
            else "",
            counts=[(name, split.counts) for name, split in facts.splits.items()],
            weights=weights_and_licence(run),
            card=model_card(run, facts.root or "the data set", weights_and_licence(run)),
            look=facts.first_look,
            ranking=facts.backbone_ranking,
            corrections=facts.corrections or run.result.get("corrections"),
            address=lambda path: link_to(path, target) if Path(path).is_file() else "",
            percent=percent,
        ),
        errors="replace",
    )
    return target


def _highlights(
    run: RunRecord, viewer: ImageViewer
) -> Iterator[tuple[Highlights, list[ReportImage]]]:
    """Yield each kind of images to look at, with the images."""
    if run.predictions is None:
        return
    for kind in highlights(run.predictions, thresholds_of(run.result)):
        yield kind, report_images(run.predictions, kind.chosen, viewer, has_overlay=True)


def _why_no_images(run: RunRecord, viewer: ImageViewer | None, images: list[ReportImage]) -> str:
    """Return a sentence with the reason why the report has no test images; "" if it has some or needs none."""
    paths = run.predictions.paths if run.predictions else []
    if not paths or any(image.image for image in images):
        return ""
    if viewer is None:
        return "The test images are not shown: the checkpoint that predicted them is missing."
    return f"The test images are not shown: {paths[0]} and others are missing."


def _summary(run: RunRecord) -> Iterator[tuple[str, str]]:
    """Yield names and values for the head of the page."""
    yield "date", run.date
    splits = run.facts.splits
    if splits:
        yield "images", ", ".join(f"{split.num:,} {name}" for name, split in splits.items())
        counts = splits["train"].counts if "train" in splits else ()
        yield "labels" if run.has_labels else "classes", f"{len(counts):,}"
    if run.network:
        yield "network", run.network
    size = run.setting("data", "init_args", "image_size")
    if size:
        yield "image size", f"{size} pixels"
    if run.facts.best:
        yield "best.ckpt", run.facts.best.weights
    if run.facts.seconds:
        yield "time", duration(sum(run.facts.seconds.values()))
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
    best = None
    if (
        run.facts.best and run.facts.best.share > 0
    ):  # otherwise best.ckpt has the weights before training
        best = (
            run.facts.best.epoch,
            "best.ckpt" if run.facts.best.share == 1 else "part of best.ckpt",
        )
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
    result = headline_of(run.result.get("test_folder", {}))
    return "" if result is None else result.line
