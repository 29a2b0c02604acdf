"""The findings of a check as files: a page to look at, JSON for programs, and lists of files for other tools."""

import json
import os
from collections.abc import Iterator, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from finetune.data.checking.findings import LEVELS, Finding, as_plain
from finetune.data.checking.image_facts import small_copy
from finetune.data.data_set import DataSet
from finetune.data.image_files import absolute_path
from finetune.data.mirror import map_files
from finetune.data.splits import data_set_name
from finetune.system.files import replace_text, replacing
from finetune.system.html_page import link_to, render, thumbnail
from finetune.system.machine import num_cores
from finetune.system.messages import shown

# rows per finding and images per row, because the page embeds all thumbnails
_MAX_ROWS = 100
_MAX_IMAGES = 8
_SIDE = 144  # pixels of a thumbnail's longer side
_MAX_THREADS = 16


def write_page(
    path: Path, data: DataSet, findings: Sequence[Finding], seconds: float, network: str = ""
) -> None:
    """Write check.html: each finding with thumbnails of its images. For `network` see `write_json`."""
    wanted = sorted(
        {i for f in findings for row in f.rows[:_MAX_ROWS] for i in row.images[:_MAX_IMAGES]}
    )

    def shrink(path: str) -> str | None:
        copy = small_copy(path, _SIDE)
        return None if copy is None else thumbnail(copy, _SIDE)

    def describe(i: int, address: str | None) -> dict[str, Any]:
        place = f"{data.split_name(i)}: " if data.has_splits else ""
        return {
            "address": address,
            "link": link_to(data.paths[i], path),
            "name": data.name(i),
            "place": place + data.set_names[data.set_of[i]],
        }

    thumbnails = map_files(shrink, [data.paths[i] for i in wanted], min(num_cores(), _MAX_THREADS))
    images = {i: describe(i, address) for i, address in zip(wanted, thumbnails, strict=True)}
    text = render(
        "reports/check.html",
        title=f"{shown(data_set_name(data.place))}: data check",
        summary=list(_summary(data, seconds)),
        findings=findings,
        images=images,
        levels=LEVELS,
        max_rows=_MAX_ROWS,
        max_images=_MAX_IMAGES,
        class_names=data.class_names,
        counts=[
            ("images" if split == "all" else split, dict(zip(data.class_names, row, strict=True)))
            for split, row in zip(data.splits, data.counts().tolist(), strict=True)
        ],
        network=network,
    )
    replace_text(path, text)


def _summary(data: DataSet, seconds: float) -> Iterator[tuple[str, str]]:
    """Yield names and values for the head of the page."""
    yield "date", datetime.now().isoformat(" ", "minutes")
    of_splits = [
        f"{num:,} {split}"
        for split, num in zip(data.splits, data.counts().sum(axis=1).tolist(), strict=True)
    ]
    parts = f" ({', '.join(of_splits)})" if [*data.splits] != ["all"] else ""
    yield "images", f"{len(data.paths):,}{parts}"
    yield "classes", f"{len(data.class_names):,}"
    yield "folder", data.place
    yield "time", f"{seconds:.1f} s"


def write_json(path: Path, data: DataSet, findings: Sequence[Finding], network: str = "") -> None:
    """Write check.json: all rows of all findings, the data set, the date and the network. See `as_plain`.

    Args:
        path: The file.
        data: The data set.
        findings: The findings.
        network: Description of the network whose features were used to rank labels; "" for none.
    """
    content = {
        "root": absolute_path(data.place),
        "date": datetime.now().isoformat(" ", "minutes"),
        "network": network,
        "num_images": len(data.paths),
        "classes": data.class_names,
        "counts": {
            split: row.tolist() for split, row in zip(data.splits, data.counts(), strict=True)
        },
        "findings": as_plain(findings, data),
    }
    # ASCII: bytes that are not UTF-8 stay as escapes
    replace_text(path, json.dumps(content, indent=1) + "\n")


def write_lists(folder: Path, data: DataSet, findings: Sequence[Finding]) -> int:
    """Write KIND.txt for each finding with files: one path per line, and an empty line between sets.

    Returns:
        Number of files that could not be listed because of a line break in their names.
    """
    folder.mkdir(parents=True, exist_ok=True)
    num_left_out = 0
    for finding in findings:
        sets = [[absolute_path(data.paths[i]) for i in row.images] for row in finding.rows]
        num = sum(map(len, sets))
        sets = [[path for path in paths if not {"\n", "\r"} & {*path}] for paths in sets]
        num_left_out += num - sum(map(len, sets))
        between = "\n\n" if any(len(paths) > 1 for paths in sets) else "\n"
        text = between.join("\n".join(paths) for paths in sets if paths)
        if text:
            with replacing(folder / f"{finding.kind}.txt") as temporary:
                temporary.write_bytes(os.fsencode(f"{text}\n"))
    return num_left_out
