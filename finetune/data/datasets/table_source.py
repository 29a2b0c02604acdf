"""A table as a source of images.

The name of an image is its path below the root, and images have the order of class folders. So a fit on a table and a
fit on the folders in its root have the same splits, batches and weights.
"""

import logging
import os
import shlex
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from finetune.data.datasets.class_changes import check_names_exist
from finetune.data.datasets.image_source import FoundImages
from finetune.data.datasets.listing import Listing, listing_of, with_label_sets
from finetune.data.samples import PathList, Samples
from finetune.data.splits import group_ids
from finetune.data.tables.row_faults import Fault, describe, error_line, skipped_line
from finetune.data.tables.table_columns import may_be_split
from finetune.data.tables.table_labels import combining_mark
from finetune.data.tables.table_rows import TableContent, TableOptions, TableRows, read_content
from finetune.data.targets import ClassIndex, MultiHot, Targets
from finetune.data.walk import SkippedFiles
from finetune.system.file_names import composed
from finetune.system.messages import WrongUsage, counted

log = logging.getLogger(__name__)

_SPLITS = ("all", "train", "val", "test")


@dataclass(frozen=True)
class TableSource:
    """A table of images.

    Attributes:
        path: The file.
        options: How to read it.
    """

    path: Path
    options: TableOptions

    def find(
        self, class_names: Sequence[str] | None, skip: bool = False, is_logged: bool = True
    ) -> FoundImages:
        """Return the classes and images; see `ImageSource.find`. With `skip`, rows with faults are skipped."""
        content = read_content(self.path, self.options)
        if content.faults and not skip:
            raise ValueError(error_line(self.path, content.faults))
        if content.faults and is_logged:
            log.warning("%s", skipped_line(self.path, content.faults))
        if content.num_repeated and is_logged:
            repeat = counted(content.num_repeated, "row repeats", "rows repeat")
            log.info("%s: %s another one, and count once", self.path, repeat)
        parts = _by_split(content.rows)
        if class_names is None:
            class_names = self._class_names(content, parts)
            if is_logged and "split" not in self.options.columns:
                for name in filter(may_be_split, content.declared):
                    log.warning(
                        "%s: the column %r of 0 and 1 is a label; if it is the split, pass --data.columns split:%s",
                        self.path,
                        name,
                        name,
                    )
            if content.kind == "single" and is_logged and (mark := combining_mark(class_names)):
                log.warning(
                    "%s: many classes combine other classes; if images have several labels, "
                    "pass --data.label_separator %r",
                    self.path,
                    mark,
                )
        for rows in parts.values():
            self._check_known(rows, class_names, content.label_column)
        return FoundImages(
            class_names=list(class_names),
            splits={
                split: _samples(rows, split, class_names, content) for split, rows in parts.items()
            },
            label_kind=content.kind,
            remark=content.remark,
            folder=content.root,
            skipped=tuple(describe(self.path, fault) for fault in content.faults),
        )

    def listing(self) -> Listing:
        """Return all images, also of a table with faults. The faulty rows are listed as skipped.

        Raises:
            WrongUsage: The file is not a table of images, or no row is without a fault.
        """
        try:
            content = read_content(self.path, self.options)
        except (ValueError, FileNotFoundError) as error:
            raise WrongUsage(str(error)) from error
        parts = _by_split(content.rows)
        if not parts:
            raise WrongUsage(error_line(self.path, content.faults))
        class_names = sorted({label for labels in content.rows.labels for label in labels})
        splits = {
            split: _samples(rows, split, class_names, content) for split, rows in parts.items()
        }
        has_images = np.array([part.targets.counts() > 0 for part in splits.values()])
        faults = [describe(self.path, fault) for fault in content.faults]
        skipped = SkippedFiles(skip_unreadable=True, rows=faults)
        listing = listing_of(content.root, splits, class_names, has_images, skipped)
        if content.kind == "several":
            listing = with_label_sets(listing, splits)
        return replace(listing, table=str(self.path))

    def _class_names(self, content: TableContent, parts: dict[str, TableRows]) -> list[str]:
        """Return the classes of the training images, sorted."""
        check_names_exist("--data.exclude", self.options.exclude, content.original_names)
        check_names_exist("--data.merge", self.options.merge, content.original_names)
        rows = parts.get("train", parts.get("all"))
        if rows is None:
            others = " and ".join(map(repr, parts))
            what = f"has rows of {others} but none of 'train'" if others else "has no images"
            raise ValueError(f"{self.path} {what}; add the training images")
        names = sorted({label for labels in rows.labels for label in labels})
        if len(names) < 2:
            only = f"only the class {names[0]!r}" if names else "no class"
            raise ValueError(f"{self.path} has {only}; a classifier needs at least two")
        if unused := sorted(set(content.declared) - set(names)):
            raise ValueError(
                f"{self.path} has no training image of the label {unused[0]}: "
                "no row that is trained on has 1 in its column; "
                f"add some, or skip it with --data.exclude {shlex.quote(unused[0])}"
            )
        return names

    def _check_known(self, rows: TableRows, class_names: Sequence[str], column: str) -> None:
        """Refuse labels that are not among the classes."""
        known = set(class_names)
        for row, labels in enumerate(rows.labels):
            unknown = [label for label in labels if label not in known]
            if unknown:
                classes = ", ".join(class_names)
                text = f"{unknown[0]!r} is not in the training classes {classes}"
                fault = Fault(row, rows.lines[row], column, text)
                name = shlex.quote(unknown[0])
                hint = f"correct it, or skip the class with --data.exclude {name}"
                raise ValueError(f"{describe(self.path, fault)}; {hint}")


