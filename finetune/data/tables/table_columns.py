"""Which column of a table has the path, the labels, the split, the weight and the group of an image."""

import os
import re
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from finetune.data.decode import IMAGE_SUFFIXES
from finetune.data.splits import SPLIT_NAMES
from finetune.data.tables.table_file import TableFile
from finetune.system.messages import WrongUsage, did_you_mean

_FLAG = "--data.columns"
# The usual names of each column, without case, spaces, `_` and `-`. If several columns of a table match, the one that
# has the name of the role wins. Otherwise it is an error.
_SPELLINGS = {
    "path": "path filepath imagepath imgpath file filename image imagefile imagename imagefilename img imgname "
    "picture photo",
    "label": "label labels class classes classname target targets category categories species breed tag tags",
    "split": "split subset partition",
    "weight": "weight weights sampleweight imageweight",
    "group": "group groupid patient patientid",
}
_OPTIONAL = ("split", "weight", "group")
# the values of columns of 0 and 1, in lower case
TRUTH = {"0": False, "0.0": False, "false": False, "1": True, "1.0": True, "true": True}
_UNKNOWN = {"", "-1", "-1.0", "nan", "none"}  # in columns of 0 and 1: not labelled, or uncertain
# Columns of 0 and 1 that say whether an image is of a split, and of which: all others are training images.
_FLAGS = {
    **{f"is{name}": split for name, split in SPLIT_NAMES.items()},
    **dict.fromkeys(("val", "validation"), "val"),
    "test": "test",
}


@dataclass(frozen=True)
class Columns:
    """The names of the columns.

    Attributes:
        path: The path of the image.
        labels: The label or labels. If there are several columns, each is a class, with 0 or 1 for each image.
        split: The split; None if there is no such column.
        weight: The weight of the image in training; None if there is no such column.
        group: The group; None if there is no such column.
    """

    path: str
    labels: tuple[str, ...]
    split: str | None = None
    weight: str | None = None
    group: str | None = None

    @property
    def has_indicators(self) -> bool:
        """Whether each class has a column with 0 or 1."""
        return len(self.labels) > 1


def parse_columns(columns: Mapping[str, Any] | str | None) -> dict[str, list[str]]:
    """Return the column names that an option gives for each role; none for a role whose columns are to be ignored.

    Args:
        columns: Column names by role, or text such as `path:photo,label:breed`. The label may have several columns.
            The name `null` ignores the columns of an optional role.

    Raises:
        WrongUsage: A role does not exist or has no name, or a column is named twice.
    """
    pairs: list[tuple[Any, Any]] = []
    if isinstance(columns, Mapping):
        for role, names in columns.items():
            pairs += [(role, name) for name in (names if isinstance(names, list) else [names])]
    else:
        parts = [part.partition(":") for part in (columns or "").split(",") if part.strip()]
        pairs = [(role.strip(), name.strip()) for role, _, name in parts]
    named: dict[str, list[str]] = {}
    for role, name in pairs:
        if role not in _SPELLINGS:
            hint = did_you_mean(str(role), [*_SPELLINGS])
            raise WrongUsage(f"{_FLAG}: {role!r} is not a role of a column{hint}")
        of_role = named.setdefault(role, [])
        if role in _OPTIONAL and name in (None, "null"):
            continue
        if not name:
            raise WrongUsage(f"{_FLAG}: pass a column for {role}, such as {_FLAG} {role}:NAME")
        of_role.append(str(name))
        if role != "label" and len(of_role) > 1:
            raise WrongUsage(f"{_FLAG}: {role} can only be one column, not {', '.join(of_role)}")
    used = Counter(name for of_role in named.values() for name in of_role)
    if twice := [name for name, num in used.items() if num > 1]:
        raise WrongUsage(f"{_FLAG} names the column {twice[0]!r} twice")
    return named


