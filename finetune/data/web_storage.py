"""Images on a web server, such as https://HOST/FOLDER/photo.jpg, which a table names. They are only read.

A web server has no list of its files. The size and the ETag of each image come from one HEAD request, many at a time.
Nothing is read outside of the folder that the user has named, and no credentials are sent.
"""

from collections.abc import Iterator, Sequence
from typing import Any
from urllib.parse import unquote

import obstore
from obstore.store import HTTPStore

from finetune.data import object_requests
from finetune.data.addresses import Address, StorageError, parse_address
from finetune.data.fetching import map_files
from finetune.data.listed_storage import ListedStorage
from finetune.data.object_requests import RangesUnsupportedError, client_options, retries_within
from finetune.data.object_tree import Object, Tree
from finetune.data.pack_place import INDEX
from finetune.data.storage import Entry, Kind, Starts
from finetune.data.walk import is_image_file


class WebStorage(ListedStorage):
    """The web servers of one scheme. All methods may be used in threads, but not in forked workers."""

    def _list(self, address: Address) -> Tree:
        return Tree(str(address), {})  # `_objects` adds its files

    def kind(self, path: str) -> Kind:
        path = self.normal(path)
        if path in self._trees and not is_image_file(path):
            return "folder"
        return None if self._objects([path])[0] is None else "file"

    def entries(self, folder: str) -> Iterator[Entry]:
        folder = self.normal(folder)
        if self._listed(f"{folder}/{INDEX}") is None:
            raise StorageError(
                f"{folder}: a web server has no list of its images: pack them, or pass a table of them: "
                "finetune fit TABLE --data.root https://HOST/FOLDER"
            )
        return iter(())  # the index lists the files

    def _objects(self, paths: Sequence[str]) -> list[Object | None]:
        paths = [self.normal(path) for path in paths]
        inside = [path for path in dict.fromkeys(paths) if self._tree(path) is not None]
        unknown = [path for path in inside if self._listed(path) is None]
        # A thread that fetches files asks for one file. It must not wait for other such threads, as map_files does.
        is_single = len(unknown) <= 1
        items = map(self._head_of, unknown) if is_single else map_files(self._head_of, unknown)
        for path, item in zip(unknown, items, strict=True):
            tree = self._tree(path)
            if tree is not None and item is not None:
                tree.objects[path] = item
        return [self._listed(path) for path in paths]

    def _head_of(self, path: str) -> Object | None:
        return self._head(parse_address(path), object_requests.START_SECONDS)

    def _key(self, address: Address) -> str:
        return unquote(address.key)

    def _get(self, client: Any, address: Address, listed: Object | None) -> Any:
        result = obstore.get(client, self._key(address))
        now = (result.meta["size"], result.meta["e_tag"])
        if listed is not None and now != (listed.size, listed.e_tag):
            raise StorageError(
                f"{address} was replaced after the table was read: start again when nothing changes it"
            )
        return result

    def read_pieces(self, path: str, num_bytes: int, starts: Starts) -> tuple[int, list[bytes]]:
        try:
            return super().read_pieces(path, num_bytes, starts)
        except RangesUnsupportedError:
            # of a shard, each image would be a request for all its bytes
            if not is_image_file(path):
                raise
        content = self.content(path)
        size = len(content)
        return size, [content[start : start + num_bytes] for start in starts(size)]

    def _new_client(self, place: str, seconds: float) -> Any:
        options = client_options(is_http_allowed=place.startswith("http://"))
        retries = retries_within(seconds)
        return HTTPStore.from_url(place, client_options=options, retry_config=retries)
