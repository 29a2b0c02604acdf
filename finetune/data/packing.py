"""Packs images into a few tar files of a few hundred megabytes, with an index.

The tar files are shards as webdataset reads them: each image follows its label, and training images are in a random
order. `PackedStorage` reads the images of a packed folder.
"""

import errno
import io
import json
import os
import secrets
import tarfile
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import numpy as np

from finetune.data.addresses import StorageError, is_address
from finetune.data.datasets.sources import choose_source
from finetune.data.fetching import Content, fetch_ahead
from finetune.data.limits import MAX_BYTES
from finetune.data.pack_place import INDEX, shard_name
from finetune.data.packed_storage import TAR_BLOCK, TAR_RECORD, content_digest, padded_size
from finetune.data.samples import Samples
from finetune.data.splits import hashes
from finetune.data.storage import file_stats, kind_of, open_file, refresh, storage_of
from finetune.data.tables.table_rows import TableOptions, TableRows, read_content
from finetune.data.targets import MultiHot
from finetune.system.files import replacing
from finetune.system.messages import WrongUsage, shown
from finetune.system.progress import track

if TYPE_CHECKING:  # it needs obstore
    from finetune.data.object_storage import ObjectStorage

_SPLITS = ("train", "all", "val", "test")  # in the order of the shards
_GROUP = 64  # images that are fetched from object storage together
_ORDER_SEED = 0  # of the order of training images in the shards


@dataclass(frozen=True)
class Source:
    """The images to pack.

    Attributes:
        splits: The images by split, as `fit` finds them.
        class_names: The classes, in the order of their indices.
        folder: Folder that the paths in the index are relative to.
        columns: The columns of a table by path; None for class folders.
    """

    splits: Mapping[str, Samples]
    class_names: Sequence[str]
    folder: str
    columns: Mapping[str, Mapping[str, Any]] | None = None

    def names(self) -> Iterator[str]:
        """Yield the path of each image relative to the folder.

        Raises:
            WrongUsage: An image is not in the folder.
        """
        prefix = os.path.join(self.folder, "")
        for samples in self.splits.values():
            for path in samples.paths:
                name = path.removeprefix(prefix)
                is_outside = name == path if prefix else os.path.isabs(path)
                if is_outside or ".." in name.split("/"):
                    raise WrongUsage(
                        f"{shown(path)} is not in {self.folder or 'the working directory'}: pass the folder of all "
                        "images as --root, and use paths relative to it in the table"
                    )
                yield name


def find_source(folder: str, table: str | None, options: TableOptions) -> Source:
    """Find the images of a folder or a table, as `fit` does.

    Args:
        folder: The folder; without effect if there is a table.
        table: The table, or None.
        options: How to read a table.

    Raises:
        OSError: A file or folder cannot be read.
        ValueError: The data set has a fault.
    """
    images = choose_source(folder, table, options, group="").find(None)
    root = "" if images.folder == "." else images.folder
    splits = {split: images.splits[split] for split in _SPLITS if split in images.splits}
    columns = None
    if table is not None:
        rows = read_content(Path(table), options).rows
        columns = _columns_by_path(rows, has_one_label=images.label_kind == "single")
    return Source(splits, images.class_names, root, columns)


def _columns_by_path(rows: TableRows, has_one_label: bool) -> dict[str, dict[str, Any]]:
    """Return the columns of a table for its index, by the path of the image; see `INDEX`."""
    columns: dict[str, dict[str, Any]] = {}
    for i, path in enumerate(rows.paths):
        labels = list(rows.labels[i])
        row: dict[str, Any] = {"label": labels[0] if has_one_label else labels}
        if rows.splits[i] != "all":
            row["split"] = rows.splits[i]
        if rows.groups is not None:
            row["group"] = rows.groups[i]
        if rows.weights is not None:
            row["weight"] = float(rows.weights[i])
        columns[path] = row
    return columns


