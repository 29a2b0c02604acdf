"""The findings about a data set: each kind of fault with its images, why it matters, and what to do."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from finetune.data.data_set import DataSet

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

    def plain_row(row: Row) -> dict[str, Any]:
        files = [data.name(i) for i in row.images]
        return {"files": files, "note": row.note, "value": float(row.value)}

    return [
        {
            "kind": finding.kind,
            "level": finding.level,
            "title": finding.title,
            "advice": finding.advice,
            "is_judged": finding.is_judged,
            "rows": [*map(plain_row, finding.rows[:most])],
        }
        for finding in findings
    ]


def worst_first(findings: Sequence[Finding]) -> list[Finding]:
    """Return findings sorted by level, worst first. The order within a level stays; rankings are last."""
    return sorted(
        findings, key=lambda finding: (not finding.is_judged, list(LEVELS).index(finding.level))
    )
