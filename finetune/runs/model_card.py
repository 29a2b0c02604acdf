"""A model card in Markdown, after Mitchell et al. 2019 (arXiv:1810.03993)."""

from typing import Any

from finetune.runs.headline import headline, network
from finetune.runs.licence import licence
from finetune.runs.outcome import label_rows, num_in_split
from finetune.runs.record import RunRecord
from finetune.runs.statistics import interval, num_right_of, percent


def weights_and_licence(run: RunRecord) -> str:
    """Return what training started from and its licence, in a sentence."""
    recorded = run.about.get("licence_of_the_weights")
    if recorded:
        return str(recorded)
    return licence(
        run.setting("model", "weights"),
        run.setting("model", "backbone"),
        run.about.get("began_from"),
    )


def model_card(run: RunRecord) -> str:
    """Return the card as Markdown, with placeholders for what only a person can know."""
    result = run.result
    about = run.about
    names = result.get("class_names") or list(
        about.get("splits", {}).get("train", {}).get("counts", {})
    )
    sizes = (run.setting("data", "init_args", name) for name in ("eval_image_size", "image_size"))
    size = next(filter(None, sizes), None)
    what = f"{len(names)} classes: {', '.join(names)}"
    always = "it always predicts one of them"
    if run.has_labels:
        what = f"{len(names)} labels, of which an image has several or none: {', '.join(names)}"
        always = "it gives each of them a probability"
    lines = [
        f"# {run.name}",
        "",
        f"An image classifier of {what}.",
        f"Network: {network(run)}, input {size} x {size} pixels (RGB). Its training started from",
        f"{weights_and_licence(run)}.",
        "",
        "## Meant for",
        "",
        "(what it is used for, by whom)",
        "",
        "## Not meant for",
        "",
        f"- Images of anything but these classes: {always}.",
        "- Decisions about people, unless it was evaluated for that.",
        "",
        "## Measured on",
        "",
        *_measured(run, names),
        "",
        "## Trained on",
        "",
        *(f"- {line}" for line in _trained(about)),
        "",
        "## Limits",
        "",
        "- The numbers hold for images like the test images; other cameras, places or times were not measured.",
        *(f"- {doubt}" for doubt in about.get("doubts", ())),
    ]
    return "\n".join(lines) + "\n"


def _measured(run: RunRecord, names: list[str]) -> list[str]:
    if run.result.get("label_counts"):
        return _measured_labels(run)
    matrix = run.result.get("confusion_matrix")
    if not matrix:
        return ["No test images: nothing was measured on held-out images."]
    num_right, num = num_right_of(matrix)
    rows = [
        f"{num} test images of {run.about.get('root', 'the data set')}.",
        "",
        "| | recall | 95 % interval |",
    ]
    rows += [
        "| --- | --- | --- |",
        f"| all (accuracy) | {percent(num_right / max(1, num))} | {interval(num_right, num)} |",
    ]
    for i, (name, row) in enumerate(zip(names, matrix, strict=True)):
        share = percent(row[i] / sum(row)) if sum(row) else "none"
        rows.append(f"| {name} | {share} | {interval(row[i], sum(row))} |")
    return rows


def _measured_labels(run: RunRecord) -> list[str]:
    rows = [f"{headline(run)}", "", "| | images | recall | precision | average precision |"]
    rows.append("| --- | --- | --- | --- | --- |")
    for row in label_rows(run.result):
        values = (row.recall, row.precision, row.average_precision)
        shown = [
            "none" if value is None else "{:.3f} ({:.3f}–{:.3f})".format(*value) for value in values
        ]
        rows.append(f"| {row.name} | {row.num_images} | {' | '.join(shown)} |")
    return rows


def _trained(about: dict[str, Any]) -> list[str]:
    train = about.get("splits", {}).get("train", {}).get("counts", {})
    counts = ", ".join(f"{name} {num}" for name, num in list(train.items())[:20])
    more = f" and {len(train) - 20} more classes" if len(train) > 20 else ""
    return [
        f"{num_in_split(about, 'train')} images: {counts}{more}",
        f"fingerprint {about.get('fingerprint') or 'unknown'}",
    ]
