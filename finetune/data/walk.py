"""The picture files beneath a folder, and what lies beside them that is none."""

import logging
import os
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from finetune.data.decode import IMAGE_SUFFIXES
from finetune.system.file_names import composed

log = logging.getLogger(__name__)

# What accompanies pictures in many data sets, and is nobody's picture.
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
_COMMANDS = ("fit", "validate", "test", "predict")  # that leave runs


@dataclass
class Beside:
    """What was left out on the way.

    Attributes:
        skip: Leave out folders that can't be read, too; else they end the search.
        unread: These, in words.
        suffixes: Files of other kinds by their suffix.
        loose: Pictures in no class folder, by the folder that they lie in.
    """

    skip: bool = False
    unread: list[str] = field(default_factory=list)
    suffixes: Counter[str] = field(default_factory=Counter)
    loose: Counter[str] = field(default_factory=Counter)

    def tell(self, root: str | Path) -> None:
        """Say what was left out, a line for each kind, the most frequent first."""
        for text in self.unread:
            log.warning("left out %s", text)
        if self.suffixes:
            kinds = ", ".join(
                f"{num} {suffix or 'without a suffix'}"
                for suffix, num in self.suffixes.most_common(8)
            )
            more = ", ..." if len(self.suffixes) > 8 else ""
            supported = " ".join(sorted(IMAGE_SUFFIXES))
            log.warning(
                "left out of %s, as no pictures: %s%s; supported are %s",
                root,
                kinds,
                more,
                supported,
            )
        for folder, num in self.loose.items():
            log.warning(
                "left out %d picture%s in no class folder: loose in %s",
                num,
                "s" * (num != 1),
                folder,
            )


def find_pictures(
    folder: str | Path, beside: Beside | None = None, on_the_way: Sequence[str] = ()
) -> Iterator[str]:
    """Yield the picture files beneath `folder`, nested folders included, sorted by path, without hidden ones and runs.

    Args:
        folder: Where to look.
        beside: Gets what is no picture.
        on_the_way: Real paths of the folders that led here.

    Raises:
        OSError: A folder can't be read, or is a link to one that it lies in or that led there.
    """
    try:
        entries = _visible(folder)
    except OSError as error:
        if beside is None or not beside.skip:
            raise
        beside.unread.append(f"the folder {folder}: {error.strerror}")
        return
    on_the_way = [*on_the_way, os.path.realpath(folder)]
    for entry in entries:
        if _is_dir(entry):
            if holds_runs(entry.path) or is_run(entry.path):
                continue
            if entry.is_symlink() and _is_above(entry.path, on_the_way):
                text = f"{entry.path} is a link to a folder that it lies in"
                if beside is None or not beside.skip:
                    raise OSError(
                        f"{text}: remove it, or leave it out with --data.on_bad_image skip"
                    )
                beside.unread.append(text)
                continue
            yield from find_pictures(entry.path, beside, on_the_way)
        elif is_picture(entry.name):
            yield entry.path
        elif (
            beside is not None
            and (suffix := os.path.splitext(entry.name)[1].lower()) not in _HARMLESS
        ):
            beside.suffixes[suffix] += 1


def num_loose(folder: str | Path) -> int:
    """Return how many pictures lie in `folder` itself."""
    return sum(is_picture(entry.name) and not _is_dir(entry) for entry in _visible(folder))


def dangling(folder: str | Path) -> list[str]:
    """Return the links in `folder` itself that lead nowhere."""
    return [
        entry.path
        for entry in _visible(folder)
        if entry.is_symlink() and not os.path.exists(entry.path)
    ]


def holds_runs(folder: str | Path) -> bool:
    """Return whether `folder` is one of runs, as `finetune` makes it where it is called: their pictures are no data."""
    # seldom any
    begun = [path for command in _COMMANDS if os.path.isdir(path := os.path.join(folder, command))]
    return any(
        any(is_run(path.parent) for path in Path(place).glob("*/config.yaml")) for place in begun
    )


def is_of_runs(folder: str | Path) -> bool:
    """Return whether `folder` is a run or one of runs, or some lie beneath it and no picture but theirs."""
    if is_run(folder) or holds_runs(folder):
        return True
    found = False
    # Not in order, nor to the end: a class may have a million pictures, on a disk over the network.
    with suppress(OSError), os.scandir(folder) as entries:
        for entry in entries:
            if entry.name.startswith("."):
                continue
            if is_picture(entry.name):
                return False
            if _is_dir(entry):
                # A link is not gone into, for it may lead here.
                if not (holds_runs(entry.path) if entry.is_symlink() else is_of_runs(entry.path)):
                    return False
                found = True
    return found


def is_run(folder: str | Path) -> bool:
    """Return whether `folder` is that of a run: beside it in `test`, say, may lie the classes of a split."""
    place, name = os.path.split(os.path.abspath(folder))
    command = os.path.basename(place)
    is_place = command in _COMMANDS and re.fullmatch(r"version_\d+", name) is not None
    # `fit --name` calls the folder as the user likes
    is_named = command == "fit" and os.path.isfile(os.path.join(folder, "about.json"))
    return (is_place or is_named) and os.path.isfile(os.path.join(folder, "config.yaml"))


def is_picture(name: str) -> bool:
    """Return whether a file of this name is taken for a picture."""
    return os.path.splitext(name)[1].lower() in IMAGE_SUFFIXES


def _visible(folder: str | Path) -> Sequence["os.DirEntry[str]"]:
    with os.scandir(folder) as entries:
        visible = [entry for entry in entries if not entry.name.startswith(".")]
    # In one order, and so with one fingerprint, however a file system composes the letters of names.
    return sorted(visible, key=lambda entry: (composed(entry.name), entry.name))


def _is_dir(entry: "os.DirEntry[str]") -> bool:
    try:
        return entry.is_dir()
    except OSError:  # a link to itself: reading it will tell
        return False


def _is_above(link: str, folders: Sequence[str]) -> bool:
    target = os.path.join(os.path.realpath(link), "")
    return any(os.path.join(folder, "").startswith(target) for folder in folders)
