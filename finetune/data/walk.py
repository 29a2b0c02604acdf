"""The search for image files in a folder and its subfolders, and the files that it skips."""

import os
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from finetune.data.addresses import real_place
from finetune.data.data_place import RUNS_MARK
from finetune.data.decode import IMAGE_SUFFIXES
from finetune.data.faults import Fault
from finetune.data.heif import heic_advice
from finetune.data.image_files import Entry, entries, kind_of
from finetune.data.mirror import original
from finetune.system.file_names import composed
from finetune.system.messages import counted

# Suffixes of files that accompany images in many data sets. They are skipped without a warning.
_HARMLESS = {
    ".csv",
    ".db",
    ".html",
    ".ini",
    ".json",
    ".jsonl",
    ".log",
    ".md",
    ".npy",
    ".npz",
    ".py",
    ".tsv",
    ".txt",
    ".xml",
    ".yaml",
    ".yml",
}


@dataclass
class Skipped:
    """The files and folders that a search has skipped.

    Attributes:
        faults: Folders that cannot be read, and links to nothing in place of folders.
        suffixes: Number of files of other types, by suffix.
        loose: Number of images outside of class folders, by folder.
    """

    faults: list[Fault] = field(default_factory=list)
    suffixes: Counter[str] = field(default_factory=Counter)
    loose: Counter[str] = field(default_factory=Counter)

    def look_beside(self, folder: str) -> None:
        """Record the images and the links to nothing that lie next to the class folders in a folder."""
        links = [entry.path for entry in _visible(folder) if entry.is_link]
        self.faults += [missing_file(link) for link in links if kind_of(link) == "link"]
        if num := num_loose(folder):
            self.loose[folder] = num

    def supported(self) -> str:
        """Return which files are images, and what to install to read more of the skipped ones."""
        return f"supported are {' '.join(sorted(IMAGE_SUFFIXES))}{heic_advice(self.suffixes)}"

    def notes(self, root: str) -> list[str]:
        """Return what was skipped, a line per kind, most frequent suffixes first."""
        notes = []
        if self.suffixes:
            kinds = ", ".join(
                f"{num} {suffix or 'without a suffix'}"
                for suffix, num in self.suffixes.most_common(8)
            )
            more = ", ..." if len(self.suffixes) > 8 else ""
            notes.append(
                f"skipped in {original(root)}, not images: {kinds}{more}; {self.supported()}"
            )
        for folder, num in self.loose.items():
            notes.append(
                f"skipped {counted(num, 'image')} outside of class folders, in {original(folder)}"
            )
        return notes


def missing_file(path: str, exists: bool = False) -> Fault:
    """Return the fault of a path that is no file, and may be a folder or a pipe."""
    text = "it does not exist"
    if exists:
        text = "it is not a file"
    elif os.path.islink(path):
        text = "the target of this link does not exist"
    return Fault(path, text, can_skip=True)


def find_images(folder: str, skipped: Skipped, parents: Sequence[str] = ()) -> Iterator[str]:
    """Yield the image files in `folder` and its subfolders, sorted by path. Hidden files and runs are skipped.

    Args:
        folder: The folder.
        skipped: Collects the files and folders that are skipped.
        parents: Real paths of the parent folders in this search.
    """
    try:
        visible = _visible(folder)
    except OSError as error:
        skipped.faults.append(Fault(folder, error.strerror or str(error), can_skip=True))
        return
    parents = [*parents, real_place(folder)]
    for entry in visible:
        if entry.is_folder:
            if holds_runs(entry.path):
                continue
            if entry.is_link and _is_above(real_place(entry.path), parents):
                text = "it is a link to a folder that it lies in"
                skipped.faults.append(Fault(entry.path, text, "remove it", can_skip=True))
                continue
            yield from find_images(entry.path, skipped, parents)
        elif is_image_file(entry.name):
            yield entry.path
        elif (suffix := os.path.splitext(entry.name)[1].lower()) not in _HARMLESS:
            skipped.suffixes[suffix] += 1


def num_loose(folder: str) -> int:
    """Return the number of images in `folder` itself, without subfolders."""
    visible = _visible(folder)
    return sum(is_image_file(entry.name) and not entry.is_folder for entry in visible)


def holds_runs(folder: str) -> bool:
    """Return whether `folder` is marked as one of runs of `finetune`, or has such folders only: no images are data."""
    if kind_of(os.path.join(folder, RUNS_MARK)) == "file":
        return True
    is_empty = True
    try:
        for entry in entries(folder):
            if entry.name.startswith("."):
                continue
            if not entry.is_folder or entry.is_link or not holds_runs(entry.path):
                return False
            is_empty = False
    except OSError:  # reported when its images are read
        return False
    return not is_empty


def is_image_file(name: str) -> bool:
    """Return whether a file name has the suffix of an image."""
    return os.path.splitext(name)[1].lower() in IMAGE_SUFFIXES


def _visible(folder: str) -> Sequence[Entry]:
    visible = [entry for entry in entries(folder) if not entry.name.startswith(".")]
    # The order, and so the fingerprint, must not depend on the Unicode composition of names in the file system.
    return sorted(visible, key=lambda entry: (composed(entry.name), entry.name))


def _is_above(target: str, folders: Sequence[str]) -> bool:
    return any(os.path.join(folder, "").startswith(os.path.join(target, "")) for folder in folders)
