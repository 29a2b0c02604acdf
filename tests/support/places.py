"""Places where images may lie: a folder, a table, an archive, a bucket and a dataset of the hub."""

import csv
import tarfile
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from shutil import copytree
from typing import Any, NamedTuple

import pytest
import torch
from hub_server import hub_server
from object_server import object_server

from finetune.commands.error_lines import exit_code, one_line

PLACES = ("table", "archive", "s3", "hub")  # quick ones; a folder is what they are compared with
RARE = ("folder", "table in s3", "archive in s3")

# Puts the images of a folder there, under a name, and returns the arguments of a command for them.
Put = Callable[[Path, str], list[str]]


class Place(NamedTuple):
    """A place of images. `server` is that of the place, if it has one."""

    kind: str
    put: Put
    server: Any = None

    def num_requests(self) -> int:
        """Return how many requests the server had."""
        requests = self.server.requests
        return requests.total() if isinstance(requests, Counter) else len(requests)


def write_table(path: Path, images: Path) -> Path:
    """Write a table of the images in SPLIT/CLASS of a folder, by their paths in it, in another order."""
    with open(path, "w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(["file_name", "species", "split"])
        for image in sorted(images.rglob("*.png"), reverse=True):
            split, name, _ = image.relative_to(images).parts
            writer.writerow([image.relative_to(images), name, split])
    return path


def _folder(images: Path, name: str) -> list[str]:
    return [str(copytree(images, name))]


def _table(images: Path, name: str) -> list[str]:
    copytree(images, name)
    return [str(write_table(Path(name, "images.csv"), images))]


def _archive(images: Path, name: str) -> list[str]:
    path = f"{name}.tar.gz"
    with tarfile.open(path, "w:gz") as archive:
        archive.add(images, name)
    return [path]


@contextmanager
def a_place(kind: str, folder: Path) -> Iterator[Place]:
    """Yield a place, whose local files are in the working directory, and whose server has the caches in a folder."""
    local = {"folder": _folder, "table": _table, "archive": _archive}
    if kind in local:
        yield Place(kind, local[kind])
    elif kind == "hub":
        with hub_server(folder / "hub") as hub:

            def commit(images: Path, name: str) -> list[str]:
                hub.put_folder(images, f"owner/{name}", "set")
                return [f"hf://datasets/owner/{name}/set"]

            yield Place(kind, commit, hub)
    else:
        with object_server() as server:

            def upload(images: Path, name: str) -> list[str]:
                if kind == "archive in s3":
                    server.put(f"{name}.tar.gz", Path(*_archive(images, name)).read_bytes())
                    return [f"{server.address}/{name}.tar.gz"]
                address = server.put_folder(images, name)
                if kind == "s3":
                    return [address]
                return [str(write_table(Path(f"{name}.csv"), images)), "--data.root", address]

            yield Place(kind, upload, server)


def are_equal(first: dict[str, torch.Tensor], second: dict[str, torch.Tensor]) -> bool:
    """Return whether two runs have learned the same, bit for bit."""
    same_names = first.keys() == second.keys()
    return same_names and all(value.equal(second[name]) for name, value in first.items())


def error_line(cli: Callable[..., None], *arguments: object) -> str:
    """Return the line with which a command ends."""
    with pytest.raises((ValueError, OSError)) as caught:
        cli(*arguments)
    line = one_line(caught.value)
    assert line is not None and "\n" not in line and exit_code(caught.value) in (1, 2)
    return line
