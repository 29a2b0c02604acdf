"""A stand-in for the API of the Hugging Face hub on loopback: repositories, files, tokens and faults."""

import hashlib
import json
import re
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from urllib.parse import unquote

import pytest
from loopback import Answer, LoopbackServer, reply
from object_server import Fault, no_fault

from finetune.models import hub

TOKEN = "hf_ASecretThatNobodyMaySee"
_FILE = re.compile(r"/(?P<repo>(?:datasets/)?[^/]+/[^/]+)/resolve/(?P<revision>[^/]+)/(?P<file>.+)")
_DATASET = re.compile(
    r"/api/(?P<repo>datasets/[^/]+/[^/]+)/(?P<action>revision|tree)/(?P<revision>[^/]+)"
)


@dataclass
class Repository:
    """A repository with the files of each commit, by the hash of the commit."""

    is_private: bool = False
    is_gated: bool = False
    commits: dict[str, dict[str, bytes]] = field(default_factory=dict)

    def commit(self, files: dict[str, bytes]) -> str:
        before = [*self.commits.values()][-1] if self.commits else {}
        oid = hashlib.sha1(b"".join([b"%d" % len(self.commits), *files.values()])).hexdigest()
        self.commits[oid] = {**before, **files}
        return oid

    def at(self, revision: str) -> tuple[str, dict[str, bytes]] | None:
        oid = [*self.commits][-1] if revision == "main" and self.commits else revision
        return (oid, self.commits[oid]) if oid in self.commits else None


class HubServer(LoopbackServer):
    """The server.

    Attributes:
        repositories: By OWNER/NAME, datasets by datasets/OWNER/NAME.
        requests: Method, path and token of each request; "" for no token.
        user_agents: What the clients say about themselves.
        fault: The fault of each request: "unavailable" for status 503, "truncate" to send half of the body.
    """

    def __init__(self) -> None:
        self.repositories: dict[str, Repository] = {}
        self.requests: list[tuple[str, str, str]] = []
        self.user_agents: set[str] = set()
        self.fault: Fault = no_fault
        super().__init__()

    def put_folder(self, folder: Path, name: str, prefix: str) -> str:
        """Commit the files of a folder to a dataset, and return the commit."""
        repository = self.repositories.setdefault(f"datasets/{name}", Repository())
        files = [path for path in sorted(folder.rglob("*")) if path.is_file()]
        return repository.commit(
            {f"{prefix}/{path.relative_to(folder).as_posix()}": path.read_bytes() for path in files}
        )

    def answer(self, request: BaseHTTPRequestHandler) -> None:
        token = request.headers.get("Authorization", "").removeprefix("Bearer ")
        path = request.path.partition("?")[0]
        self.requests.append((request.command, path, token))
        self.user_agents.add(request.headers.get("User-Agent", ""))
        fault = self.fault(request.command, path)
        if fault == "unavailable":
            reply(request, (503, {}, b""))
            return
        status, headers, content = self._answer(path, token)
        part = re.fullmatch(r"bytes=(\d+)-(\d*)", request.headers.get("Range", ""))
        if part and status == 200:
            status = 206
            first = int(part[1])
            last = min(int(part[2] or len(content)), len(content) - 1)
            headers["Content-Range"] = f"bytes {first}-{last}/{len(content)}"
            content = content[first : last + 1]
        reply(request, (status, headers, content), len(content) // 2 if fault else None)

    def _answer(self, path: str, token: str) -> Answer:
        match = _DATASET.fullmatch(path) or _FILE.fullmatch(path)
        repository = self.repositories.get(match["repo"]) if match else None
        if token not in ("", TOKEN):
            return 401, {"X-Error-Message": "Invalid credentials in Authorization header"}, b""
        if match is None or repository is None or (repository.is_private and not token):
            return 404 if token else 401, {"X-Error-Code": "RepoNotFound"}, b""
        if repository.is_gated:
            return 403, {"X-Error-Code": "GatedRepo"}, b""
        found = repository.at(unquote(match["revision"]))
        if found is None:
            return 404, {"X-Error-Code": "RevisionNotFound"}, b""
        oid, files = found
        parts = match.groupdict()
        if "file" in parts:
            return _file(files, unquote(parts["file"]), oid)
        if parts["action"] == "revision":
            return _as_json({"id": parts["repo"].partition("/")[2], "sha": oid})
        return _as_json([_description(name, content) for name, content in sorted(files.items())])


def _file(files: dict[str, bytes], name: str, oid: str) -> Answer:
    if name not in files:
        return 404, {"X-Error-Code": "EntryNotFound", "X-Repo-Commit": oid}, b""
    etag = hashlib.sha256(files[name]).hexdigest()
    return 200, {"ETag": f'"{etag}"', "X-Repo-Commit": oid}, files[name]


def _description(name: str, content: bytes) -> dict[str, Any]:
    oid = hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()
    return {"type": "file", "oid": oid, "size": len(content), "path": name}


def _as_json(value: Any) -> Answer:
    return 200, {"Content-Type": "application/json"}, json.dumps(value).encode()


@contextmanager
def hub_server(folder: Path) -> Iterator[HubServer]:
    """Yield a server that the hub's client in this process uses, with an empty cache in a folder and without waits.

    The client reads its environment when it is imported, which may have been long ago.
    """
    from huggingface_hub import constants, file_download
    from huggingface_hub.utils import _http

    server = HubServer()
    with pytest.MonkeyPatch.context() as patch:
        template = server.address + "/{repo_id}/resolve/{revision}/{filename}"
        patch.setattr(constants, "ENDPOINT", server.address)
        patch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
        patch.setattr(constants, "HF_HUB_CACHE", str(folder / "hub"))
        patch.setattr(constants, "HF_TOKEN_PATH", str(folder / "token"))
        patch.setattr(constants, "HF_HUB_DISABLE_XET", True)
        patch.setattr(constants, "HF_HUB_OFFLINE", False)
        without_waits = SimpleNamespace(**vars(time) | {"sleep": lambda seconds: None})
        patch.setattr(_http, "time", without_waits)
        patch.setattr(file_download, "time", without_waits)
        patch.setenv("HF_TOKEN", TOKEN)
        hub.download_model.cache_clear()
        yield server
    hub.download_model.cache_clear()
    server.stop()
