"""Images in datasets of the Hugging Face hub, such as hf://datasets/OWNER/NAME@REVISION/FOLDER. They are only read.

A folder is listed once, at the commit that the revision names then, and its files are read at this commit. The client
of the hub lists them, with the server of HF_ENDPOINT and the token of `hf auth login` or HF_TOKEN. obstore reads them,
as in `object_storage`. The hub redirects requests for large files to another server, which does not get the token.
"""

from collections.abc import Callable, Iterator
from typing import Any, TypeVar
from urllib.parse import quote

import obstore
from huggingface_hub import constants, errors, hf_hub_url
from huggingface_hub.utils import build_hf_headers, hf_raise_for_status, http_backoff
from obstore.store import HTTPStore

from finetune.data.addresses import Address, StorageError, parse_address, repository_of
from finetune.data.object_storage import (
    Object,
    ObjectStorage,
    Tree,
    client_options,
    interruptible,
    retries_within,
)
from finetune.data.storage import Entry, Kind
from finetune.models.hub import hub_errors

# A request for an image is repeated for this long: the hub limits the number of requests in five minutes.
RETRY_SECONDS = 330.0
_NUM_RETRIES = (
    4  # of a request for the list, after 1, 2, 4 and 8 seconds, or as long as the hub demands
)
_ANSWER_SECONDS = 30.0

_Result = TypeVar("_Result")


class HubStorage(ObjectStorage):
    """The datasets of the hub. All methods may be used in threads, but not in forked workers."""

    def kind(self, path: str) -> Kind:
        self._list_once(path)
        return super().kind(path)

    def entries(self, folder: str) -> Iterator[Entry]:
        self._list_once(folder)
        return super().entries(folder)

    def _list_once(self, path: str) -> None:
        if self._tree(self.normal(path)) is None:
            self.refresh(path)

    def _list(self, address: Address) -> Tree:
        try:
            with hub_errors(f"cannot list {address}"):
                return interruptible(lambda: _tree_of(address))
        except OSError as error:
            raise StorageError(str(error)) from None

    def _get(self, store: Any, address: Address, listed: Object | None) -> Any:
        return obstore.get(store, address.key)  # a commit does not change

    def _ask(self, path: str, request: Callable[[], _Result]) -> _Result:
        try:
            return super()._ask(path, request)
        except FileNotFoundError:
            if self._listed(path) is None:
                raise
            message = "the repository or its commit was deleted after it was listed"
            raise StorageError(f"{path} does not exist any more: {message}") from None

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
    commit = _answer(f"{api}/revision/{name}?expand=sha").json()["sha"]
    try:
        items = list(_items_in(f"{api}/tree/{commit}", address.key))
    except errors.RemoteEntryNotFoundError:  # perhaps it is a file
        asked = {"paths": [address.key], "expand": False}
        items = _answer(f"{api}/paths-info/{commit}", asked).json() if address.key else []
    place = str(address._replace(key=""))
    objects = {
        f"{place}/{item['path']}": Object(item["size"], 0, item.get("lfs", item)["oid"])
        for item in items
        if item["type"] == "file"
    }
    return Tree(str(address), objects, commit=commit)


def _items_in(api: str, folder: str) -> Iterator[dict[str, Any]]:
    """Yield what is in a folder and its subfolders, as the hub describes it."""
    inside = f"/{quote(folder, safe='')}" if folder else ""
    url: str | None = f"{api}{inside}?recursive=true"
    while url is not None:
        answer = _answer(url)
        yield from answer.json()
        url = answer.links.get("next", {}).get("url")


def _answer(url: str, sent: dict[str, Any] | None = None) -> Any:
    """Return the answer of the hub to a request, which sends a form if there is one."""
    answer = http_backoff(
        "GET" if sent is None else "POST",
        url,
        max_retries=_NUM_RETRIES,
        data=sent,
        headers=build_hf_headers(),
        timeout=_ANSWER_SECONDS,
    )
    hf_raise_for_status(answer)
    return answer
