"""A storage that is no disk: files in memory, at addresses such as memory://set/train/cat/1.png."""

import io
import posixpath
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import BinaryIO

import numpy as np

from finetune.data.file_entries import Entry, FileStats, Kind, Starts

PLACE = "memory://set"


class MemoryStorage:
    """The files of a folder under other addresses, which only this object can list and open."""

    def __init__(self, folder: Path) -> None:
        self.files = {
            f"{PLACE}/{path.relative_to(folder).as_posix()}": path.read_bytes()
            for path in folder.rglob("*")
            if path.is_file()
        }

    def refresh(self, folder: str) -> None:
        pass

    def normal(self, path: str) -> str:
        return path.rstrip("/")

    def absolute(self, path: str) -> str:
        return self.normal(path)

    def resolved(self, path: str) -> str:
        return self.normal(path)

    def kind(self, path: str) -> Kind:
        if path in self.files:
            return "file"
        is_prefix = any(name.startswith(posixpath.join(path, "")) for name in self.files)
        return "folder" if is_prefix else None

    def entries(self, folder: str) -> Iterator[Entry]:
        prefix = posixpath.join(folder, "")
        rest = [name.removeprefix(prefix) for name in self.files if name.startswith(prefix)]
        for name in {path.split("/")[0] for path in rest}:
            yield Entry(name, prefix + name, prefix + name not in self.files, False)

    def stats(self, paths: Sequence[str], skip: bool) -> FileStats:
        sizes = np.array([len(self.files[path]) for path in paths], np.int64)
        return FileStats(sizes, np.ones((len(paths), 2), np.int64), np.ones(len(paths), bool))

    def open_file(self, path: str) -> BinaryIO:
        return io.BytesIO(self.files[path])

    def results(self, path: str) -> None:
        return None

    def commit(self, path: str) -> str:
        return ""

    def read_pieces(self, path: str, num_bytes: int, starts: Starts) -> tuple[int, list[bytes]]:
        content = self.files[path]
        return len(content), [content[i : i + num_bytes] for i in starts(len(content))]
