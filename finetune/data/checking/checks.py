"""Checks of the files and the classes of a data set."""

import re
import unicodedata
from collections import Counter
from collections.abc import Callable, Iterator

import numpy as np

from finetune.data.checking.duplicates import is_blank
from finetune.data.checking.findings import Finding, Level, Row
from finetune.data.checking.image_facts import Facts
from finetune.data.datasets.listing import Listing
from finetune.system.file_names import composed
from finetune.system.messages import counted, why_name_is_invalid

# longer over shorter side, from which on a central square crop removes half of the image or more
_WIDE = 2.0
_FEW = 10  # images per class
_UNEQUAL = 5.0  # ratio of the images of the largest and the smallest class
# pixels of the shorter side, and share of its median
_SMALL = 64
_SMALL_SHARE = 0.5
_USUAL_MODES = {"RGB", "L"}


def file_findings(listing: Listing, facts: Facts) -> Iterator[Finding]:
    """Yield the findings about single files."""

    def image_findings(
        kind: str,
        level: Level,
        title: str,
        advice: str,
        wrong: np.ndarray,
        note: Callable[[int], tuple[str, float]],
    ) -> Iterator[Finding]:
        rows = [Row([i], *note(i)) for i in np.flatnonzero(wrong).tolist()]
        if rows:
            rows.sort(key=lambda row: -row.value)
            words = title if len(rows) > 1 else _singular(title)
            yield Finding(kind, level, f"{counted(len(rows), 'image')} {words}", advice, rows)

    readable = facts.is_readable
    yield from image_findings(
        "unreadable",
        "bad",
        "cannot be read",
        "fit stops at the first of them, or skips them with --data.on_bad_image skip. Download them again, or remove "
        "them: a file that begins with < is a web page that was downloaded instead.",
        ~readable,
        lambda i: (facts.errors[i], 0),
    )
    blank = is_blank(facts)
    brightness = facts.brightness
    yield from image_findings(
        "blank",
        "warning",
        "show nothing: one colour, or nearly black",
        "They teach nothing about the class. Remove them; dark ones of 16 bits may use fewer bits than "
        "their files state.",
        blank,
        lambda i: (f"mean brightness {brightness[i]:.0f} of 255", 255 - brightness[i]),
    )
    ratios = np.maximum(facts.aspects, 1 / facts.aspects)
    yield from image_findings(
        "wide_or_tall",
        "note",
        "are so wide or tall that half of them is cropped",
        "Evaluation crops the square in the middle. fit --data.resize pad pads images to a square, and loses nothing.",
        readable & (ratios >= _WIDE),
        lambda i: (f"{_ratio(facts, i)}: {100 - 100 / ratios[i]:.0f} % is cropped", ratios[i]),
    )
    odd = (
        np.array([bool(mode) and mode not in _USUAL_MODES for mode in facts.modes], bool) & readable
    )
    if np.count_nonzero(odd) <= len(odd) / 2:  # otherwise the mode is normal for this data set
        yield from image_findings(
            "odd_mode",
            "note",
            "are neither plain colour nor grey",
            "CMYK loses its colour profile, transparency becomes white, of 16 bits the upper 8 are used, and of "
            "several frames the first. If one class has all of them, they reveal the class.",
            odd,
            lambda i: (facts.modes[i], 0),
        )
    shorter = facts.sizes.min(axis=1)
    limit = min(_SMALL, _SMALL_SHARE * float(np.median(shorter[readable])) if readable.any() else 0)
    yield from image_findings(
        "small",
        "note",
        f"are smaller than {limit:.0f} pixels, far below the others",
        "Enlarging blurs them; they may be thumbnails that were saved instead of the images.",
        readable & (shorter < limit),
        lambda i: (f"{facts.sizes[i][1]} x {facts.sizes[i][0]} pixels", -float(shorter[i])),
    )


def _singular(title: str) -> str:
    words = {
        "are ": "is ",
        "have ": "has ",
        "decode ": "decodes ",
        "show ": "shows ",
        "their suffix": "its suffix",
        "half of them": "half of it",
    }
    for plural, singular in words.items():
        title = title.replace(plural, singular)
    return title


def _ratio(facts: Facts, i: int) -> str:
    height, width = facts.sizes[i]
    return f"{width} x {height}"


