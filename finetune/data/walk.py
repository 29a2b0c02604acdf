"""The search for image files in a folder and its subfolders, and the files that it skips."""

import os
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from finetune.data.addresses import real_place
from finetune.data.data_place import RUNS_MARK
from finetune.data.decode import IMAGE_SUFFIXES
from finetune.data.faults import Fault
from finetune.data.heif import heic_advice
from finetune.data.image_files import Entry, entries, kind_of
from finetune.system.file_names import composed

# Suffixes of files that accompany images in many data sets. They are skipped without a warning.
_HARMLESS = re.compile(
    r"\.(csv|db|html|ini|json|jsonl|log|md|npy|npz|py|tsv|txt|xml|yaml|yml)", re.IGNORECASE
)


@dataclass
class Skipped:
    """The files and folders that a search has skipped.

    Attributes:
        faults: Folders that cannot be read, and links to nothing in place of folders.
        suffixes: Number of files of other types, by suffix.
    """

    faults: list[Fault] = field(default_factory=list)
    suffixes: Counter[str] = field(default_factory=Counter)

    def supported(self) -> str:
        """Return which files are images, and what to install to read more of the skipped ones."""
        return f"supported are {' '.join(sorted(IMAGE_SUFFIXES))}{heic_advice(self.suffixes)}"

    def notes(self, root: str) -> list[str]:
        """Return a line about the files of other types, most frequent suffixes first."""
        if not self.suffixes:
            return []
        most = self.suffixes.most_common(8)
        kinds = ", ".join(f"{num} {suffix or 'without a suffix'}" for suffix, num in most)
        more = ", ..." if len(self.suffixes) > len(most) else ""
        return [f"skipped in {root}, not images: {kinds}{more}; {self.supported()}"]


def find_images(folder: str, skipped: Skipped, parents: Sequence[str] = ()) -> Iterator[str]:
    """Yield the image files in `folder` and its subfolders, sorted by path. Hidden files and runs are skipped.

    Args:
        folder: The folder.
        skipped: Collects the files and folders that are skipped.
        parents: Real paths of the parent folders in this search.
    """
    try:
        visible = visible_entries(folder)
    except OSError as error:
        skipped.faults.append(Fault(folder, error.strerror or str(error), can_skip=True))
        return
    parents = [*parents, os.path.join(real_place(folder), "")]
    for entry in visible:
        if entry.is_folder:
            if holds_runs(entry.path):
                continue
            target = os.path.join(real_place(entry.path), "") if entry.is_link else None
            if target and any(parent.startswith(target) for parent in parents):
                text = "it is a link to a folder that it lies in"
                skipped.faults.append(Fault(entry.path, text, "remove it", can_skip=True))
                continue
            yield from find_images(entry.path, skipped, parents)
        elif is_image_file(entry.name):
            yield entry.path
        else:
            suffix = os.path.splitext(entry.name)[1]
            if not _HARMLESS.fullmatch(suffix):
                skipped.suffixes[suffix.lower()] += 1


def holds_runs(folder: str) -> bool:
    """Return whether `folder` is marked as one of runs of `finetune`, or has such folders only: no images are data."""
    if kind_of(os.path.join(folder, RUNS_MARK)) == "file":
        return True
    try:
        visible = visible_entries(folder)
    except OSError:  # reported when its images are read
        return False
    return bool(visible) and all(
        entry.is_folder and not entry.is_link and holds_runs(entry.path) for entry in visible
    )


def visible_entries(folder: str) -> Sequence[Entry]:
    """Return the files and folders in a folder without hidden ones, sorted by name in composed Unicode.

    The order, and so the fingerprint, must not depend on the Unicode composition of names in the file system.

    Raises:
        OSError: The folder cannot be read.
    """
    visible = [entry for entry in entries(folder) if not entry.name.startswith(".")]
    return sorted(visible, key=lambda entry: (composed(entry.name), entry.name))


def is_image_file(name: str) -> bool:
    """Return whether a file name has the suffix of an image."""
    return os.path.splitext(name)[1].lower() in IMAGE_SUFFIXES
