"""Images in datasets of the Hugging Face hub, such as hf://datasets/OWNER/NAME@REVISION/FOLDER. They are only read.

A folder is listed once, at the commit that the revision names then, and its files are read at this commit. The client
of the hub lists them, with the server of HF_ENDPOINT and the token of `hf auth login` or HF_TOKEN. obstore reads them,
as in `listed_storage`. The hub redirects requests for large files to another server, which does not get the token.
"""

import re
from collections.abc import Callable, Iterator
from typing import Any, TypeVar
from urllib.parse import quote, urlsplit

import obstore
from huggingface_hub import constants, errors, hf_hub_url
from huggingface_hub.utils import build_hf_headers, hf_raise_for_status, http_backoff
from obstore.store import HTTPStore

from finetune.data.addresses import Address, StorageError, parse_address, repository_of
from finetune.data.listed_storage import ListedStorage
from finetune.data.object_requests import client_options, interruptible, retries_within
from finetune.data.object_tree import Object, Tree
from finetune.models.hub import hub_errors
from finetune.system.messages import shown

# A request for an image is repeated for this long: the hub limits the number of requests in five minutes.
RETRY_SECONDS = 330.0
# Retries of a request for the list, after 1, 2, 4 and 8 seconds, or as long as the hub demands.
_NUM_RETRIES = 4
_ANSWER_SECONDS = 30.0
_COMMIT = re.compile("[0-9a-f]{40,64}")
_SIZE_LIMIT = 2**63  # bytes; sizes are stored as int64

_Result = TypeVar("_Result")


class HubStorage(ListedStorage):
    """The datasets of the hub. All methods may be used in threads, but not in forked workers."""

    def _list(self, address: Address) -> Tree:
        try:
            with hub_errors(f"cannot list {address}"):
                return interruptible(lambda: _tree_of(address))
        except OSError as error:
            raise StorageError(str(error)) from None

    def _get(self, client: Any, address: Address, listed: Object | None) -> Any:
        return obstore.get(client, address.key)  # a commit does not change

    def _send(self, path: str, request: Callable[[], _Result]) -> _Result:
        try:
            return super()._send(path, request)
        except FileNotFoundError:
            if self._listed(path) is None:
                raise
            raise StorageError(
                f"{path} does not exist any more: the repository or its commit was deleted after it was listed. Start "
                "again to list it anew"
            ) from None

    def _client_of(self, address: Address, seconds: float | None = None) -> Any:
        commit = self.commit(str(address))
        repository = repository_of(address).repository
        at_commit = address._replace(bucket=f"datasets/{repository}@{commit}")
        return super()._client_of(at_commit, RETRY_SECONDS if seconds is None else seconds)

    def _new_client(self, place: str, seconds: float) -> Any:
        repository, commit = repository_of(parse_address(place))
        url = hf_hub_url(repository, "", repo_type="dataset", revision=commit).rstrip("/")
        # without encryption if HF_ENDPOINT says so, as the client of the hub
        options = client_options(is_http_allowed=url.startswith("http://"))
        headers = build_hf_headers()
        options["user_agent"] = headers.pop("user-agent")
        options["default_headers"] = headers
        return HTTPStore.from_url(url, client_options=options, retry_config=retries_within(seconds))


def _tree_of(address: Address) -> Tree:
    """Return the files in a folder at the newest commit of its revision, or the single file of this address."""
    repository, revision = repository_of(address)
    api = f"{constants.ENDPOINT}/api/datasets/{repository}"
    name = quote(revision or constants.DEFAULT_REVISION, safe="")
    described = _json(_answer(f"{api}/revision/{name}?expand=sha"))
    commit = described.get("sha") if isinstance(described, dict) else None
    if not isinstance(commit, str) or not _COMMIT.fullmatch(commit):
        raise StorageError(_unexpected(f"there is no commit in the description of {repository}"))
    try:
        items = list(_items_in(f"{api}/tree/{commit}", address.key))
    except errors.RemoteEntryNotFoundError:  # perhaps it is a file
        form = {"paths": [address.key], "expand": False}
        items = _list_of(_answer(f"{api}/paths-info/{commit}", form)) if address.key else []
    place = str(address._replace(key=""))
    objects = {
        f"{place}/{item['path']}": _described_object(item, address.key)
        for item in items
        if item.get("type") == "file"
    }
    return Tree(str(address), objects, commit=commit)


def _items_in(api: str, folder: str) -> Iterator[dict[str, Any]]:
    """Yield what is in a folder and its subfolders, as the hub describes it."""
    url = f"{api}/{quote(folder, safe='')}" if folder else api
    query = "recursive=true"
    queries = {""}
    while True:
        queries.add(query)
        answer = _answer(f"{url}?{query}")
        yield from _list_of(answer)
        link = answer.links.get("next")
        if link is None:
            return
        # only the place in the list: the token is not sent to another server that a link names
        query = urlsplit(link["url"]).query
        if query in queries:
            raise StorageError(_unexpected("the link to the next page of a list is invalid"))


def _described_object(item: dict[str, Any], folder: str) -> Object:
    """Return a file of a list.

    Args:
        item: The file, as the hub describes it.
        folder: The folder that was listed, or the file itself; "" for the complete dataset.

    Raises:
        StorageError: The description is incomplete, or the file is not in the folder.
    """
    path = item.get("path")
    size = item.get("size")
    hashed = item["lfs"] if isinstance(item.get("lfs"), dict) else item
    oid = hashed.get("oid")
    if not isinstance(path, str) or not isinstance(size, int) or not isinstance(oid, str):
        raise StorageError(_unexpected(f"the size or the hash of {shown(str(path))} is missing"))
    if not 0 <= size < _SIZE_LIMIT:
        raise StorageError(_unexpected(f"the size of {shown(path)} is {size}"))
    is_inside = not folder or path == folder or path.startswith(f"{folder}/")
    if not is_inside or {"", ".", ".."}.intersection(path.split("/")):
        raise StorageError(_unexpected(f"{shown(path)} is not in the folder that was listed"))
    return Object(size, 0, oid)


def _list_of(answer: Any) -> list[dict[str, Any]]:
    items = _json(answer)
    if not isinstance(items, list) or not all(isinstance(item, dict) for item in items):
        raise StorageError(_unexpected("the answer is not a list of files"))
    return items


def _json(answer: Any) -> Any:
    try:
        return answer.json()
    except (ValueError, RecursionError):
        raise StorageError(_unexpected("the answer is not JSON")) from None


def _unexpected(what: str) -> str:
    return f"{constants.ENDPOINT} does not answer as the hub does ({what}): check HF_ENDPOINT"


def _answer(url: str, form: dict[str, Any] | None = None) -> Any:
    """Return the answer of the hub to a request: a POST with a form if there is one, else a GET."""
    answer = http_backoff(
        "GET" if form is None else "POST",
        url,
        max_retries=_NUM_RETRIES,
        data=form,
        headers=build_hf_headers(),
        timeout=_ANSWER_SECONDS,
    )
    hf_raise_for_status(answer)
    return answer
