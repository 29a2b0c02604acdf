"""A model card in Markdown, after Mitchell et al. 2019 (arXiv:1810.03993)."""

from collections.abc import Iterator

from finetune.reports.class_metrics import class_metrics
from finetune.runs.licence import licence
from finetune.runs.record import RunRecord

_MOST_CLASSES = 20  # whose training images are counted

_CARD = """\
# {name}

An image classifier of {what}.
Network: {network}, input {size} x {size} pixels (RGB). Its training started from
{weights}.

## Meant for

(what it is used for, by whom)

## Not meant for

- Images of anything but these classes: {always}.
- Decisions about people, unless it was evaluated for that.

## Measured on

{measured}

## Trained on

- {trained}
- fingerprint {fingerprint}

## Limits

{limits}
"""


def weights_and_licence(run: RunRecord) -> str:
    """Return what training started from and its licence, in a sentence."""
    facts = run.facts
    weights = run.setting("model", "weights")
    backbone = run.setting("model", "backbone")
    return facts.licence_of_the_weights or licence(weights, backbone, facts.began_from)


def model_card(run: RunRecord, data: str, weights: str) -> str:
    """Return the card as Markdown, with placeholders for what only a person can know.

    Args:
        run: The run.
        data: The name of its data set.
        weights: What training started from and its licence, in a sentence.
    """
    train = run.facts.splits.get("train")
    counts = {} if train is None else train.counts
    names = run.result.get("class_names") or list(counts)
    if run.has_labels:
        what = f"labels, of which an image has several or none: {', '.join(names)}"
        always = "it gives each of them a probability"
    else:
        what = f"classes: {', '.join(names)}"
        always = "it always predicts one of them"
    trained = ", ".join(f"{name} {num}" for name, num in list(counts.items())[:_MOST_CLASSES])
    if len(counts) > _MOST_CLASSES:
        trained += f" and {len(counts) - _MOST_CLASSES} more classes"
    others = "other cameras, places or times were not measured."
    limits = [f"The numbers hold for images like the test images; {others}", *run.facts.doubts]
    return _CARD.format(
        name=run.name,
        what=f"{len(names)} {what}",
        network=run.network,
        size=run.setting("data", "init_args", "image_size"),
        weights=weights,
        always=always,
        measured="\n".join(_measured(run, data)),
        trained=f"{0 if train is None else train.num} images: {trained}",
        fingerprint=run.facts.fingerprint or "unknown",
        limits="\n".join(f"- {limit}" for limit in limits),
    )


def _measured(run: RunRecord, data: str) -> Iterator[str]:
    """Yield the result of the test, and a table of the metrics of each class or label with their intervals."""
    rows = class_metrics(run.result)
    if not rows:
        yield "No test images: nothing was measured on held-out images."
        return
    names = ["recall", "precision", *(["average precision"] if run.has_labels else [])]
    yield f"Images of {data}: {run.headline_text}"
    yield ""
    yield f"| | images | {' | '.join(names)} |"
    yield "| --- | --- |" + " --- |" * len(names)
    for row in rows:
        shares = (row.recall, row.precision, row.average_precision)[: len(names)]
        values = ["none" if s is None else f"{s[0]:.3f} ({s[1]:.3f}–{s[2]:.3f})" for s in shares]
        name = row.name.replace("|", r"\|")  # which ends a cell
        yield f"| {name} | {row.num_images} | {' | '.join(values)} |"