class Target:
    """A new or empty folder to which images are packed: on a local disk, or in object storage.

    For object storage, shards are written to a temporary folder and uploaded. First this process writes a small object
    with the name of the first shard. Another process sees it and ends. The shard replaces it later.

    Args:
        folder: The folder, which is created.
        stack: Removes the temporary folder at its end.

    Attributes:
        local: The folder on a local disk to which the files are written.

    Raises:
        WrongUsage: It has files.
    """

    def __init__(self, folder: str, stack: ExitStack) -> None:
        self.folder = folder
        self._names: list[str] = []  # of the files that this process has created
        self.is_remote = is_address(folder)
        refresh(folder)
        kind = kind_of(folder)
        if kind not in (None, "folder"):
            raise WrongUsage(f"{folder} is a file: name a new folder")
        if kind and next(storage_of(folder).entries(folder), None) is not None:
            raise WrongUsage(
                f"{folder} is not empty: name a new folder, or delete it if an earlier finetune pack was stopped"
            )
        if self.is_remote:
            self.local = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="pack-")))
        else:
            self.local = Path(folder)
            self.local.mkdir(parents=True, exist_ok=True)

    def claim(self) -> None:
        """Keep other processes out of a folder in object storage.

        Raises:
            WrongUsage: Another process fills it.
        """
        if not self.is_remote:
            return  # a shard can be created only once
        if not self._storage().create(f"{self.folder}/{shard_name(0)}", secrets.token_bytes()):
            raise self._filled()
        self._names.append(shard_name(0))

    def _filled(self) -> WrongUsage:
        return WrongUsage(
            f"another finetune pack writes to {self.folder}: wait for its end, or name a new folder"
        )

    def create_shard(self, number: int) -> tarfile.TarFile:
        """Create a shard on the local disk.

        Raises:
            WrongUsage: Another process has created it.
        """
        name = shard_name(number)
        try:
            tar = tarfile.TarFile(self.local / name, "x", format=tarfile.GNU_FORMAT)
        except FileExistsError:
            raise self._filled() from None
        self._names.append(name)
        return tar

    def remove_shards(self) -> None:
        """Remove the shards that this process has created, as far as the storage can be reached."""
        for name in dict.fromkeys(self._names):
            if not self.is_remote:
                (self.local / name).unlink(missing_ok=True)
                continue
            try:
                self._storage().delete(f"{self.folder}/{name}")
            except StorageError:  # the next request would wait for the storage as long again
                return

    def put(self, name: str) -> None:
        """Complete a file of the local folder: upload it, or write it through to the disk."""
        path = self.local / name
        with open(path, "rb") as file:
            if not self.is_remote:
                os.fsync(file.fileno())
                return
            self._storage().write(f"{self.folder}/{name}", file, path.stat().st_mtime_ns)
        path.unlink()

    def _storage(self) -> "ObjectStorage":
        return cast("ObjectStorage", storage_of(self.folder))


class Shards:
    """The tar files of a target. After an error they are removed.

    Args:
        target: Where they are written.
        num_bytes: Their size, at most, unless a single image is larger.
    """

    def __init__(self, target: Target, num_bytes: int) -> None:
        self.number = -1
        self._target = target
        self._num_bytes = num_bytes
        self._tar: tarfile.TarFile | None = None

    def __enter__(self) -> "Shards":
        self._target.claim()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if kind is None:
            self.close()
            return
        if self._tar is not None and self._tar.fileobj is not None:
            with suppress(OSError):  # on a full disk the rest cannot be written either
                self._tar.fileobj.close()
        if isinstance(error, OSError) and error.filename is None:
            error.filename = str(self._target.local)  # for the message: writing does not set it
            if self._target.is_remote and error.errno == errno.ENOSPC:
                error.strerror = (
                    f"{error.strerror}: a shard does not fit there (set TMPDIR to a larger one)"
                )
        if not isinstance(error, StorageError):
            self._target.remove_shards()

    def add(self, name: str, label: tuple[str, bytes], content: bytes) -> int:
        """Append an image after its label, and return where its bytes begin in the tar of `self.number`.

        Args:
            name: Path of the image in the tar. That of its label has another suffix.
            label: Suffix and content of the file of the label.
            content: The bytes of the image.
        """
        key, suffix = os.path.splitext(name)
        # with a header of each file, and two blocks at the end of the tar
        num_bytes = padded_size(len(content)) + padded_size(len(label[1])) + 4 * TAR_BLOCK
        if self._tar is not None:
            size = padded_size(self._tar.offset + num_bytes, TAR_RECORD)
            if size > self._num_bytes:
                self.close()
        if self._tar is None:
            self._tar = self._target.create_shard(self.number + 1)
            self.number += 1
        for member, data in ((f"{key}.{label[0]}", label[1]), (f"{key}{suffix}", content)):
            info = tarfile.TarInfo(member)
            info.size = len(data)
            self._tar.addfile(info, io.BytesIO(data))
        return self._tar.offset - padded_size(len(content))

    def close(self) -> None:
        """Complete the last shard. The next image begins a new one."""
        if self._tar is not None:
            self._tar.close()
            self._target.put(shard_name(self.number))
        self._tar = None


