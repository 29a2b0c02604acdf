"""A stand-in for the API of the Hugging Face hub on loopback: repositories, files, tokens and faults."""

import hashlib
import json
import re
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from urllib.parse import unquote

import pytest

from finetune.models import hub

TOKEN = "hf_ASecretThatNobodyMaySee"
_FILE = re.compile(r"/(?P<repo>(?:datasets/)?[^/]+/[^/]+)/resolve/(?P<revision>[^/]+)/(?P<file>.+)")
_DATASET = re.compile(
    r"/api/(?P<repo>datasets/[^/]+/[^/]+)/(?P<action>revision|tree)/(?P<revision>[^/]+)"
)

# Returns what to do with a request, by its method and path: "" to answer it, "unavailable" for status 503, "limited"
# for status 429, "cut" to send half of the body.
Fault = Callable[[str, str], str]


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

    @property
    def files(self) -> dict[str, bytes]:
        """The files of the newest commit."""
        return [*self.commits.values()][-1]


class HubServer:
    """The server.

    Attributes:
        repositories: By OWNER/NAME, datasets by datasets/OWNER/NAME.
        requests: Method, path and token of each request; "" for no token.
        fault: The fault of each request.
    """

    def __init__(self) -> None:
        self.repositories: dict[str, Repository] = {}
        self.requests: list[tuple[str, str, str]] = []
        self.user_agents: set[str] = set()
        self.fault: Fault = lambda method, path: ""
        server = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"
            wbufsize = -1
            disable_nagle_algorithm = True

            def do_GET(self) -> None:
                server.answer(self)

            do_HEAD = do_GET

            def log_message(self, *args: Any) -> None:
                pass

        class Server(ThreadingHTTPServer):
            daemon_threads = True
            request_queue_size = 128

        self._server = Server(("127.0.0.1", 0), Handler)
        self._server.handle_error = lambda *args: None  # type: ignore[method-assign]
        self.address = f"http://127.0.0.1:{self._server.server_port}"
        threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True).start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()

    def answer(self, request: BaseHTTPRequestHandler) -> None:
        token = request.headers.get("Authorization", "").removeprefix("Bearer ")
        path = request.path.partition("?")[0]
        self.requests.append((request.command, path, token))
        self.user_agents.add(request.headers.get("User-Agent", ""))
        fault = self.fault(request.command, path)
        headers: dict[str, str] = {}
        if fault in ("unavailable", "limited"):
            status = 503 if fault == "unavailable" else 429
            content = b""
        elif match := _DATASET.fullmatch(path):
            status, headers, content = self._dataset(match, token)
        else:
            status, headers, content = self._respond(path, token)
        part = re.fullmatch(r"bytes=(\d+)-(\d*)", request.headers.get("Range", ""))
        if part and status == 200:
            status = 206
            first = int(part[1])
            last = min(int(part[2] or len(content)), len(content) - 1)
            headers["Content-Range"] = f"bytes {first}-{last}/{len(content)}"
            content = content[first : last + 1]
        request.send_response(status)
        for name, value in {"Content-Length": str(len(content)), **headers}.items():
            request.send_header(name, value)
        request.end_headers()
        if request.command == "HEAD":
            return
        if fault == "cut":
            content = content[: len(content) // 2]
            request.close_connection = True
        request.wfile.write(content)

    def _respond(self, path: str, token: str) -> tuple[int, dict[str, str], bytes]:
        if token not in ("", TOKEN):
            return 401, {"X-Error-Message": "Invalid credentials in Authorization header"}, b""
        match = _FILE.fullmatch(path)
        repository = self.repositories.get(match["repo"]) if match else None
        if match is None or repository is None or (repository.is_private and not token):
            status = 404 if token else 401
            return status, {"X-Error-Code": "RepoNotFound"}, b""
        return self._file(repository, match["revision"], unquote(match["file"]))

    def _dataset(self, match: re.Match[str], token: str) -> tuple[int, dict[str, str], bytes]:
        """Answer a question about a dataset: the commit of a revision, or its files."""
        repository = self.repositories.get(match["repo"])
        if repository is None or (repository.is_private and token != TOKEN):
            return 404 if token == TOKEN else 401, {"X-Error-Code": "RepoNotFound"}, b""
        if token not in ("", TOKEN):
            return 401, {"X-Error-Message": "Invalid credentials in Authorization header"}, b""
        if repository.is_gated:
            return 403, {"X-Error-Code": "GatedRepo"}, b""
        found = repository.at(unquote(match["revision"]))
        if found is None:
            return 404, {"X-Error-Code": "RevisionNotFound"}, b""
        oid, files = found
        if match["action"] == "revision":
            return _as_json({"id": match["repo"].partition("/")[2], "sha": oid})
        return _as_json([_description(name, files) for name in sorted(files)])

    def _file(
        self, repository: Repository, revision: str, name: str
    ) -> tuple[int, dict[str, str], bytes]:
        found = repository.at(revision)
        if found is None:
            return 404, {"X-Error-Code": "RevisionNotFound"}, b""
        oid, files = found
        if name not in files:
            return 404, {"X-Error-Code": "EntryNotFound", "X-Repo-Commit": oid}, b""
        etag = hashlib.sha256(files[name]).hexdigest()
        return 200, {"ETag": f'"{etag}"', "X-Repo-Commit": oid}, files[name]


def _description(name: str, files: dict[str, bytes]) -> dict[str, Any]:
    content = files[name]
    oid = hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()
    return {"type": "file", "oid": oid, "size": len(content), "path": name}


def _as_json(value: Any, status: int = 200) -> tuple[int, dict[str, str], bytes]:
    return status, {"Content-Type": "application/json"}, json.dumps(value).encode()


def environment(server: HubServer, folder: Path, token: str = TOKEN) -> dict[str, str]:
    """Return the environment variables of a new process that uses the server."""
    return {
        "HF_ENDPOINT": server.address,
        "HF_HOME": str(folder),
        "HF_TOKEN": token,
        "HF_HUB_DISABLE_XET": "1",  # the server has git LFS only
    }


@contextmanager
def hub_server(folder: Path) -> Iterator[HubServer]:
    """Yield a server that the hub's client in this process uses, with an empty cache in a folder and without waits."""
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
    server.close()


def put_folder(server: HubServer, name: str, folder: Path, prefix: str) -> str:
    """Commit the files of a folder to a dataset, and return the commit."""
    repository = server.repositories.setdefault(f"datasets/{name}", Repository())
    return repository.commit(
        {
            f"{prefix}/{path.relative_to(folder).as_posix()}": path.read_bytes()
            for path in sorted(folder.rglob("*"))
            if path.is_file()
        }
    )
