"""A small S3 server on loopback, which answers the requests of `finetune` from memory, and can be made to fail."""

import hashlib
import re
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import lru_cache
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from urllib.parse import parse_qs, unquote, urlsplit
from xml.sax.saxutils import escape, unescape

import pytest
from loopback import Answer, LoopbackServer, reply

BUCKET = "photos"
CREDENTIALS = {
    "AWS_ACCESS_KEY_ID": "key",
    "AWS_SECRET_ACCESS_KEY": "secret",
    "AWS_REGION": "us-east-1",
    "AWS_ALLOW_HTTP": "true",
}

# Returns what to do with a request, by its method and path: "" to answer it, "unavailable" for status 503, "deny" for
# 403, "cut" to close the connection, "truncate" to send half of the body, "garbage" to send what is not HTTP, or "lose"
# to do what it asks for without an answer.
Fault = Callable[[str, str], str]
_REFUSALS = {
    "unavailable": (503, b""),
    "deny": (403, b""),
}
_TIME = "Fri, 02 Jan 2026 03:04:05 GMT"
_hashing = threading.Lock()


def no_fault(method: str, path: str) -> str:
    return ""


@lru_cache(maxsize=64)
def _md5(content: bytes) -> str:
    return hashlib.md5(content).hexdigest()


def _e_tag(content: bytes) -> str:
    """Return the ETag of an object. It is computed once for many requests at the same time."""
    with _hashing:
        return f'"{_md5(content)}"'


