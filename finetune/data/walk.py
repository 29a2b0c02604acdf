"""The search for image files in a folder and its subfolders, and the files that it skips."""

import logging
import os
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from finetune.data.decode import IMAGE_SUFFIXES
from finetune.data.heif import heic_advice
from finetune.system.file_names import composed

log = logging.getLogger(__name__)

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
}
_HARMLESS |= {".tsv", ".txt", ".xml", ".yaml", ".yml"}
_COMMANDS = ("fit", "validate", "test", "predict")  # commands that write runs


@dataclass
class SkippedFiles:
    """The files and folders that a search has skipped.

    Attributes:
        skip_unreadable: Skip unreadable folders, too. Otherwise they are an error.
        unread: Descriptions of the unreadable folders and links.
        suffixes: Number of files of other types, by suffix.
        loose: Number of images outside of class folders, by folder.
        rows: Descriptions of the faulty rows of a table.
    """

    skip_unreadable: bool = False
    unread: list[str] = field(default_factory=list)
    suffixes: Counter[str] = field(default_factory=Counter)
    loose: Counter[str] = field(default_factory=Counter)
    rows: list[str] = field(default_factory=list)

    def log_summary(self, root: str | Path) -> None:
        """Log what was skipped, a line per kind, most frequent suffixes first."""
        for text in self.unread:
            log.warning("skipped %s", text)
        if self.suffixes:
            kinds = ", ".join(
                f"{num} {suffix or 'without a suffix'}"
                for suffix, num in self.suffixes.most_common(8)
            )
            more = ", ..." if len(self.suffixes) > 8 else ""
            supported = " ".join(sorted(IMAGE_SUFFIXES))
            log.warning(
                "skipped in %s, not images: %s%s; supported are %s%s",
                root,
                kinds,
                more,
                supported,
                heic_advice(self.suffixes),
            )
        for folder, num in self.loose.items():
            log.warning(
                "skipped %d image%s outside of class folders, in %s",
                num,
                "s" * (num != 1),
                folder,
            )


def find_images(
    folder: str | Path, skipped: SkippedFiles | None = None, on_the_way: Sequence[str] = ()
) -> Iterator[str]:
    """Yield the image files in `folder` and its subfolders, sorted by path. Hidden files and runs are skipped.

    Args:
        folder: The folder.
        skipped: Collects the files and folders that are skipped.
        on_the_way: Real paths of the parent folders in this search.

    Raises:
        OSError: A folder cannot be read, or is a link to one of its parents.
    """
    try:
        entries = _visible(folder)
    except OSError as error:
        if skipped is None or not skipped.skip_unreadable:
            raise
        skipped.unread.append(f"the folder {folder}: {error.strerror}")
        return
    on_the_way = [*on_the_way, os.path.realpath(folder)]
    for entry in entries:
        if _is_dir(entry):
            if holds_runs(entry.path) or is_run(entry.path):
                continue
            if entry.is_symlink() and _is_above(entry.path, on_the_way):
                text = f"{entry.path} is a link to a folder that it lies in"
                if skipped is None or not skipped.skip_unreadable:
                    raise OSError(
                        f"{text}: remove it, or leave it out with --data.on_bad_image skip"
                    )
                skipped.unread.append(text)
                continue
            yield from find_images(entry.path, skipped, on_the_way)
        elif is_image_file(entry.name):
            yield entry.path
        elif (
            skipped is not None
            and (suffix := os.path.splitext(entry.name)[1].lower()) not in _HARMLESS
        ):
            skipped.suffixes[suffix] += 1


def num_loose(folder: str | Path) -> int:
    """Return the number of images in `folder` itself, without subfolders."""
    return sum(is_image_file(entry.name) and not _is_dir(entry) for entry in _visible(folder))


def dangling_links(folder: str | Path) -> list[str]:
    """Return the links in `folder` itself whose target does not exist."""
    return [
        entry.path
        for entry in _visible(folder)
        if entry.is_symlink() and not os.path.exists(entry.path)
    ]


def holds_runs(folder: str | Path) -> bool:
    """Return whether `folder` contains runs of `finetune`, whose images are no data."""
    begun = [path for command in _COMMANDS if os.path.isdir(path := os.path.join(folder, command))]
    return any(
        any(is_run(path.parent) for path in Path(place).glob("*/config.yaml")) for place in begun
    )


def holds_only_runs(folder: str | Path) -> bool:
    """Return whether `folder` is a run, or contains runs in any depth and no images outside of them."""
    if is_run(folder) or holds_runs(folder):
        return True
    has_runs = False
    # Without sorting, and only up to the first image: a class may have a million images on a network disk.
    with suppress(OSError), os.scandir(folder) as entries:
        for entry in entries:
            if entry.name.startswith("."):
                continue
            if is_image_file(entry.name):
                return False
            if _is_dir(entry):
                # Links are not followed, because they may form a cycle.
                if not (
                    holds_runs(entry.path) if entry.is_symlink() else holds_only_runs(entry.path)
                ):
                    return False
                has_runs = True
    return has_runs


def is_run(folder: str | Path) -> bool:
    """Return whether `folder` is a single run. Its parent, such as `test`, may also hold the classes of a split."""
    place, name = os.path.split(os.path.abspath(folder))
    command = os.path.basename(place)
    is_place = command in _COMMANDS and re.fullmatch(r"version_\d+", name) is not None
    # `fit --name` calls the folder as the user likes
    is_named = command == "fit" and os.path.isfile(os.path.join(folder, "about.json"))
    return (is_place or is_named) and os.path.isfile(os.path.join(folder, "config.yaml"))


def is_image_file(name: str) -> bool:
    """Return whether a file name has the suffix of an image."""
    return os.path.splitext(name)[1].lower() in IMAGE_SUFFIXES


def _visible(folder: str | Path) -> Sequence["os.DirEntry[str]"]:
    with os.scandir(folder) as entries:
        visible = [entry for entry in entries if not entry.name.startswith(".")]
    # The order, and so the fingerprint, must not depend on the Unicode composition of names in the file system.
    return sorted(visible, key=lambda entry: (composed(entry.name), entry.name))


def _is_dir(entry: "os.DirEntry[str]") -> bool:
    try:
        return entry.is_dir()
    except OSError:  # a link to itself, which is reported when it is read
        return False


def _is_above(link: str, folders: Sequence[str]) -> bool:
    target = os.path.join(os.path.realpath(link), "")
    return any(os.path.join(folder, "").startswith(target) for folder in folders)
