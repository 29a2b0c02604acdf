"""The files of runs in object storage: they are written, read and deleted one by one, by their addresses."""

from contextlib import suppress
from pathlib import Path
from typing import BinaryIO

from finetune.data import bucket_client
from finetune.data.addresses import parse_address
from finetune.data.bucket_client import START_SECONDS, client_of, send

# Parts of 5 MB of a file that are sent at the same time: on a slow line each must arrive within the time of an answer.
_PARTS = 4


def e_tags_in(folder: str) -> dict[str, str | None]:
    """Return the ETags of the objects in a folder and its subfolders, by name."""
    address = parse_address(folder)
    objects = bucket_client.list_objects(address)
    return {path.removeprefix(f"{address}/"): item.e_tag for path, item in objects.items()}


def folders_in(folder: str) -> list[str]:
    """Return the names of the subfolders of a folder."""
    return bucket_client.subfolders(parse_address(folder))


def e_tag(path: str, is_start: bool = False) -> str | None:
    """Return the identifier of the content of an object; None if there is no such object.

    Args:
        path: Its address.
        is_start: Whether a command begins with this request, which is then not repeated for long.
    """
    item = bucket_client.head(parse_address(path), START_SECONDS if is_start else None)
    return None if item is None else item.e_tag


def write(path: str, content: bytes | BinaryIO, changed: int) -> str | None:
    """Write an object, which replaces an earlier one at once when it is complete, and return its ETag.

    Args:
        path: Its address.
        content: The content. A file is read from its position, in parts, which need less memory.
        changed: The time of its last change in ns, which `download` gives to the file.
    """
    address = parse_address(path)
    client = client_of(address)
    import obstore

    start = 0 if isinstance(content, bytes) else content.tell()

    def put() -> str | None:
        if not isinstance(content, bytes):
            content.seek(start)  # for a repeated request
        attributes = {bucket_client.CHANGED: str(changed)}
        result = obstore.put(
            client, address.key, content, attributes=attributes, max_concurrency=_PARTS
        )
        return result["e_tag"]

    return send(str(address), put)


def create(path: str, content: bytes) -> str | None:
    """Write a small object unless there is one, and return its ETag; None if there is another one.

    Of several processes that do so at the same time, one succeeds.
    """
    address = parse_address(path)
    client = client_of(address)
    import obstore
    from obstore import exceptions

    def put() -> str | None:
        try:
            return obstore.put(client, address.key, content, mode="create")["e_tag"]
        except exceptions.AlreadyExistsError:
            # perhaps of this process, if the answer to a first request was lost
            result = obstore.get(client, address.key)
            is_own = bytes(result.bytes()) == content
            return result.meta["e_tag"] if is_own else None

    return send(str(address), put)


def copy(source: str, target: str) -> None:
    """Copy an object within a bucket. The content is not sent again."""
    address = parse_address(source)
    client = client_of(address)
    import obstore

    key = parse_address(target).key
    send(str(address), lambda: obstore.copy(client, address.key, key))


def delete(path: str) -> None:
    """Delete an object, if there is one."""
    address = parse_address(path)
    client = client_of(address)
    import obstore

    with suppress(FileNotFoundError):
        send(str(address), lambda: obstore.delete(client, address.key))


def download(path: str, tag: str | None, target: Path) -> None:
    """Write the content of an object with this ETag to a file; see `bucket_client.download`."""
    bucket_client.download(parse_address(path), tag, target)
