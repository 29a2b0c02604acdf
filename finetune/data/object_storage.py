"""Images and runs in object storage: S3 and compatible servers, Google Cloud and Azure Blob Storage, by obstore.

A folder of images is listed once: the paths, sizes, times and ETags of all objects in it; see `listed_storage`. A
request for an image names the ETag of the list. Runs are written and read file by file (`runs.run_upload`,
`runs.run_download`).
"""

import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO

import obstore
from obstore import exceptions

from finetune.data import object_requests
from finetune.data.addresses import Address, parse_address
from finetune.data.file_entries import Entry, Kind
from finetune.data.listed_storage import ListedStorage
from finetune.data.object_tree import Object, Tree, listed_object

# Parts of 5 MB of a file that are sent at the same time: on a slow line each must arrive within the time of an answer.
_PARTS = 4
_CHANGED = "mtime"  # metadata of an object: when the file was changed, in ns


class ObjectStorage(ListedStorage):
    """The buckets of one scheme. All methods may be used in threads, but not in forked workers."""

    def _new_client(self, place: str, seconds: float) -> Any:
        return object_requests.new_client(place, seconds)

    def _list(self, address: Address) -> Tree:
        """Return all objects in a folder as they are now, or the single object of this address."""
        root = str(address)
        objects = self._objects_in(address)
        if not objects and address.key:
            item = self._head(address, object_requests.START_SECONDS)
            if item is not None:
                objects[root] = item
        tree = Tree(root, objects)
        # The name of a mark ends with a slash, which only the listing of a single folder shows.
        marks = {
            entry.path
            for parent in tree.parents_of_marks()
            for entry in self._names(parse_address(parent))
            if entry.is_folder and entry.path not in tree.folders
        }
        if marks:
            others = {path: item for path, item in objects.items() if path not in marks}
            tree = Tree(root, others, marks)
        return tree

    def _objects_in(self, address: Address) -> dict[str, Object]:
        """Return the objects in a folder and its subfolders, by path."""
        root = str(address)
        place = str(address._replace(key=""))
        client = self._client_of(address, object_requests.START_SECONDS)
        objects: dict[str, Object] = {}

        def read_pages() -> None:
            objects.clear()
            for page in obstore.list(client, prefix=address.key or None, chunk_size=1000):
                for meta in page:
                    path = f"{place}/{meta['path']}"
                    # some programs write an empty object of the folder's name
                    if path != root:
                        objects[path] = listed_object(meta)

        self._send(root, read_pages)
        return objects

    def kind(self, path: str) -> Kind:
        address = parse_address(path)
        if self._tree(str(address)) is not None:
            return super().kind(path)
        if address.key and self._head(address, object_requests.START_SECONDS) is not None:
            return "file"
        return "folder" if any(True for _ in self._names(address)) else None

    def entries(self, folder: str) -> Iterator[Entry]:
        address = parse_address(folder)
        if self._tree(str(address)) is None:
            return self._names(address)
        return super().entries(folder)

    def _names(self, address: Address) -> Iterator[Entry]:
        """Return the names in a folder that is not listed, without those in its subfolders."""
        client = self._client_of(address, object_requests.START_SECONDS)
        result = self._send(
            str(address), lambda: obstore.list_with_delimiter(client, address.key or None)
        )
        place = str(address._replace(key=""))
        for prefix in result["common_prefixes"]:
            yield Entry(prefix.rpartition("/")[2], f"{place}/{prefix}", True, False)
        for meta in result["objects"]:
            path = meta["path"]
            yield Entry(path.rpartition("/")[2], f"{place}/{path}", False, False)

    def files_in(self, folder: str) -> dict[str, Object]:
        """Return the objects in a folder and its subfolders as they are now, by path relative to the folder."""
        root = self.normal(folder)
        objects = self._objects_in(parse_address(folder))
        return {path.removeprefix(f"{root}/"): item for path, item in objects.items()}

    def folders_in(self, folder: str) -> list[str]:
        """Return the names of the subfolders of a folder as they are now."""
        return [entry.name for entry in self._names(parse_address(folder)) if entry.is_folder]

    def e_tag(self, path: str, is_start: bool = False) -> str | None:
        """Return the identifier of the content of an object; None if there is no such object.

        Args:
            path: Its address.
            is_start: Whether a command begins with this request, which is then not repeated for long.
        """
        seconds = object_requests.START_SECONDS if is_start else object_requests.RETRY_SECONDS
        item = self._head(parse_address(path), seconds)
        return None if item is None else item.e_tag

    def write(self, path: str, content: bytes | BinaryIO, changed: int) -> str | None:
        """Write an object, which replaces an earlier one at once when it is complete, and return its ETag.

        Args:
            path: Its address.
            content: The content. A file is read from its position, in parts, which need less memory.
            changed: The time of its last change in ns, which `download` gives to the file.
        """
        address = parse_address(path)
        client = self._client_of(address)
        start = 0 if isinstance(content, bytes) else content.tell()

        def put() -> str | None:
            if not isinstance(content, bytes):
                content.seek(start)  # for a repeated request
            result = obstore.put(
                client,
                address.key,
                content,
                attributes={_CHANGED: str(changed)},
                max_concurrency=_PARTS,
            )
            return result["e_tag"]

        return self._send(str(address), put)

    def create(self, path: str, content: bytes) -> str | None:
        """Write a small object unless there is one, and return its ETag; None if there is another one.

        Of several processes that do so at the same time, one succeeds.
        """
        address = parse_address(path)
        client = self._client_of(address)

        def put() -> str | None:
            try:
                return obstore.put(client, address.key, content, mode="create")["e_tag"]
            except exceptions.AlreadyExistsError:
                # perhaps of this process, if the answer to a first request was lost
                result = obstore.get(client, address.key)
                is_own = bytes(result.bytes()) == content
                return result.meta["e_tag"] if is_own else None

        return self._send(str(address), put)

    def copy(self, source: str, target: str) -> None:
        """Copy an object within a bucket. The content is not sent again."""
        address = parse_address(source)
        client = self._client_of(address)
        key = parse_address(target).key
        self._send(str(address), lambda: obstore.copy(client, address.key, key))

    def delete(self, path: str) -> None:
        """Delete an object, if there is one."""
        address = parse_address(path)
        client = self._client_of(address)
        with suppress(FileNotFoundError):
            self._send(str(address), lambda: obstore.delete(client, address.key))

    def download(self, path: str, e_tag: str | None, target: Path) -> None:
        """Write the content of an object to a file, with the time of its last change if `write` has stored it.

        Raises:
            FileNotFoundError: There is no such object.
            StorageError: The storage cannot be reached, or the object has another ETag.
        """
        address = parse_address(path)
        client = self._client_of(address)
        options: Any = None if e_tag is None else {"if_match": e_tag}

        def read() -> str | None:
            result = obstore.get(client, address.key, options=options)
            with open(target, "wb") as file:
                for chunk in result.stream():
                    file.write(chunk)
            return result.attributes.get(_CHANGED)

        changed = self._send(str(address), read)
        if changed is not None and changed.isdecimal():
            os.utime(target, ns=(int(changed), int(changed)))
