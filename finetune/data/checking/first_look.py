"""The fast checks at the start of a fit: unreadable images, images in two splits, and small classes.

`finetune check` does more. These checks use the look at each file that a fit takes for its record of seen images. In
object storage 200 files are opened, since each is a request, and equal files are those of equal ETag. Without ETags
pieces of each file are requested.
"""

from collections.abc import Sequence

import numpy as np

from finetune.data.checking.checks import class_findings
from finetune.data.checking.findings import Finding, Row, duplicate_findings, worst_first
from finetune.data.data_set import DataSet
from finetune.data.file_facts import equal_files, look_at, look_at_heads
from finetune.data.mirror import listed
from finetune.system.messages import counted, shown

_NUM_REQUESTED = 200  # files of a bucket that are opened, evenly spaced


def first_look(data: DataSet) -> list[Finding]:
    """Check the images of a fit before it starts. Return the findings, worst first."""
    paths = data.paths
    tagged = np.flatnonzero([*map(_has_e_tag, paths)])
    if len(tagged):
        stats = [split.load_stats() for split in data.splits.values()]
        contents = np.concatenate([part.times[:, 1] for part in stats]).view(np.uint64)
        is_broken = np.concatenate([part.sizes for part in stats]) == 0
        places = np.linspace(0, len(tagged) - 1, min(_NUM_REQUESTED, len(tagged))).astype(int)
        opened = tagged[places]
        is_broken[opened] |= ~look_at_heads([paths[i] for i in opened.tolist()])
        others = np.setdiff1d(np.arange(len(paths)), tagged)
        look = look_at([paths[i] for i in others.tolist()])
        contents[others] = look.digests
        is_broken[others] = ~look.are_images
    else:
        facts = [split.look() for split in data.splits.values()]
        contents = np.concatenate([part.digests for part in facts])
        is_broken = ~np.concatenate([part.are_images for part in facts])
    contents[is_broken] = 0  # error pages do not count as copies of each other
    findings = duplicate_findings(data, equal_files(contents, data.split_of), [])
    if is_broken.any():
        note = "the file is empty, or does not begin like an image"
        rows = [Row([i], note) for i in np.flatnonzero(is_broken).tolist()]
        title = f"{counted(len(rows), 'image')} cannot be read"
        advice = "fit stops at the first of them, or skips them."
        findings.append(Finding("unreadable", "bad", title, advice, rows))
    if data.label_kind == "single":
        findings += class_findings(data)
    return worst_first(findings)


def _has_e_tag(path: str) -> bool:
    try:
        item = listed(path)
    except FileNotFoundError:
        return False
    return item is not None and item.e_tag is not None


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
