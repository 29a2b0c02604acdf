"""report.html: what came out of a run, where it fails, and how to repeat it, on one page that needs nothing else."""

import base64
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from finetune.runs.answers import Answers
from finetune.runs.charts import curves, reliability_chart
from finetune.runs.clock import PHASES
from finetune.runs.data_check import DataCheck
from finetune.runs.headline import headline
from finetune.runs.highlights import NUM_SHOWN, Lens, Shown, kinds, most_of_cells, shown
from finetune.runs.model_card import model_card, weights_and_licence
from finetune.runs.record import RunRecord
from finetune.runs.statistics import (
    coverage,
    interval,
    percent,
    precision_recall,
    reliability,
    unscaled,
)
from finetune.system.files import replace_text
from finetune.system.html_page import link_to, render

_MANY = 25  # classes: a larger matrix can't be read, its fullest cells can
_NUM_PAIRS = 40


def write_report(
    run: RunRecord,
    lens: Lens | None,
    versions: dict[str, Any],
    is_running: bool = False,
    target: Path | None = None,
    check: DataCheck | None = None,
) -> Path:
    """Write a run's page and return its path.

    Args:
        run: What the folder holds.
        lens: How to look at test pictures; None shows none.
        versions: Of what made the run, by name.
        is_running: Whether more is to come: the page then loads itself anew.
        target: The page; None is report.html in the run's folder.
        check: What `finetune check` said of its pictures, if anybody asked it.
    """
    target = target or run.path / "report.html"
    answers = run.answers
    augmented = run.path / "augmented.webp"
    cells = list(_cells(answers, lens)) if answers else []
    replace_text(
        target,
        render(
            "runs/html_report.html",
            title=f"{run.name}: report",
            run=run,
            is_running=is_running,
            headline=str(headline(run)),
            facts=list(_facts(run, versions)),
            charts=list(learning(run)),
            seconds=[
                (phase, PHASES[phase], run.seconds[phase])
                for phase in PHASES
                if run.seconds.get(phase)
            ],
            classes=list(_classes(run)),
            cells=cells,
            unseen=_unseen(run, lens, [picture for cell in cells for picture in cell["pictures"]]),
            matrix=_matrix(run) if 0 < len(run.result.get("class_names", ())) <= _MANY else None,
            kinds=list(_kinds(answers, lens)) if answers and lens else [],
            judgement=list(_judgement(run)),
            augmented=base64.b64encode(augmented.read_bytes()).decode()
            if augmented.is_file()
            else "",
            weights=weights_and_licence(run),
            card=model_card(run),
            look=run.about.get("first_look"),
            ranking=run.about.get("backbone_ranking"),
            check=check,
            address=lambda path: link_to(path, target) if Path(path).is_file() else "",
            percent=percent,
        ),
        errors="replace",
    )
    return target


def _unseen(run: RunRecord, lens: Lens | None, pictures: list[Shown]) -> str:
    """Return why no test picture can be shown; nothing where some can."""
    if run.answers is None or not run.answers.paths or any(picture.image for picture in pictures):
        return ""
    if lens is None:
        return "The test pictures are not shown: the checkpoint that saw them is no longer there."
    if not pictures:
        return ""
    return f"The test pictures can't be shown: {run.answers.paths[0]} and others are not there any more."


def _facts(run: RunRecord, versions: dict[str, Any]) -> Iterator[tuple[str, str]]:
    for line in run.about.get("lines", ()):
        what, _, text = line.partition(": ")
        yield what, text
    if run.best:
        yield "best.ckpt", run.why_best
    if run.setting("seed_everything") is not None:
        yield "seed", str(run.setting("seed_everything"))
    if run.about.get("fingerprint"):
        yield "training pictures", f"fingerprint {run.about['fingerprint']}"
    if versions:
        yield "versions", ", ".join(f"{name} {version}" for name, version in versions.items())


def learning(run: RunRecord) -> Iterator[str]:
    """Yield charts of the loss, the accuracy and the rates, as far as they are known."""
    best = (run.best[0], "best.ckpt") if run.best else None
    for what in ("loss", "accuracy"):
        train = "train/loss_epoch" if what == "loss" else "train/accuracy"
        lines = {
            name: run.line(key)
            for name, key in (("training", train), ("validation", f"val/{what}"))
        }
        lines = {name: line for name, line in lines.items() if line[0]}
        if lines:
            last = ", ".join(
                f"{name} {line[1][0]:.3f} at first, {line[1][-1]:.3f} at last"
                for name, line in lines.items()
            )
            yield curves(lines, "epoch", what, f"The {what} by epoch: {last}.", mark=best)
    rates = {
        name.split("/")[-1].removesuffix("_no_decay"): run.line(name, "step")
        for name in run.names("lr-")
    }
    if rates := {name: line for name, line in list(rates.items())[:5] if line[0]}:
        yield curves(rates, "step", "learning rate", "The learning rates by step.", is_log=True)


