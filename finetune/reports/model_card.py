"""A model card in Markdown, after Mitchell et al. 2019 (arXiv:1810.03993)."""

from finetune.reports.class_metrics import class_metrics
from finetune.runs.licence import licence
from finetune.runs.record import RunRecord


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
    about = run.about
    names = run.result.get("class_names") or list(
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
        f"Network: {run.network}, input {size} x {size} pixels (RGB). Its training started from",
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
        *_measured(run),
        "",
        "## Trained on",
        "",
        *(f"- {line}" for line in _trained(run)),
        "",
        "## Limits",
        "",
        "- The numbers hold for images like the test images; other cameras, places or times were not measured.",
        *(f"- {doubt}" for doubt in about.get("doubts", ())),
    ]
    return "\n".join(lines) + "\n"


def _measured(run: RunRecord) -> list[str]:
    """Return the result of the test, and a table of the metrics of each class or label with their intervals."""
    rows = class_metrics(run.result)
    if not rows:
        return ["No test images: nothing was measured on held-out images."]
    names = ["recall", "precision"]
    if run.has_labels:
        names.append("average precision")
    lines = [
        f"Images of {run.about.get('root', 'the data set')}: {run.headline_text}",
        "",
        f"| | images | {' | '.join(names)} |",
        "| --- | --- |" + " --- |" * len(names),
    ]
    for row in rows:
        values = (row.recall, row.precision, row.average_precision)[: len(names)]
        cells = [
            "none" if value is None else "{:.3f} ({:.3f}–{:.3f})".format(*value) for value in values
        ]
        lines.append(f"| {row.name} | {row.num_images} | {' | '.join(cells)} |")
    return lines


def _trained(run: RunRecord) -> list[str]:
    train = run.about.get("splits", {}).get("train", {}).get("counts", {})
    counts = ", ".join(f"{name} {num}" for name, num in list(train.items())[:20])
    more = f" and {len(train) - 20} more classes" if len(train) > 20 else ""
    return [
        f"{run.num_images('train')} images: {counts}{more}",
        f"fingerprint {run.about.get('fingerprint') or 'unknown'}",
    ]