def find_columns(
    table: TableFile, named: Mapping[str, Sequence[str]], needs_labels: bool = True
) -> Columns:
    """Find the columns of a table.

    Args:
        table: The table.
        named: The result of `parse_columns`.
        needs_labels: Whether there must be labels.

    Raises:
        ValueError: A column is missing or ambiguous.
    """
    columns = {role: tuple(named.get(role, ())) for role in _SPELLINGS}
    taken = {name for names in columns.values() for name in names}
    if unknown := sorted(taken - table.columns.keys()):
        hint = did_you_mean(unknown[0], list(table.columns))
        raise ValueError(f"{table.path} has no column {unknown[0]!r}{hint}")
    for role, spellings in _SPELLINGS.items():
        if role in named:
            continue
        rest = [name for name in table.columns if name not in taken]
        matches = [name for name in rest if _plain(name) in spellings.split()]
        if role == "split":
            matches = matches or [name for name in rest if _has_splits(table, name)]
        if matches:
            name = _chosen(table, role, matches, needs_labels or role in ("path", "group"))
            columns[role] = (name,)
            taken.add(name)
    labels = columns["label"] or _indicator_columns(table, taken)
    for role, names in (("path", columns["path"]), ("label", labels)):
        if not names and (needs_labels or role == "path"):
            raise ValueError(_no_column(table, role))
    optional = {role: columns[role][0] for role in _OPTIONAL if columns[role]}
    return Columns(columns["path"][0], labels, **optional)


def _chosen(table: TableFile, role: str, matches: Sequence[str], is_needed: bool) -> str:
    """Return the column of a role among those that have a usual name of it.

    Raises:
        ValueError: Several columns may be meant.
    """
    certain = [name for name in matches if _plain(name) in (role, f"{role}s")]
    if role == "weight":  # next to `sample_weight`, `weight` may be that of an animal
        certain = []
    if len(matches) > 1 and len(certain) != 1 and is_needed:
        advice = f"name it with {_FLAG} {role}:{matches[0]}"
        if role == "split":
            advice += ", or write one column with train, val and test"
        listed = " and ".join(map(repr, matches))
        raise ValueError(
            f"{table.path}, line 1: the columns {listed} may both be the {role}; {advice}"
        )
    return (certain or matches)[0]


def _no_column(table: TableFile, role: str) -> str:
    """Return the error message for a table without a column of paths or labels."""
    names = list(table.columns)
    if any(os.path.splitext(name)[1].lower() in IMAGE_SUFFIXES for name in names):
        return f"{table.path}, line 1: there is no header; the first line must name the columns, such as path,label"
    listed = ", ".join(map(repr, names))
    return (
        f"{table.path}, line 1: none of the columns {listed} is the {role}; "
        f"name it with {_FLAG} {role}:NAME"
    )


def _indicator_columns(table: TableFile, others: Collection[str]) -> tuple[str, ...]:
    """Return the columns of 0 and 1 besides `others`, if there are at least two; else (). Values may be unknown."""
    names = [
        name
        for name in table.columns
        if name not in others and not _is_flag(table, name) and _holds(table, name, TRUTH, _UNKNOWN)
    ]
    return tuple(names) if len(names) > 1 else ()


def _holds(
    table: TableFile, name: str, values: Collection[str], unknown: Collection[str] = ()
) -> bool:
    """Return whether a column only has these values, in any case, and values that are unknown, but not only those."""
    has_known = False
    for value in table.columns[name]:
        text = str(value).strip().lower()
        if text in values:
            has_known = True
        elif text not in unknown:
            return False
    return has_known


def _is_flag(table: TableFile, name: str) -> bool:
    """Return whether a column of 0 and 1 says by its name whether an image is of a split."""
    return _plain(name) in _FLAGS and _holds(table, name, TRUTH)


def _has_splits(table: TableFile, name: str) -> bool:
    """Return whether a column has the splits of the images, whatever its name is."""
    return _is_flag(table, name) or _holds(table, name, SPLIT_NAMES, {"", "none"})


def split_of_values(column: str) -> dict[str, str]:
    """Return the splits that the values of a column mean, by value in lower case."""
    splits = dict(SPLIT_NAMES)
    flag = {**SPLIT_NAMES, **_FLAGS}.get(_plain(column))
    for text, is_true in TRUTH.items():
        if flag and is_true:
            splits[text] = flag
        elif flag and flag != "train":  # what is not train may be val or test
            splits[text] = "train"
    return splits


def _plain(name: str) -> str:
    return re.sub(r"[\s_\-]+", "", name).casefold()
