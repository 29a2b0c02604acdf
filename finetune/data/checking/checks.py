"""Checks of the files and the classes of a data set."""

import re
import unicodedata
from collections import Counter
from collections.abc import Callable, Iterator

import numpy as np

from finetune.data.checking.duplicates import is_blank
from finetune.data.checking.findings import Finding, Level, Row
from finetune.data.checking.image_facts import Facts
from finetune.data.data_set import DataSet
from finetune.system.file_names import composed
from finetune.system.messages import counted

# longer over shorter side, from which on a central square crop removes half of the image or more
_WIDE = 2.0
_FEW = 10  # images per class
_UNEQUAL = 5.0  # ratio of the images of the largest and the smallest class
# pixels of the shorter side, and share of its median
_SMALL = 64
_SMALL_SHARE = 0.5
_USUAL_MODES = ("", "RGB", "L")


def file_findings(facts: Facts) -> Iterator[Finding]:
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
            yield Finding(kind, level, f"{counted(len(rows), 'image')} {title}", advice, rows)

    def pixels(i: int) -> str:
        height, width = facts.sizes[i]
        return f"{width} x {height}"

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
        "of one colour, or nearly black",
        "They teach nothing about the class. Remove them; dark ones of 16 bits may use fewer bits than "
        "their files state.",
        blank,
        lambda i: (f"mean brightness {brightness[i]:.0f} of 255", 255 - brightness[i]),
    )
    ratios = np.maximum(facts.aspects, 1 / facts.aspects)
    yield from image_findings(
        "wide_or_tall",
        "note",
        "so wide or tall that half is cropped",
        "Evaluation crops the square in the middle. fit --data.resize pad pads images to a square, and loses nothing.",
        readable & (ratios >= _WIDE),
        lambda i: (f"{pixels(i)}: {100 - 100 / ratios[i]:.0f} % is cropped", ratios[i]),
    )
    odd = readable & ~np.isin(facts.modes, _USUAL_MODES)
    if np.count_nonzero(odd) <= len(odd) / 2:  # otherwise the mode is normal for this data set
        yield from image_findings(
            "odd_mode",
            "note",
            "neither in plain colour nor in grey",
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
        f"smaller than {limit:.0f} pixels, far below the others",
        "Enlarging blurs them; they may be thumbnails that were saved instead of the images.",
        readable & (shorter < limit),
        lambda i: (f"{pixels(i)} pixels", -float(shorter[i])),
    )


def scan_findings(data: DataSet) -> Iterator[Finding]:
    """Yield what is wrong with the data set as a fit sees it, and what was skipped."""
    if data.faults:
        rows = [Row([], fault.advice()) for fault in data.faults]
        advice = "It ends with the first of them."
        if any(fault.can_skip for fault in data.faults):
            advice += " --data.on_bad_image skip leaves out rows and folders that are faulty."
        title = f"{counted(len(rows), 'fault')} for which fit refuses the data set"
        yield Finding("faults", "bad", title, advice, rows)
    if data.notes:
        rows = [Row([], note) for note in data.notes]
        title = f"{counted(len(rows), 'note')} on files, folders and columns"
        yield Finding("notes", "warning", title, "fit logs the same.", rows)


def class_findings(data: DataSet) -> Iterator[Finding]:
    """Yield the findings about classes, by the numbers of their images only."""
    counts = data.counts()
    names = data.class_names
    splits = list(data.splits)
    first = splits.index("train") if "train" in splits else 0  # the training split

    def findings_of_classes(
        kind: str, level: Level, title: str, advice: str, notes: list[tuple[str, float]]
    ) -> Iterator[Finding]:
        if notes:
            yield Finding(
                kind, level, title, advice, [Row([], note, value) for note, value in notes]
            )

    lone = [
        (f"{names[c]} is not in {splits[k]}", 0.0)
        for k, c in np.argwhere(counts == 0).tolist()
        if k != first and counts[first, c]
    ]
    yield from findings_of_classes(
        "one_split",
        "bad",
        f"{counted(len(lone), 'class', 'classes')} not in all splits",
        "A class without images in a split is not evaluated there.",
        lone,
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
