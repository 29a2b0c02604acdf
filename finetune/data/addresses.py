"""Addresses of images: in object storage, such as s3://bucket/folder, or in a dataset of the Hugging Face hub.

Credentials and endpoints come from the environment only. So no address holds a password, and addresses may be
written to configs, logs and reports. This module imports nothing heavy.
"""

import os
import re
from typing import NamedTuple
from urllib.parse import unquote

from finetune.models.hub import HubAddress, parse_hub_address
from finetune.system.messages import WrongUsage

SCHEMES = ("s3", "gs", "az")  # S3 and compatible servers, Google Cloud Storage, Azure Blob Storage
HUB = "hf"
DATASETS = "hf://datasets/"  # other addresses there are models

_ANY_ADDRESS = re.compile(r"([A-Za-z][A-Za-z0-9+.-]+):(//?)")
_BUCKET = re.compile(r"[A-Za-z0-9$][A-Za-z0-9._-]*")
_REPOSITORY = re.compile(r"datasets/([^/]*/[^/]*)(?:/(.*))?", re.DOTALL)


class StorageError(ValueError):
    """Object storage that cannot be reached or refuses access, or an object that was replaced while in use.

    It is not an OSError, because no single file is at fault: code that skips unreadable files must not catch it.
    """


class Address(NamedTuple):
    """An address in parts. `key` has no slash at its ends, and is "" for a complete bucket.

    The bucket of a dataset on the hub is datasets/OWNER/NAME or datasets/OWNER/NAME@REVISION.
    """

    scheme: str
    bucket: str
    key: str

    def __str__(self) -> str:
        place = f"{self.scheme}://{self.bucket}"
        return f"{place}/{self.key}" if self.key else place


def is_address(path: object) -> bool:
    """Return whether a path is an address of images: in object storage or on the hub."""
    return is_in_bucket(path) or is_dataset(path)


def is_in_bucket(path: object) -> bool:
    """Return whether a path is an address in object storage, the only ones that are written to."""
    return _scheme(path) in SCHEMES


def _scheme(path: object) -> str:
    """Return the scheme of an address, such as s3; "" for a path."""
    return path.partition("://")[0] if isinstance(path, str) and "://" in path else ""


def is_dataset(path: object) -> bool:
    """Return whether a path is an address in a dataset of the hub."""
    return isinstance(path, str) and path.startswith(DATASETS)


def parse_address(path: str) -> Address:
    """Return the parts of an address, without empty parts and single dots in the key.

    Raises:
        WrongUsage: The bucket or the repository is missing or invalid, or the address has a password or the part '..'.
    """
    scheme, _, rest = path.partition("://")
    if scheme == HUB:
        match = _REPOSITORY.fullmatch(rest)
        bucket = f"datasets/{match[1]}" if match else rest
        repository_of(Address(scheme, bucket, ""))  # checks it
        key = match[2] or "" if match else ""
    else:
        bucket, _, key = rest.partition("/")
        _check_bucket(scheme, bucket)
    parts = [part for part in key.split("/") if part not in ("", ".")]
    if ".." in parts:
        raise WrongUsage(f"an address ({scheme}://…) has the part '..': write it without")
    return Address(scheme, bucket, "/".join(parts))


def _check_bucket(scheme: str, bucket: str) -> None:
    # a password may contain slashes, so nothing of such an address is shown
    if not _BUCKET.fullmatch(bucket):
        raise WrongUsage(
            f"an address has no valid bucket, or a user name, a password or a port: write {scheme}://BUCKET/FOLDER, "
            "and set environment variables such as AWS_ACCESS_KEY_ID and AWS_ENDPOINT_URL"
        )


def repository_of(address: Address) -> HubAddress:
    """Return the repository of an address on the hub, with its revision, in which %2F stands for a slash.

    Raises:
        WrongUsage: It is not a valid name.
    """
    name = address.bucket.removeprefix("datasets/")
    return parse_hub_address(f"{HUB}://{unquote(name)}")


def check_scheme(path: str) -> None:
    """Check that a text that looks like an address is one of images: S3://bucket and ftp://server are not.

    The message does not contain the address, which may have a password or a signature.

    Raises:
        WrongUsage: It is another address, and there is no file with this name.
    """
    match = _ANY_ADDRESS.match(path)
    if match is None or is_address(path) or os.path.exists(path):
        return
    if match[2] == "//" or match[1].lower() in (*SCHEMES, "http", "https"):
        raise WrongUsage(
            f"images at {match[0]} are not read: download them and pass the local folder, or pass "
            f"{', '.join(f'{name}://BUCKET/FOLDER' for name in SCHEMES)}, or {DATASETS}OWNER/NAME"
        )


def joined(folder: str, path: str) -> str:
    """Return a path that is relative to a folder; an address and an absolute path are returned as they are."""
    return path if is_address(path) else os.path.join(folder, path)


def real_place(path: str) -> str:
    """Return a path without links, or an address without redundant parts. Two names of a place have the same.

    Revisions of a dataset are states of one place, as those of a folder whose files change.
    """
    if not is_address(path):
        return os.path.realpath(path)
    try:
        address = parse_address(path)
    except WrongUsage:
        return path
    return str(address._replace(bucket=address.bucket.partition("@")[0]))


def check_is_local(root: str | os.PathLike[str]) -> None:
    """Check that the folder of a data set that is downloaded is not an address.

    Raises:
        WrongUsage: It is an address.
    """
    if is_address(os.fspath(root)):
        raise WrongUsage(
            f"{os.fspath(root)}: this data set is downloaded to a local folder; for your own images at an address "
            "add --data finetune.ImageFolderData"
        )