def folder_findings(listing: Listing) -> Iterator[Finding]:
    """Yield the findings about files, folders and rows of a table that are skipped."""
    skipped = listing.skipped
    if skipped.rows:
        yield Finding(
            "table_rows",
            "bad",
            f"{counted(len(skipped.rows), 'fault')} in the rows of the table",
            "fit refuses the table, or skips these rows with --data.on_bad_image skip.",
            [Row([], text) for text in skipped.rows],
        )
    if skipped.unread:
        title = (
            f"{counted(len(skipped.unread), 'folder or link', 'folders or links')} cannot be read"
        )
        yield Finding(
            "unread",
            "bad",
            title,
            "Their contents are unknown.",
            [Row([], text) for text in skipped.unread],
        )
    loose = [
        Row([], f"{counted(num, 'image')} in {folder}", num)
        for folder, num in skipped.loose.items()
    ]
    if loose:
        title = f"{counted(sum(skipped.loose.values()), 'image')} in no class folder"
        yield Finding(
            "loose", "warning", title, "They are skipped: an image's folder is its class.", loose
        )
    kinds = [
        Row([], f"{counted(num, 'file')} {s or 'without a suffix'}", num)
        for s, num in skipped.suffixes.most_common()
    ]
    if kinds:
        title = f"{counted(skipped.suffixes.total(), 'file')} of types that are not read as images"
        yield Finding(
            "other_files", "note", title, "If images are among them, convert them.", kinds
        )


def class_findings(listing: Listing) -> Iterator[Finding]:
    """Yield the findings about classes, by the folders only."""
    counts = listing.counts()
    names = listing.class_names
    splits = listing.splits
    first = splits.index("train") if "train" in splits else 0  # the training split

    def findings_of_classes(
        kind: str, level: Level, title: str, advice: str, notes: list[tuple[str, float]]
    ) -> Iterator[Finding]:
        if notes:
            yield Finding(
                kind, level, title, advice, [Row([], note, value) for note, value in notes]
            )

    if len(names) == 1:
        yield Finding(
            "one_class",
            "bad",
            f"there is only the class {names[0]!r}",
            "A classifier needs at least two.",
        )
    odd = [
        (name.encode("utf-8", "surrogateescape"), reason)
        for name in names
        if (reason := why_name_is_invalid(name))
    ]
    yield from findings_of_classes(
        "odd_name",
        "bad",
        f"{counted(len(odd), 'class folder')} whose name fit refuses",
        "Rename them: metrics, results and checkpoints need names that are one line of text.",
        [(f"{name!r} {reason}", 0) for name, reason in odd],
    )
    empty = [(s, c) for s, c in np.argwhere(listing.folders & (counts == 0)).tolist()]
    yield from findings_of_classes(
        "empty_class",
        "bad",
        f"{counted(len(empty), 'class folder')} without an image",
        "fit refuses a class without training images, and cannot evaluate one without images in another split.",
        [(_in_split(names[c], splits[s]), 0) for s, c in empty],
    )
    if len(splits) > 1:
        lone = [c for c in range(len(names)) if np.count_nonzero(listing.folders[:, c]) == 1]
        untrained = [
            c for c in range(len(names)) if not listing.folders[first, c] and c not in lone
        ]
        yield from findings_of_classes(
            "one_split",
            "bad",
            f"{counted(len(lone) + len(untrained), 'class', 'classes')} not in all splits",
            "fit refuses a class that is not in training; one that is only in training is never evaluated.",
            [
                *(
                    (f"{names[c]} is in {splits[int(listing.folders[:, c].argmax())]} alone", 0)
                    for c in lone
                ),
                *((f"{names[c]} is not in {splits[first]}", 0) for c in untrained),
            ],
        )
    plain: dict[str, list[str]] = {}
    for name in names:
        folded = re.sub(r"[\W_]", "", unicodedata.normalize("NFKC", name).casefold()) or name
        plain.setdefault(folded, []).append(name)
    alike = [" and ".join(map(_distinct_repr, same)) for same in plain.values() if len(same) > 1]
    yield from findings_of_classes(
        "alike_names",
        "bad",
        f"{counted(len(alike), 'class', 'classes')} whose names differ only by case, spaces or signs",
        "Each folder becomes a separate class. Merge them.",
        [(text, 0) for text in alike],
    )
    trained = {names[c]: int(counts[first, c]) for c in range(len(names)) if counts[first, c]}
    few = sorted((num, name) for name, num in trained.items() if num < _FEW)
    yield from findings_of_classes(
        "tiny_class",
        "warning",
        f"{counted(len(few), 'class', 'classes')} with fewer than {_FEW} images to train on",
        "They are too few to generalise, and a validation split of 10 % holds one or none.",
        [(f"{name}: {counted(num, 'image')}", -num) for num, name in few],
    )
    if len(trained) > 1 and max(trained.values()) >= _UNEQUAL * min(trained.values()):
        most, least = (pick(trained, key=trained.__getitem__) for pick in (max, min))
        yield from findings_of_classes(
            "unequal_classes",
            "note",
            f"classes are unequal: {trained[most]:,} images of {most}, {trained[least]:,} of {least}",
            "An uncertain network predicts the frequent class. fit --model.class_weights balanced gives all classes "
            "the same weight; results by class are in test.json.",
            [(f"{name}: {num:,}", num) for name, num in Counter(trained).most_common()],
        )


def _distinct_repr(name: str) -> str:
    return repr(name) if name == composed(name) else ascii(name)


def _in_split(name: str, split: str) -> str:
    return name if split == "all" else f"{name} in {split}"