def _by_split(rows: TableRows) -> dict[str, TableRows]:
    """Return the rows of each split that has some."""
    indices: dict[str, list[int]] = {}
    for i, split in enumerate(rows.splits):
        indices.setdefault(split, []).append(i)
    return {split: rows.take(indices[split]) for split in _SPLITS if split in indices}


def _samples(
    rows: TableRows, split: str, class_names: Sequence[str], content: TableContent
) -> Samples:
    """Return the images of a split, sorted as in class folders: by class, then by name; of several labels by name."""
    folder = "" if content.root == "." else content.root
    index_of = {name: k for k, name in enumerate(class_names)}
    is_single = content.kind == "single"
    prefix = os.path.join(folder, "")
    order = _sorted_rows([path.removeprefix(prefix) for path in rows.paths])
    if is_single:
        order.sort(key=lambda row: index_of[rows.labels[row][0]])
    rows = rows.take(order)
    targets: Targets
    if is_single:
        classes = np.array([index_of[labels[0]] for labels in rows.labels], np.int64)
        targets = ClassIndex(classes, len(class_names))
    else:
        has_label = np.zeros((len(rows), len(class_names)), np.uint8)
        for i, of_row in enumerate(rows.labels):
            has_label[i, [index_of[label] for label in of_row]] = 1
        targets = MultiHot(has_label)
    return Samples(
        PathList(rows.paths),
        targets,
        origin="" if split == "all" else f"its rows of split {split}",
        folder=folder,
        stats=rows.stats,
        groups=None if rows.groups is None else group_ids(rows.groups),
        weights=rows.weights,
    )


def _sorted_rows(names: Sequence[str]) -> list[int]:
    """Return the indices of names in the order in which `walk.find_images` lists them: by their parts, composed."""
    if all(map(str.isascii, names)):
        # the same, but much faster: no part of a path has a zero byte
        keys: list[Any] = [name.replace("/", "\0") for name in names]
    else:
        keys = [tuple((composed(part), part) for part in name.split("/")) for name in names]
    return sorted(range(len(names)), key=keys.__getitem__)
