"""Facts of run.json that only pages show: what was found before training, corrected labels, and ranked networks."""

from typing import NotRequired, TypedDict

from finetune.runs.headline import Count, Share


class _Example(TypedDict):
    files: list[str]
    note: str


class Finding(TypedDict):
    """A finding of the check before training."""

    level: str
    title: str
    is_judged: bool
    rows: list[_Example]


class _Corrected(TypedDict):
    changed: Count
    excluded: Count
    confirmed: Count
    pairs: list[tuple[str, str, Count]]


class Corrections(TypedDict):
    """What a file of corrections has changed."""

    file: str
    splits: dict[str, _Corrected]
    in_test: Count
    unknown: Count


class _Standing(TypedDict):
    name: str
    loss: float
    accuracy: Share
    num_images: Count
    seconds: float


class Ranking(TypedDict):
    """Networks that were ranked before training, the best one first."""

    seconds: float
    rows: list[_Standing]
    metric: NotRequired[str]
    unusable: dict[str, str]
    untried: list[str]