def pack_images(source: Source, target: Target, shard_bytes: int) -> tuple[int, int]:
    """Write the shards of all images, then the index. A folder without an index does not count as packed.

    Memory: 350 bytes for each image if paths have 27 letters, and up to 256 MB of images that are fetched ahead from
    object storage.

    Args:
        source: The images.
        target: Where they are written.
        shard_bytes: Size of a shard.

    Returns:
        The number of images, and that of shards.

    Raises:
        OSError: An image cannot be read, or the disk is full.
        StorageError: Object storage cannot be reached.
        WrongUsage: An image is not in the folder of the table.
    """
    names = list(source.names())
    shards = np.zeros(len(names), np.int32)
    offsets = np.zeros(len(names), np.int64)
    sizes = np.zeros(len(names), np.int64)
    digests = np.zeros(len(names), np.uint64)
    members = _Members(names)
    last_split = ""
    with Shards(target, shard_bytes) as writer:
        for image in track(_images(source), len(names), "packing images"):
            if image.split != last_split:
                writer.close()  # a shard has images of one split
            last_split = image.split
            i = image.row
            offsets[i] = writer.add(members[i], image.label, image.content)
            shards[i] = writer.number
            sizes[i] = len(image.content)
            digests[i] = content_digest(image.content)
        writer.close()
        paths = [path for samples in source.splits.values() for path in samples.paths]
        by_name = sorted(range(len(names)), key=names.__getitem__)
        with replacing(target.local / INDEX) as file, open(file, "w", encoding="ascii") as lines:
            for i in by_name:
                row: dict[str, Any] = {"path": names[i]}
                if source.columns is not None:
                    row |= source.columns[paths[i]]
                row["shard"] = shard_name(int(shards[i]))
                row["offset"] = int(offsets[i])
                row["size"] = int(sizes[i])
                row["digest"] = f"{int(digests[i]):016x}"
                lines.write(json.dumps(row) + "\n")
        target.put(INDEX)
    return len(names), writer.number + 1


class _Members:
    """Names of images in the tar files: their paths, changed where webdataset would mistake them.

    For webdataset a name ends before the first dot of the file, and all files of one name are one image. So another dot
    becomes %2E. If two images differ in the suffix only, such as cat.jpg and cat.png, it is added to both names.

    Args:
        paths: Path of each image, N.
    """

    def __init__(self, paths: Sequence[str]) -> None:
        self._paths = paths
        stems = hashes(_split_name(path)[0] for path in paths)
        _, of_image, counts = np.unique(stems, return_inverse=True, return_counts=True)
        self._is_repeated = counts[of_image] > 1

    def __getitem__(self, i: int) -> str:
        stem, suffix = _split_name(self._paths[i])
        return f"{stem}%{suffix[1:]}{suffix}" if self._is_repeated[i] else stem + suffix


def _split_name(path: str) -> tuple[str, str]:
    """Return a path without its suffix and without dots in the name of the file, and the suffix."""
    folder, slash, file = path.rpartition("/")
    stem, suffix = os.path.splitext(file)
    return f"{folder}{slash}{stem.replace('%', '%25').replace('.', '%2E')}", suffix


class _Image(NamedTuple):
    """An image that is packed.

    Attributes:
        row: Its row among all images.
        split: Its split.
        label: Suffix and content of the file of its label.
        content: Its bytes.
    """

    row: int
    split: str
    label: tuple[str, bytes]
    content: bytes


def _images(source: Source) -> Iterator[_Image]:
    """Yield the images in the order of the shards.

    Training images are in a random order: programs that read shards from their beginning train on them in about this
    order.
    """
    first = 0
    for split, listed in source.splits.items():
        samples = listed
        if listed.has_remote_files():
            samples = replace(listed, stats=file_stats(listed.paths))
        order = np.arange(len(samples))
        if split not in ("val", "test"):
            order = np.random.default_rng(_ORDER_SEED).permutation(order)
        groups = [order[i : i + _GROUP].tolist() for i in range(0, len(order), _GROUP)]
        for fetched in fetch_ahead(groups, samples.files_to_read):
            for i in fetched.group:
                content = _content(samples.paths[i], fetched.contents)
                label = _label(samples, i, source.class_names)
                yield _Image(first + i, split, label, content)
        first += len(samples)


def _content(path: str, contents: Mapping[str, Content]) -> bytes:
    """Return the bytes of an image: those that were fetched, or else those of the file.

    Raises:
        OSError: It cannot be read.
        ValueError: It is larger than the limit.
    """
    content = contents.get(path)
    if content is None:
        with open_file(path) as file:
            try:
                content = file.read(MAX_BYTES + 1)
            except OSError as error:  # of a failing disk: it does not name the file
                raise OSError(error.errno, error.strerror, path) from error
    if isinstance(content, OSError):
        raise content
    if len(content) > MAX_BYTES:
        raise ValueError(f"{path}: more than {MAX_BYTES:,} bytes, the limit of an image")
    return content


def _label(samples: Samples, i: int, class_names: Sequence[str]) -> tuple[str, bytes]:
    """Return the suffix and the content of the file with the label of an image."""
    if isinstance(samples.targets, MultiHot):
        chosen = np.flatnonzero(samples.targets.labels[i]).tolist()
        return "json", json.dumps({"labels": [class_names[k] for k in chosen]}).encode()
    return "cls", str(int(samples.targets.labels[i])).encode()
