"""The findings about a data set: each kind of fault with its images, why it matters, and what to do."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np

from finetune.data.checking.duplicates import Pair, connected
from finetune.data.checking.shortcuts import Shortcut
from finetune.data.data_set import DataSet
from finetune.system.messages import counted

Level = Literal["bad", "warning", "note"]
LEVELS: dict[Level, str] = {
    "bad": "results cannot be trusted, or training fails",
    "warning": "probably wrong, please look",
    "note": "good to know",
}


@dataclass(frozen=True)
class Row:
    """One row of a finding: an image or a set of images; no image if it is about a class."""

    images: list[int]
    note: str
    value: float = 0.0  # to sort by


@dataclass(frozen=True)
class Finding:
    """All faults of one kind.

    Attributes:
        kind: Name of the kind in check.json, and of the list of files.
        level: Severity.
        title: What was found, with the number.
        advice: Why it matters, and what to do.
        rows: The faults, worst first.
        is_judged: True for a fault; False for a ranking of images that may be faulty.
    """

    kind: str
    level: Level
    title: str
    advice: str
    rows: list[Row] = field(default_factory=list)
    is_judged: bool = True


def as_plain(
    findings: Sequence[Finding], data: DataSet, most: int | None = None
) -> list[dict[str, Any]]:
    """Return findings for check.json, with paths relative to the root and at most `most` rows each."""
    return [
        {
            "kind": finding.kind,
            "level": finding.level,
            "title": finding.title,
            "advice": finding.advice,
            "is_judged": finding.is_judged,
            "rows": [
                {
                    "files": [data.name(i) for i in row.images],
                    "note": row.note,
                    "value": float(row.value),
                }
                for row in finding.rows[:most]
            ],
        }
        for finding in findings
    ]


def duplicate_findings(
    data: DataSet, exact: Sequence[Sequence[int]], near: Sequence[Pair]
) -> list[Finding]:
    """Return the findings about duplicates: in several splits, in several classes, or in one class.

    Args:
        data: The data set.
        exact: Sets of equal files.
        near: Pairs of images of the same photograph. The first file of an exact set represents all of it.
    """
    found: dict[tuple[str, str], list[Row]] = {
        (by, kind): [] for by in _DUPLICATES for kind in ("exact", "near")
    }
    for members in exact:
        found[_duplicate_kind(data, members), "exact"].append(
            Row(list(members), _describe_places(data, members), len(members))
        )
    copies = {members[0]: members for members in exact}
    best: dict[int, Pair] = {}
    for pair in near:
        for i in pair[:2]:
            best[i] = max(best.get(i, pair), pair, key=lambda p: p.correlation)
    for joined in connected([pair[:2] for pair in near], len(data.paths)):
        members = sorted(i for first in joined for i in copies.get(first, [first]))
        pair = max((best[i] for i in joined), key=lambda p: p.correlation)
        about = [f"similarity {pair.correlation:.2f}"]
        if pair.is_mirrored:
            about.append("mirrored")
        if pair.share < 0.98:
            about.append(f"cropped to {pair.share:.2f}")
        note = f"{', '.join(about)}; {_describe_places(data, members)}"
        found[_duplicate_kind(data, members), "near"].append(Row(members, note, pair.correlation))
    findings = []
    for (by, kind), rows in found.items():
        if rows:
            level, where, advice = _DUPLICATES[by]
            what = "identical files" if kind == "exact" else "near duplicates"
            title = f"{counted(len(rows), 'set')} of {what} {where}"
            findings.append(
                Finding(
                    f"{by}_{kind}", level, title, advice, sorted(rows, key=lambda row: -row.value)
                )
            )
    return findings


_DUPLICATES: dict[str, tuple[Level, str, str]] = {
    "leak": (
        "bad",
        "in more than one split",
        "Images that were seen in training make test results too good. Keep each set in one split.",
    ),
    "two_classes": (
        "bad",
        "in more than one class",
        "At least one of the labels is wrong, or the image shows both. Keep it in one class, or in none.",
    ),
    "copies": (
        "note",
        "in one class",
        "Each copy counts as a separate image, in training and in a validation split taken from it. "
        "One of each is enough.",
    ),
}


def _duplicate_kind(data: DataSet, members: Sequence[int]) -> str:
    if len(np.unique(data.split_of[members])) > 1:
        return "leak"
    return "two_classes" if len(np.unique(data.set_of[members])) > 1 else "copies"


def _describe_places(data: DataSet, members: Sequence[int]) -> str:
    splits = dict.fromkeys(map(data.split_name, members))
    classes = dict.fromkeys(data.set_names[data.set_of[i]] for i in members)
    text = " and ".join(classes) if len(classes) > 1 else next(iter(classes))
    return text if list(splits) == ["all"] else f"{text} in {' and '.join(splits)}"


def shortcut_findings(shortcuts: Sequence[Shortcut]) -> list[Finding]:
    """Return the findings about properties that give away the class or the split."""
    findings = []
    for target, level, advice in _SHORTCUTS:
        rows = [
            Row(
                [],
                f"{s.what} distinguishes {s.name} from the rest: strength {s.strength:.2f} of 1",
                s.strength,
            )
            for s in shortcuts
            if s.target == target
        ]
        if rows:
            properties = counted(len(rows), "property", "properties")
            verb = "gives" if len(rows) == 1 else "give"
            title = f"{properties} of the files {verb} away the {target}"
            findings.append(Finding(f"shortcut_{target}", level, title, advice, rows))
    return findings


_SHORTCUTS: list[tuple[str, Level, str]] = [
    (
        "class",
        "warning",
        "A network learns whatever separates the classes most easily. If that is how images were made, not what they "
        "show, it fails on other images. Mix sources within each class, or convert all images in the same way.",
    ),
    (
        "split",
        "note",
        "The splits were made from different sources or at different times: results on one say little about the other, "
        "unless that difference is what is to be tested.",
    ),
]


def worst_first(findings: Sequence[Finding]) -> list[Finding]:
    """Return findings sorted by level, worst first. The order within a level stays; rankings are last."""
    return sorted(
        findings, key=lambda finding: (not finding.is_judged, list(LEVELS).index(finding.level))
    )
