"""The objects of a listing as a tree of folders and files: object storage itself has only names with slashes."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Any, NamedTuple

from finetune.data.file_entries import Entry, Kind

_LATEST = 2**63 - 1  # ns; times are stored as int64, and some servers send the year 9999


class Object(NamedTuple):
    """An object of a listing. `changed` is its time in ns, `e_tag` the identifier of its content."""

    size: int
    changed: int
    e_tag: str | None

    def times(self) -> tuple[int, int]:
        """Return the time, and a digest of the ETag, as the two times of a file."""
        digest = blake2b((self.e_tag or "").encode(), digest_size=8).digest()
        return self.changed, int.from_bytes(digest, "little", signed=True)


def listed_object(meta: Mapping[str, Any]) -> Object:
    """Return an object of a listing from its description by obstore."""
    seconds = int(meta["last_modified"].timestamp())  # some requests have no fractions of a second
    changed = min(seconds * 10**9, _LATEST)
    return Object(meta["size"], changed, meta["e_tag"])


@dataclass
class Folder:
    """The names in a folder: its subfolders and files."""

    folders: set[str] = field(default_factory=set)
    files: set[str] = field(default_factory=set)


class Tree:
    """All objects in a folder and its subfolders.

    Args:
        root: The folder, or a single file.
        objects: Objects by path.
        empty: Paths of folders without objects.

    Attributes:
        results: Results about the content of these objects; see `Storage.results`.
    """

    def __init__(self, root: str, objects: dict[str, Object], empty: Iterable[str] = ()) -> None:
        self.root = root
        self.objects = objects
        self.results: dict[str, Any] = {}
        self.folders: dict[str, Folder] = {}
        for path in empty:
            self._folder(path)
        for path in objects:
            if path == root:  # a file
                continue
            parent, _, name = path.rpartition("/")
            self._folder(parent).files.add(name)

    def _folder(self, path: str) -> Folder:
        folder = self.folders.get(path)
        if folder is None:
            folder = self.folders[path] = Folder()
            if path != self.root:
                parent, _, name = path.rpartition("/")
                self._folder(parent).folders.add(name)
        return folder

    def kind(self, path: str) -> Kind:
        if path in self.folders:
            return "folder"
        return "file" if path in self.objects else None

    def entries(self, path: str) -> Iterator[Entry]:
        folder = self.folders[path]
        for name in folder.folders:
            yield Entry(name, f"{path}/{name}", is_folder=True, is_link=False)
        for name in folder.files:
            inside = f"{path}/{name}"
            if name not in folder.folders or not self._is_mark(inside):
                yield Entry(name, inside, is_folder=False, is_link=False)

    def _is_mark(self, path: str) -> bool:
        """Return whether an object may mark a folder: some programs write an empty object of its name."""
        return self.objects[path].size == 0

    def parents_of_marks(self) -> set[str]:
        """Return the folders of empty objects that may each be the mark of an empty folder."""
        marks = (path for path in self.objects if self._is_mark(path) and path not in self.folders)
        return {path.rpartition("/")[0] for path in marks if path != self.root}