def _classes(run: RunRecord) -> Iterator[dict[str, Any]]:
    matrix = run.result.get("confusion_matrix") or []
    names = run.result.get("class_names", ())
    said = np.array(matrix).sum(axis=0) if matrix else []
    for i, row in enumerate(matrix):
        num, right = sum(row), row[i]
        others = [(count, names[j]) for j, count in enumerate(row) if j != i and count]
        yield {
            "name": names[i],
            "num": num,
            "recall": right / num if num else None,
            "interval": interval(right, num) if num else "",
            "precision": right / int(said[i]) if said[i] else None,
            "f1": 2 * right / (num + int(said[i])) if num + said[i] else None,
            "taken_for": max(others) if others else None,
        }


def _matrix(run: RunRecord) -> list[list[tuple[int, float]]]:
    """Return of each cell how many pictures it has, and their share of the row."""
    matrix = run.result["confusion_matrix"]
    return [[(count, count / max(1, sum(row))) for count in row] for row in matrix]


def _cells(answers: Answers, lens: Lens | None) -> Iterator[dict[str, Any]]:
    names = answers.class_names
    pairs, counts = np.unique(answers.labels * len(names) + answers.predicted, return_counts=True)
    found = sorted(
        zip(counts.tolist(), pairs.tolist(), strict=True), key=lambda cell: (-cell[0], cell[1])
    )
    if len(names) > _MANY:
        wrong = [cell for cell in found if cell[1] // len(names) != cell[1] % len(names)]
        found = wrong[:_NUM_PAIRS]
    most = most_of_cells([count for count, _ in found])
    for count, pair in found:
        label, predicted = divmod(pair, len(names))
        chosen = answers.of(label, predicted)[:most].tolist()
        pictures = shown(answers, chosen, lens, has_overlay=False) if lens else []
        key, pair_names = f"cell-{label}-{predicted}", (names[label], names[predicted])
        yield {
            "id": key,
            "names": pair_names,
            "count": count,
            "pictures": pictures,
            "is_right": label == predicted,
        }


def _kinds(answers: Answers, lens: Lens) -> Iterator[dict[str, Any]]:
    for heading, sentence, chosen in kinds(answers):
        pictures = shown(answers, chosen[:NUM_SHOWN].tolist(), lens, has_overlay=True)
        yield {"heading": heading, "sentence": sentence, "pictures": pictures, "count": len(chosen)}


def _judgement(run: RunRecord) -> Iterator[tuple[str, str]]:
    """Yield charts of how far its confidence can be trusted, each with a sentence."""
    answers = run.answers
    if answers is None or not len(answers.labels):
        return
    bins = {"as said": reliability(answers.confidence, answers.is_right)}
    errors = [run.result.get(f"test/calibration_error{name}") for name in ("", "_before_scaling")]
    text = "" if errors[0] is None else f"Calibration error {errors[0]:.3f}"
    temperature = (run.result.get("calibration") or {}).get("temperature", 1.0)
    if errors[1] is not None and answers.probabilities is not None:
        before = unscaled(answers.probabilities, temperature)
        bins |= {
            "before scaling": reliability(
                before[np.arange(len(before)), answers.predicted], answers.is_right
            )
        }
        text += f", {errors[1]:.3f} before scaling by the temperature {temperature:.3f}"
    text += ". On the line it is right as often as it says; below it, it is too sure. Larger dots are more pictures."
    yield reliability_chart(bins, text.lstrip(". ")), text.lstrip(". ")
    share, accuracy = coverage(answers.confidence, answers.is_right)
    text = "If it only answers where it is surest: "
    text += "the share of pictures that it answers, and how many of these are right."
    yield (
        curves({"": (share.tolist(), accuracy.tolist())}, "share answered", "accuracy", text),
        text,
    )
    if len(answers.class_names) == 2 and answers.probabilities is not None:
        yield from _two_classes(answers)


def _two_classes(answers: Answers) -> Iterator[tuple[str, str]]:
    assert answers.probabilities is not None
    name = answers.class_names[1]
    thresholds, precision, recall = precision_recall(
        answers.probabilities[:, 1], answers.labels == 1
    )
    text = f"Precision and recall of {name}, as the threshold from which it is said falls."
    yield (
        curves({"": (recall.tolist(), precision.tolist())}, f"recall of {name}", "precision", text),
        text,
    )
    lines = {
        "precision": (thresholds.tolist(), precision.tolist()),
        "recall": (thresholds.tolist(), recall.tolist()),
    }
    text = f"What it costs to say {name} from another probability on than 0.5."
    yield curves(lines, f"{name} is said from this probability on", "", text), text
