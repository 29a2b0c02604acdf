"""Checks of the files and the classes of a data set, and those that every fit does before it starts."""

import re
import unicodedata
from collections import Counter
from collections.abc import Callable, Iterator, Sequence

import numpy as np

from finetune.data.checking.copies import duplicate_findings, is_blank
from finetune.data.checking.findings import Finding, Level, Row, worst_first
from finetune.data.checking.image_facts import Facts
from finetune.data.data_set import DataSet
from finetune.data.file_facts import UNKNOWN, equal_files
from finetune.system.messages import counted, shown

# longer over shorter side, from which on a central square crop removes half of the image or more
_WIDE = 2.0
_FEW = 10  # images per class
_UNEQUAL = 5.0  # ratio of the images of the largest and the smallest class
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
    brightness = facts.brightness
    yield from image_findings(
        "blank",
        "warning",
        "of one colour, or nearly black",
        "They teach nothing about the class. Remove them; dark ones of 16 bits may use fewer bits than "
        "their files state.",
        is_blank(facts),
        lambda i: (f"mean brightness {brightness[i]:.0f} of 255", 255 - brightness[i]),
    )
    ratios = np.maximum(facts.aspects, 1 / facts.aspects)

    def about_crop(i: int) -> tuple[str, float]:
        height, width = facts.sizes[i]
        return f"{width} x {height}: {100 - 100 / ratios[i]:.0f} % is cropped", ratios[i]

    yield from image_findings(
        "wide_or_tall",
        "note",
        "so wide or tall that half is cropped",
        "Evaluation crops the square in the middle. fit --data.resize pad pads images to a square, and loses nothing.",
        readable & (ratios >= _WIDE),
        about_crop,
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
    lone = [
        Row([], f"{names[c]} is not in {splits[k]}")
        for k, c in np.argwhere(counts == 0).tolist()
        if k != first and counts[first, c]
    ]
    if lone:
        title = f"{counted(len(lone), 'class', 'classes')} not in all splits"
        advice = "A class without images in a split is not evaluated there."
        yield Finding("one_split", "bad", title, advice, lone)
    plain: dict[str, list[str]] = {}
    for name in names:
        folded = re.sub(r"[\W_]", "", unicodedata.normalize("NFKC", name).casefold()) or name
        plain.setdefault(folded, []).append(repr(name))
    if alike := [Row([], " and ".join(same)) for same in plain.values() if len(same) > 1]:
        classes = counted(len(alike), "class", "classes")
        title = f"{classes} whose names differ only by case, spaces or signs"
        advice = "Each folder becomes a separate class. Merge them."
        yield Finding("alike_names", "bad", title, advice, alike)
    trained = Counter({names[c]: num for c, num in enumerate(counts[first].tolist()) if num})
    few = sorted((num, name) for name, num in trained.items() if num < _FEW)
    if few:
        yield Finding(
            "tiny_class",
            "warning",
            f"{counted(len(few), 'class', 'classes')} with fewer than {_FEW} images to train on",
            "They are too few to generalise, and a validation split of 10 % holds one or none.",
            [Row([], f"{name}: {counted(num, 'image')}", -num) for num, name in few],
        )
    by_size = trained.most_common()
    if len(by_size) > 1 and by_size[0][1] >= _UNEQUAL * by_size[-1][1]:
        (most, num_most), (least, num_least) = by_size[0], by_size[-1]
        yield Finding(
            "unequal_classes",
            "note",
            f"classes are unequal: {num_most:,} images of {most}, {num_least:,} of {least}",
            "An uncertain network predicts the frequent class. fit --model.class_weights balanced gives all classes "
            "the same weight; results by class are in test.json.",
            [Row([], f"{name}: {num:,}", num) for name, num in by_size],
        )


def first_look(data: DataSet) -> list[Finding]:
    """Check the images of a fit before it starts. Return the findings, worst first.

    `finetune check` does more. Files are those that the fit looks at for its record of seen images, so files in object
    storage are not checked: they are copied during the first epoch.
    """
    findings: list[Finding] = []
    if not any(samples.has_remote_files() for samples in data.splits.values()):
        facts = [samples.look() for samples in data.splits.values()]
        is_broken = ~np.concatenate([part.are_images for part in facts])
        digests = np.concatenate([part.digests for part in facts])
        digests[is_broken] = UNKNOWN  # error pages do not count as copies of each other
        findings += duplicate_findings(data, equal_files(digests, data.split_of), [])
        note = "the file is empty, or does not begin like an image"
        rows = [Row([i], note) for i in np.flatnonzero(is_broken).tolist()]
        if rows:
            title = f"{counted(len(rows), 'image')} cannot be read"
            advice = "fit stops at the first of them, or skips them."
            findings.append(Finding("unreadable", "bad", title, advice, rows))
    if data.label_kind == "single":
        findings += class_findings(data)
    return worst_first(findings)


def faulty_files(data: DataSet, findings: Sequence[Finding]) -> str:
    """Return one line about faulty files, "" if there are none. `overview` reports small classes."""
    rows = {finding.kind: finding.rows for finding in findings}
    faults = []
    if leaks := rows.get("leak_exact"):
        first = leaks[0].images
        pair = " and ".join(shown(data.paths[i]) for i in (first[0], first[-1]))
        num = sum(len(row.images) for row in leaks)
        faults.append(f"{num} are in two splits, for example {pair}")
    if broken := rows.get("unreadable"):
        example = shown(data.paths[broken[0].images[0]])
        faults.append(f"{len(broken)} cannot be read, for example {example}")
    hint = f"(finetune check {shown(data.place)} lists them)"
    return f"of the images, {', and '.join(faults)} {hint}" if faults else ""
