"""Addresses of images in object storage, such as s3://bucket/folder.

Credentials and endpoints come from environment variables only. So no address holds a password, and addresses may be
written to configs, logs and reports. This module imports nothing heavy.
"""

import importlib.util
import os
import re
from collections.abc import Iterator
from typing import NamedTuple

from finetune.system.messages import WrongUsage, install, shown

SCHEMES = ("s3", "gs", "az")  # S3 and compatible servers, Google Cloud Storage, Azure Blob Storage
EXTRA = "storage"

_ANY_ADDRESS = re.compile(r"([A-Za-z][A-Za-z0-9+.-]+):(//?)")
_BUCKET = re.compile(r"[A-Za-z0-9$][A-Za-z0-9._-]*")


class StorageError(ValueError):
    """Object storage that cannot be reached or refuses access, or an object that was replaced while it was in use.

    It is not an OSError: it is no fault of a single file, so that code that skips unreadable files does not catch it.
    """


class Address(NamedTuple):
    """An address in parts. `key` has no slash at its ends, and is "" for a complete bucket."""

    scheme: str
    bucket: str
    key: str

    def __str__(self) -> str:
        place = f"{self.scheme}://{self.bucket}"
        return f"{place}/{self.key}" if self.key else place

    def parents(self) -> Iterator["Address"]:
        """Yield the folders that it is in, the innermost first; the last one is the bucket."""
        key = self.key
        while key:
            key = key.rpartition("/")[0]
            yield self._replace(key=key)


def is_address(path: object) -> bool:
    """Return whether a path is an address in object storage."""
    if not isinstance(path, str):
        return False
    scheme, separator, _ = path.partition("://")
    return bool(separator) and scheme in SCHEMES


def parse_address(path: str) -> Address:
    """Return the parts of an address, without empty parts and single dots in the key.

    Raises:
        WrongUsage: The bucket is missing or invalid, or the address has a user name or a password.
    """
    scheme, _, rest = path.partition("://")
    bucket, _, key = rest.partition("/")
    # a password may contain slashes, so nothing of such an address is shown
    if "@" in bucket or ":" in bucket:
        raise WrongUsage(
            f"an address ({scheme}://…) has a user name, a password or a port: write "
            f"{scheme}://BUCKET/FOLDER, and set environment variables such as AWS_ACCESS_KEY_ID and AWS_ENDPOINT_URL"
        )
    if not _BUCKET.fullmatch(bucket):
        raise WrongUsage(f"an address has no valid bucket: write {scheme}://BUCKET/FOLDER")
    parts = [part for part in key.split("/") if part not in ("", ".")]
    return Address(scheme, bucket, "/".join(parts))


def check_scheme(path: str) -> None:
    """Refuse an address that is no path and no address in object storage, such as S3://bucket or https://server.

    The message does not contain the address, which may have a password or a signature.

    Raises:
        WrongUsage: It is such an address.
    """
    match = _ANY_ADDRESS.match(path)
    if match is None or is_address(path) or os.path.exists(path):
        return
    scheme = match[1].lower()
    if scheme in SCHEMES:
        raise WrongUsage(
            f"an address in object storage does not begin with {match[0]}: write {scheme}://BUCKET/FOLDER"
        )
    if match[2] == "//":
        raise WrongUsage(
            f"addresses that begin with {match[0]} are unsupported: pass a local folder, or one in object storage "
            f"({', '.join(f'{name}://' for name in SCHEMES)})"
        )


def shown_address(text: str) -> str:
    """Return an address for a message, without a user name, a password and a signature."""
    scheme, _, rest = text.partition("://")
    place, mark, query = rest.partition("?")
    if "@" in query:  # it may be the end of a password
        return shown(f"{scheme}://…")
    _, at, place = place.rpartition("@")
    return shown(f"{scheme}://{'…' if at else ''}{at}{place}{'?…' if mark else ''}")


def joined(folder: str, path: str) -> str:
    """Return a path that is relative to a folder; an address and an absolute path are returned as they are."""
    return path if is_address(path) else os.path.join(folder, path)


def real_place(path: str) -> str:
    """Return a path without links, or an address without redundant parts. Two names of a place have the same."""
    if not is_address(path):
        return os.path.realpath(path)
    try:
        return str(parse_address(path))
    except WrongUsage:
        return path


def check_is_local(root: str | os.PathLike[str]) -> None:
    """Refuse object storage for a data set that is downloaded.

    Raises:
        WrongUsage: The folder is in object storage.
    """
    if is_address(os.fspath(root)):
        raise WrongUsage(
            f"{os.fspath(root)}: this data set is downloaded to a local folder; for your own images in object storage "
            "add --data finetune.ImageFolderData"
        )


def check_address(path: str) -> None:
    """Check an address before anything is imported or read.

    Raises:
        WrongUsage: It is invalid, or the extra for object storage is not installed.
    """
    address = parse_address(path)
    if importlib.util.find_spec("obstore") is None:
        raise WrongUsage(f"{address} needs the package obstore: {install(EXTRA)}")
