"""The objects of a bucket as a tree of folders and files: object storage itself has only names with slashes."""

import errno
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from finetune.data.addresses import Address, parse_address
from finetune.data.bucket_client import START_SECONDS, Object, head, list_objects, subfolders
from finetune.data.file_entries import Entry, Kind


@dataclass
class _Folder:
    """The names in a folder: its subfolders and files."""

    folders: set[str] = field(default_factory=set)
    files: set[str] = field(default_factory=set)


class Tree:
    """All objects in a folder and its subfolders.

    Args:
        root: The folder, or a single file.
        objects: Objects by path.
        empty: Paths of folders without objects.
    """

    def __init__(self, root: str, objects: dict[str, Object], empty: Iterable[str] = ()) -> None:
        self.root = root
        self.objects = objects
        self._folders: dict[str, _Folder] = {}
        for path in empty:
            self._folder(path)
        for path in objects:
            if path == root:  # a file
                continue
            parent, _, name = path.rpartition("/")
            self._folder(parent).files.add(name)

    def _folder(self, path: str) -> _Folder:
        folder = self._folders.get(path)
        if folder is None:
            folder = self._folders[path] = _Folder()
            if path != self.root:
                parent, _, name = path.rpartition("/")
                self._folder(parent).folders.add(name)
        return folder

    def kind(self, path: str) -> Kind:
        """Return what is at a path."""
        if path in self._folders:
            return "folder"
        return "file" if path in self.objects else None

    def entries(self, path: str) -> Iterator[Entry]:
        """Yield the files and folders in a folder, in any order.

        Raises:
            FileNotFoundError: There is no such folder.
        """
        if path not in self._folders:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path)
        folder = self._folders[path]
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
        marks = (path for path in self.objects if self._is_mark(path) and path not in self._folders)
        return {path.rpartition("/")[0] for path in marks if path != self.root}


def list_tree(address: Address) -> Tree:
    """Return all objects in a folder as they are now, or the single object of this address.

    Raises:
        StorageError: The storage cannot be reached.
    """
    root = str(address)
    objects = list_objects(address)
    if not objects and address.key:
        item = head(address, START_SECONDS)
        if item is not None:
            objects[root] = item
    tree = Tree(root, objects)
    # The name of a mark ends with a slash, which only the listing of a single folder shows.
    marks = {
        path
        for parent in tree.parents_of_marks()
        for name in subfolders(parse_address(parent))
        if tree.kind(path := f"{parent}/{name}") != "folder"
    }
    if marks:
        others = {path: item for path, item in objects.items() if path not in marks}
        tree = Tree(root, others, marks)
    return tree
