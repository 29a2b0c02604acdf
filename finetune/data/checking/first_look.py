"""The fast checks at the start of a fit: unreadable images, images in two splits, and small classes.

`finetune check` does more. These checks read the size of all files, the first bytes of up to 20,000 files, and 12 kB of
files that have the same size as one of another split. They take 2.5 CPU seconds for 100,000 files; an epoch, which
decodes all of them, takes hundreds of seconds. In object storage 200 files are opened, since each is a request, and
equal files are those of equal size and ETag.
"""

from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from finetune.data.addresses import is_in_bucket
from finetune.data.checking.checks import class_findings
from finetune.data.checking.findings import Finding, Row, as_plain, duplicate_findings, worst_first
from finetune.data.contents import equal_files, read_head
from finetune.data.data_set import DataSet
from finetune.data.decode import begins_like_image
from finetune.data.image_files import concatenate_stats, kind_of
from finetune.data.mirror import map_pieces
from finetune.system.messages import counted, shown

_NUM_OPENED = 20_000  # takes about a second; of more files evenly spaced ones are opened
_NUM_REQUESTED = 200  # the same of a bucket
_NUM_KEPT = 5  # examples of each kind in about.json


@dataclass(frozen=True)
class FirstLook:
    """The result of the fast checks.

    Attributes:
        data: The data set.
        num_files: Number of images that are files.
        num_opened: Number of files whose first bytes were read.
        findings: The findings, worst first.
    """

    data: DataSet
    num_files: int
    num_opened: int
    findings: list[Finding]

    def line(self) -> str:
        """Return one line about faulty files, "" if there are none. `overview` reports small classes."""
        rows = {finding.kind: finding.rows for finding in self.findings}
        faults = []
        if leaks := rows.get("leak_exact"):
            first = leaks[0].images
            pair = " and ".join(shown(self.data.paths[i]) for i in (first[0], first[-1]))
            faults.append(
                f"{sum(len(row.images) for row in leaks)} are in two splits, for example {pair}"
            )
        if broken := rows.get("unreadable"):
            faults.append(
                f"{len(broken)} cannot be read, for example {shown(self.data.paths[broken[0].images[0]])}"
            )
        hint = f"(finetune check {shown(self.data.place)} lists them)"
        return f"of the images, {', and '.join(faults)} {hint}" if faults else ""

    def plain(self) -> dict[str, Any]:
        """Return the result for about.json, with some examples of each kind."""
        findings = as_plain(self.findings, self.data, _NUM_KEPT)
        return {"num_files": self.num_files, "num_opened": self.num_opened, "findings": findings}


def first_look(data: DataSet) -> FirstLook:
    """Check the images of a fit before it starts."""
    data = replace(data)  # its lists of all images are freed with it, and not kept during the fit
    paths = data.paths
    stats = concatenate_stats([split.load_stats() for split in data.splits.values()])
    sizes = np.where(stats.is_regular, stats.sizes, -1)
    lost = [i for i in np.flatnonzero(stats.sizes < 0).tolist() if kind_of(paths[i]) == "link"]
    sizes[lost] = 0  # dangling links count as empty files
    files = np.flatnonzero(sizes >= 0)
    is_remote = len(paths) > 0 and is_in_bucket(paths[0])
    num_opened = min(_NUM_REQUESTED if is_remote else _NUM_OPENED, len(files))
    opened = files[np.linspace(0, len(files) - 1, num_opened).astype(int)]
    are_images = map_pieces(_is_image, (paths[i] for i in opened.tolist()))
    is_image = np.fromiter(are_images, bool, len(opened))
    broken = np.union1d(files[sizes[files] == 0], opened[~is_image])
    unreadable = _unreadable_finding(broken, sizes)
    sizes[broken] = -1  # empty files and error pages do not count as copies of each other
    versions = stats.times[:, 1] if is_remote else None
    findings = duplicate_findings(data, equal_files(paths, sizes, data.split_of, versions), [])
    if len(broken):
        findings.append(unreadable)
    if data.label_kind == "single":
        findings += class_findings(data)
    return FirstLook(data, len(files), len(opened), worst_first(findings))


def _unreadable_finding(broken: np.ndarray, sizes: np.ndarray) -> Finding:
    """Return the finding about broken files, from their indices and the size of each file of the data set."""
    rows = []
    for i in broken.tolist():
        is_empty = sizes[i] == 0
        rows.append(
            Row([i], "the file is empty" if is_empty else "it does not begin like an image file")
        )
    title = f"{counted(len(rows), 'image')} cannot be read"
    return Finding(
        "unreadable", "bad", title, "fit stops at the first of them, or skips them.", rows
    )


def _is_image(path: str) -> bool:
    try:
        return begins_like_image(read_head(path))
    except OSError:
        return False