class ObjectServer(LoopbackServer):
    """A server with one bucket.

    Attributes:
        objects: The content of the objects, by key.
        requests: Number of requests by method; LIST is one of its own.
        num_bytes: Bytes of the content that was sent.
        fault: The fault of each request.
        delay: Seconds before each answer.
        bytes_per_second: Rate at which content arrives, of all requests together; None for no limit.
        has_e_tags: Whether answers have an ETag.
    """

    def __init__(self) -> None:
        self.objects: dict[str, bytes] = {}
        self.requests: Counter[str] = Counter()
        self.num_bytes = 0
        self.fault: Fault = no_fault
        self.delay = 0.0
        self.bytes_per_second: float | None = None
        self.has_e_tags = True
        self._metadata: dict[str, dict[str, str]] = {}  # headers by key
        # of uploads that have not ended: their parts by number
        self._parts: dict[str, dict[int, bytes]] = {}
        self._link = threading.Lock()
        super().__init__()
        self.address = f"s3://{BUCKET}"

    @property
    def environment(self) -> dict[str, str]:
        """The environment variables of its clients."""
        return {**CREDENTIALS, "AWS_ENDPOINT_URL": f"http://127.0.0.1:{self.port}"}

    def stop(self) -> None:
        self.fault = lambda method, path: "cut"  # of connections that are open
        super().stop()

    def start(self) -> None:
        self.fault = no_fault
        super().start()

    def put(self, key: str, content: bytes) -> None:
        self.objects[key] = content

    def put_folder(self, folder: Path, prefix: str) -> str:
        """Put the files of a folder in the bucket, and return their address."""
        for path in sorted(folder.rglob("*")):
            if path.is_file():
                self.put(f"{prefix}/{path.relative_to(folder).as_posix()}", path.read_bytes())
        return f"{self.address}/{prefix}"

    def answer(self, request: BaseHTTPRequestHandler) -> None:
        is_list = request.command == "GET" and "list-type=2" in request.path
        self.requests["LIST" if is_list else request.command] += 1
        time.sleep(self.delay)
        sent = request.rfile.read(int(request.headers.get("Content-Length") or 0))
        if self.bytes_per_second is not None:
            with self._link:
                time.sleep(len(sent) / self.bytes_per_second)
        fault = self.fault(request.command, request.path)
        if fault in _REFUSALS:
            status, body = _REFUSALS[fault]
            reply(request, (status, {}, body))
            return
        if fault == "garbage":
            request.wfile.write(b"garbage\r\n\r\n")
        answer = None if fault in ("cut", "garbage") else self._answer(request, sent)
        if answer is None or fault == "lose":
            request.close_connection = True
            return
        num = len(answer[2])
        self.num_bytes += num
        reply(request, answer, num // 2 if fault == "truncate" else None)

    def _answer(self, request: BaseHTTPRequestHandler, sent: bytes) -> Answer:
        address = urlsplit(request.path)
        bucket, _, key = unquote(address.path).lstrip("/").partition("/")
        if bucket != BUCKET:
            return 404, {}, b"<Error><Code>NoSuchBucket</Code></Error>"
        query = parse_qs(address.query, keep_blank_values=True)
        if "delete" in query:
            return self._deleted(sent)
        if request.command in ("PUT", "POST"):
            return self._changed(request, key, query, sent)
        if not key:
            prefix = query.get("prefix", [""])[0]
            return 200, {}, self._listing(prefix, has_delimiter="delimiter" in query)
        return self._object(request, key)

    def _object(self, request: BaseHTTPRequestHandler, key: str) -> Answer:
        content = self.objects.get(key)
        if content is None:
            return 404, {}, b"<Error><Code>NoSuchKey</Code></Error>"
        e_tag = _e_tag(content)
        if request.headers.get("If-Match", e_tag) != e_tag:
            return 412, {}, b""
        headers = {"Last-Modified": _TIME, **self._metadata.get(key, {})}
        if self.has_e_tags:
            headers["ETag"] = e_tag
        match = re.fullmatch(r"bytes=(\d+)-(\d+)", request.headers.get("Range", ""))
        if not match:
            return 200, headers, content
        first = int(match[1])
        last = min(int(match[2]), len(content) - 1)
        headers["Content-Range"] = f"bytes {first}-{last}/{len(content)}"
        return 206, headers, content[first : last + 1]

    def _deleted(self, sent: bytes) -> Answer:
        keys = [unescape(match) for match in re.findall(r"<Key>(.*?)</Key>", sent.decode())]
        for key in keys:
            self.objects.pop(key, None)
        rows = "".join(f"<Deleted><Key>{escape(key)}</Key></Deleted>" for key in keys)
        return 200, {}, f"<DeleteResult>{rows}</DeleteResult>".encode()

    def _changed(
        self, request: BaseHTTPRequestHandler, key: str, query: dict[str, list[str]], sent: bytes
    ) -> Answer:
        """Write or copy an object, or receive its parts."""
        headers = {
            name.lower(): value
            for name, value in request.headers.items()
            if name.lower().startswith("x-amz-meta-")
        }
        if "uploads" in query:
            number = str(len(self._parts))
            self._parts[number] = {}
            self._metadata[number] = headers
            return 200, {}, f"<R><UploadId>{number}</UploadId></R>".encode()
        if "partNumber" in query:
            self._parts[query["uploadId"][0]][int(query["partNumber"][0])] = sent
            return 200, {"ETag": '"part"'}, b""
        if "uploadId" in query:
            number = query["uploadId"][0]
            sent = b"".join(part for _, part in sorted(self._parts[number].items()))
            headers = self._metadata.pop(number)
        if request.headers.get("If-None-Match") == "*" and key in self.objects:
            return 412, {}, b""
        source = request.headers.get("x-amz-copy-source")
        if source is not None:
            other = unquote(source).lstrip("/").partition("/")[2]
            sent = self.objects[other]
            headers = self._metadata.get(other, {})
        self.objects[key] = sent
        self._metadata[key] = headers
        e_tag = _e_tag(sent)
        is_described = source is not None or "uploadId" in query
        body = f"<R><ETag>{escape(e_tag)}</ETag></R>".encode() if is_described else b""
        return 200, {"ETag": e_tag}, body

    def _listing(self, prefix: str, has_delimiter: bool) -> bytes:
        folders: set[str] = set()
        rows: list[str] = []
        for key, content in sorted(self.objects.items()):
            if not key.startswith(prefix):
                continue
            name, slash, _ = key.removeprefix(prefix).partition("/")
            if has_delimiter and slash:
                folders.add(f"{prefix}{name}/")
            else:
                e_tag = f"<ETag>{escape(_e_tag(content))}</ETag>" if self.has_e_tags else ""
                rows.append(
                    f"<Contents><Key>{escape(key)}</Key><LastModified>2026-01-02T03:04:05.000Z</LastModified>"
                    f"{e_tag}<Size>{len(content)}</Size></Contents>"
                )
        prefixes = "".join(
            f"<CommonPrefixes><Prefix>{escape(name)}</Prefix></CommonPrefixes>"
            for name in sorted(folders)
        )
        content = f"<IsTruncated>false</IsTruncated>{''.join(rows)}{prefixes}"
        return f"<ListBucketResult>{content}</ListBucketResult>".encode()


@contextmanager
def object_server() -> Iterator[ObjectServer]:
    """Yield a running server with an empty bucket, which the commands of this process and of its children use."""
    server = ObjectServer()
    with pytest.MonkeyPatch.context() as patch:
        for name, value in server.environment.items():
            patch.setenv(name, value)
        yield server
    server.stop()
