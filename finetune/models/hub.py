"""Models on the Hugging Face hub: addresses such as hf://OWNER/NAME@REVISION, and the download of their files.

A request is made only for an address that the user names. The server is that of HF_ENDPOINT, and the token that of
`hf auth login` or HF_TOKEN. This module imports nothing heavy.
"""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import NamedTuple

from finetune.system.messages import WrongUsage, reason, shown

SCHEME = "hf://"
# the files of a model in timm's layout
CONFIG_FILE = "config.json"
WEIGHTS_FILE = "model.safetensors"

_NAME = r"[A-Za-z0-9_][A-Za-z0-9_.-]*"
_ADDRESS = re.compile(rf"(?P<repository>{_NAME}/{_NAME})(?:@(?P<revision>[A-Za-z0-9_./-]+))?")
# names that match the address, but that the hub does not allow
_UNSUPPORTED_NAME = re.compile(r"[^/]{97,}|--|\.\.|[.-](?:/|$)|\.git$")
_LOGIN = "hf auth login, or HF_TOKEN"
_SHOWN_COMMIT = 12  # characters of its hash
_LONGEST = 200  # characters of an answer of the server
# What errors of the client mean, by their names.
_REFUSALS = {
    "GatedRepoError": f"its owner grants access: request it on its page, then log in ({_LOGIN})",
    "RevisionNotFoundError": "there is no such revision",
    "RemoteEntryNotFoundError": "there is no such file, and weights in other formats are not loaded",
    "RepositoryNotFoundError": f"there is no such repository, or the token may not read it ({_LOGIN})",
}


class HubAddress(NamedTuple):
    """The address of a model.

    Attributes:
        repository: OWNER/NAME.
        revision: A branch, a tag or a commit; None for the default branch.
    """

    repository: str
    revision: str | None


def is_hub(path: object) -> bool:
    """Return whether a value is an address on the hub."""
    return isinstance(path, str) and path.startswith(SCHEME)


def parse_hub_address(path: str) -> HubAddress:
    """Return the parts of an address.

    Raises:
        WrongUsage: It is not hf://OWNER/NAME or hf://OWNER/NAME@REVISION, or the hub allows no such name or revision.
    """
    match = _ADDRESS.fullmatch(path.removeprefix(SCHEME))
    if match is None:  # not shown, since it may hold a password
        raise WrongUsage(
            f"an address on the Hugging Face hub is {SCHEME}OWNER/NAME or {SCHEME}OWNER/NAME@REVISION, "
            f"and of images {SCHEME}datasets/OWNER/NAME"
        )
    if _UNSUPPORTED_NAME.search(match["repository"]):
        raise WrongUsage(
            f"the Hugging Face hub allows no name {shown(match['repository'])}: choose one of at most 96 characters, "
            "without -- and .., that does not end with '-', '.' or '.git'"
        )
    revision = match["revision"]
    # in an URL, such parts would lead to another page
    if revision is not None and {"", ".", ".."}.intersection(revision.split("/")):
        raise WrongUsage(f"{shown(revision)} is not a revision: it has an empty part, . or ..")
    return HubAddress(match["repository"], revision)


@cache
def download_model(path: str) -> Path:
    """Download the config and the weights of one commit to the cache of the hub's client. Cached for this process.

    Returns:
        The folder with both files, named like the commit.

    Raises:
        WrongUsage: The address is invalid.
        OSError: The files cannot be downloaded.
    """
    folder = _download(parse_hub_address(path), CONFIG_FILE).parent
    _download(HubAddress(parse_hub_address(path).repository, folder.name), WEIGHTS_FILE)
    return folder


def download_weights(path: str) -> Path:
    """Download the weights, and return the file in the cache of the hub's client. See `download_model`."""
    return _download(parse_hub_address(path), WEIGHTS_FILE)


def cached_model(path: str) -> Path | None:
    """Return the folder of a cached model; None if it is not cached. Makes no request."""
    from huggingface_hub import try_to_load_from_cache

    repository, revision = parse_hub_address(path)
    file = try_to_load_from_cache(repository, CONFIG_FILE, revision=revision)
    return Path(file).parent if isinstance(file, str) else None


def name_with_commit(path: str, folder: Path) -> str:
    """Return an address with the commit that was downloaded, for messages."""
    return f"{path} (commit {folder.name[:_SHOWN_COMMIT]})"


def _download(address: HubAddress, name: str) -> Path:
    from huggingface_hub import hf_hub_download

    with hub_errors(f"cannot download {name} of {SCHEME}{address.repository}"):
        return Path(hf_hub_download(address.repository, name, revision=address.revision))


@contextmanager
def hub_errors(action: str) -> Iterator[None]:
    """Convert errors of the hub's client into an OSError of one line, and suppress its log lines; see `quiet_hub`.

    Args:
        action: The beginning of the message: what failed.
    """
    from huggingface_hub import errors

    try:
        with quiet_hub():
            yield
    except (errors.HTTPError, OSError, RuntimeError) as error:
        # of this machine, such as a full disk
        if isinstance(error, OSError) and error.errno is not None:
            raise
        raise OSError(f"{action}: {_reason(error)}") from error


@contextmanager
def quiet_hub() -> Iterator[None]:
    """Suppress the log lines of the hub's client, about two dozen for its retries. The final error is reported."""
    from huggingface_hub.utils import logging

    level = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(level)


def _reason(error: BaseException) -> str:
    """Return why a request failed, and what to do. Headers of the request, which have the token, are not part of it."""
    from huggingface_hub import constants, errors

    cause = error.__cause__
    answer = error if isinstance(error, errors.HfHubHTTPError) else cause
    if isinstance(answer, errors.HfHubHTTPError):
        named = (
            text for kind, text in _REFUSALS.items() if isinstance(answer, getattr(errors, kind))
        )
        message = shown(" ".join((answer.server_message or "try again later").split()))
        code = answer.response.status_code
        advice = f" ({_LOGIN})" if code in (401, 403) else ""
        return next(
            named,
            f"{constants.ENDPOINT} answered with status {code}: {message[:_LONGEST]}{advice}",
        )
    if isinstance(error, errors.OfflineModeIsEnabled) or constants.HF_HUB_OFFLINE:
        return "HF_HUB_OFFLINE forbids requests, and it is not in the cache"
    if isinstance(error, errors.LocalEntryNotFoundError):
        return f"{constants.ENDPOINT} cannot be reached, and it is not in the cache"
    of_request = cause if isinstance(cause, errors.HTTPError) else error
    message = shown(reason(of_request)) or type(of_request).__name__
    return f"the connection to {constants.ENDPOINT} failed ({message})"
