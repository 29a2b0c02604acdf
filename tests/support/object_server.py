"""S3 servers on loopback that count requests, delay them and make them fail: before moto's server, or quick ones."""

import hashlib
import http.client
import logging
import re
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import lru_cache
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit
from xml.sax.saxutils import escape, unescape

import pytest

from finetune.data import object_requests
from finetune.data.storage import STORAGES

BUCKET = "photos"
CREDENTIALS = {
    "AWS_ACCESS_KEY_ID": "key",
    "AWS_SECRET_ACCESS_KEY": "secret",
    "AWS_REGION": "us-east-1",
}

# Returns what to do with a request, by its method and path: "" to forward it, "unavailable" for status 503, "cut" to
# close the connection, "truncate" to send half of the body, "deny" for status 403, or "lose" to do what it asks for
# without an answer.
Fault = Callable[[str, str], str]
Answer = tuple[int, dict[str, str], bytes]  # status, headers and body
_TIME = "Fri, 02 Jan 2026 03:04:05 GMT"


@lru_cache(maxsize=64)
def _cached_md5(content: bytes) -> str:
    return hashlib.md5(content).hexdigest()


_hashing = threading.Lock()


def _e_tag(content: bytes) -> str:
    """Return the ETag of an object. It is computed once for many requests at the same time."""
    with _hashing:
        return f'"{_cached_md5(content)}"'


class ObjectServer:
    """A server with one bucket.

    Args:
        is_moto: Forward requests to moto's server, which has the complete API. Otherwise objects are in memory, and
            only the requests of `finetune` are answered: that takes a tenth of the time.

    Attributes:
        address: The address of the bucket.
        requests: Number of requests by method.
        num_bytes: Bytes of the content that was sent.
        fault: The fault of each request.
        delay: Seconds before each answer.
        has_ranges: Whether a request for a part of an object is answered with this part.
        bytes_per_second: Rate at which content arrives, of all requests together; None for no limit.
    """

    def __init__(self, is_moto: bool = False) -> None:
        self.moto: Any = None
        self.objects: dict[str, bytes] = {}
        self.metadata: dict[str, dict[str, str]] = {}  # headers by key
        self.parts: dict[
            str, dict[int, bytes]
        ] = {}  # of uploads that have not ended, by their number
        if is_moto:
            from moto.server import ThreadedMotoServer

            logging.getLogger("werkzeug").setLevel(logging.ERROR)
            self.moto = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
            self.moto.start()
            self.upstream = self.moto.get_host_and_port()
            self.send("PUT", f"/{BUCKET}")
        self.address = f"s3://{BUCKET}"
        self.requests: Counter[str] = Counter()
        self.num_bytes = 0
        self.fault: Fault = lambda method, path: ""
        self.delay = 0.0
        self.has_ranges = True
        self.bytes_per_second: float | None = None
        self._link = threading.Lock()
        self.port = 0
        self.start()

    @property
    def environment(self) -> dict[str, str]:
        """The environment variables of its clients."""
        return {**CREDENTIALS, "AWS_ENDPOINT_URL": f"http://127.0.0.1:{self.port}"}

    def start(self) -> None:
        server = self
        self.fault = lambda method, path: ""

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"
            wbufsize = (
                -1
            )  # head and body in one packet, or else each answer waits for an acknowledgement
            disable_nagle_algorithm = True

            def do_GET(self) -> None:
                server._answer(self)

            do_HEAD = do_PUT = do_POST = do_GET

            def log_message(self, *args: Any) -> None:
                pass

        class Proxy(ThreadingHTTPServer):
            daemon_threads = True
            request_queue_size = 128

            def handle_error(self, *args: Any) -> None:
                pass

        self._proxy = Proxy(("127.0.0.1", self.port), Handler)
        self.port = self._proxy.server_port
        threading.Thread(target=self._proxy.serve_forever, args=(0.02,), daemon=True).start()

    def stop(self) -> None:
        """Stop to answer, until `start`."""
        self.fault = lambda method, path: "cut"
        self._proxy.shutdown()
        self._proxy.server_close()

    def close(self) -> None:
        self.stop()
        if self.moto is not None:
            self.moto.stop()

    def send(self, method: str, path: str, body: bytes = b"", **more: str) -> None:
        """Send a request to moto, past the proxy, with more headers."""
        connection = http.client.HTTPConnection(*self.upstream)
        headers = {
            "Authorization": "AWS4-HMAC-SHA256 Credential=key/20260101/us-east-1/s3/aws4_request",
            **more,
        }
        connection.request(method, path, body, headers)
        status = connection.getresponse().status
        connection.close()
        assert status < 300, (method, path, status)

    def put(self, key: str, content: bytes) -> None:
        if self.moto is None:
            self.objects[unquote(key)] = content
        else:
            self.send("PUT", f"/{BUCKET}/{key}", content)

    def put_folder(self, folder: Path, prefix: str) -> str:
        """Put the files of a folder in the bucket, and return their address."""
        for path in sorted(folder.rglob("*")):
            if path.is_file():
                self.put(f"{prefix}/{path.relative_to(folder).as_posix()}", path.read_bytes())
        return f"{self.address}/{prefix}"

    def _answer(self, request: BaseHTTPRequestHandler) -> None:
        is_list = request.command == "GET" and "list-type=2" in request.path
        self.requests["LIST" if is_list else request.command] += 1
        time.sleep(self.delay)
        sent = request.rfile.read(int(request.headers.get("Content-Length") or 0))
        if self.bytes_per_second is not None:
            with self._link:
                time.sleep(len(sent) / self.bytes_per_second)
        fault = self.fault(request.command, request.path)
        if fault == "cut":
            request.close_connection = True
            return
        if refusal := {"unavailable": 503, "deny": 403, "refuse": 405}.get(fault):
            request.send_response(refusal)
            request.send_header("Content-Length", "0")
            request.end_headers()
            return
        if self.moto is None:
            status, headers, body = self._from_memory(request, sent)
        else:
            status, headers, body = self._from_moto(request, sent)
        if fault == "lose":
            request.close_connection = True
            return
        if request.command != "HEAD":
            headers["Content-Length"] = str(len(body))
        request.send_response(status)
        for name, value in headers.items():
            request.send_header(name, value)
        request.end_headers()
        if fault == "truncate":
            request.close_connection = True
            body = body[: len(body) // 2]
        self.num_bytes += len(body)
        request.wfile.write(body)

    def _from_moto(self, request: BaseHTTPRequestHandler, sent: bytes) -> Answer:
        connection = http.client.HTTPConnection(*self.upstream)
        connection.request(request.command, request.path, sent, dict(request.headers))
        answer = connection.getresponse()
        body = answer.read()
        connection.close()
        dropped = ("connection", "transfer-encoding")
        headers = {
            name: value for name, value in answer.getheaders() if name.lower() not in dropped
        }
        if request.command != "HEAD":
            headers.pop("Content-Length", None)
        return answer.status, headers, body

    def _from_memory(self, request: BaseHTTPRequestHandler, sent: bytes) -> Answer:
        address = urlsplit(request.path)
        bucket, _, key = unquote(address.path).lstrip("/").partition("/")
        if bucket != BUCKET:
            return 404, {}, b"<Error><Code>NoSuchBucket</Code></Error>"
        query = parse_qs(address.query, keep_blank_values=True)
        if "delete" in query:
            keys = [unescape(match) for match in re.findall(r"<Key>(.*?)</Key>", sent.decode())]
            for each in keys:
                self.objects.pop(each, None)
            rows = "".join(f"<Deleted><Key>{escape(each)}</Key></Deleted>" for each in keys)
            return 200, {}, f"<DeleteResult>{rows}</DeleteResult>".encode()
        if request.command in ("PUT", "POST"):
            return self._changed(request, key, query, sent)
        if not key:
            prefix = query.get("prefix", [""])[0]
            return 200, {}, self._listing(prefix, has_delimiter="delimiter" in query)
        content = self.objects.get(key)
        if content is None:
            return 404, {"Content-Length": "0"}, b"<Error><Code>NoSuchKey</Code></Error>"
        e_tag = _e_tag(content)
        if request.headers.get("If-Match", e_tag) != e_tag:
            return 412, {}, b""
        headers = {"ETag": e_tag, "Last-Modified": _TIME, "Content-Length": str(len(content))}
        headers |= self.metadata.get(key, {})
        match = re.fullmatch(r"bytes=(\d+)-(\d+)", request.headers.get("Range", ""))
        if not match or not self.has_ranges:
            return 200, headers, b"" if request.command == "HEAD" else content
        first = int(match[1])
        last = min(int(match[2]), len(content) - 1)
        headers["Content-Range"] = f"bytes {first}-{last}/{len(content)}"
        return 206, headers, content[first : last + 1]

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
            number = str(len(self.parts))
            self.parts[number] = {}
            self.metadata[number] = headers
            return 200, {}, f"<R><UploadId>{number}</UploadId></R>".encode()
        if "partNumber" in query:
            self.parts[query["uploadId"][0]][int(query["partNumber"][0])] = sent
            return 200, {"ETag": '"part"'}, b""
        if "uploadId" in query:
            number = query["uploadId"][0]
            sent = b"".join(part for _, part in sorted(self.parts[number].items()))
            headers = self.metadata.pop(number)
        if request.headers.get("If-None-Match") == "*" and key in self.objects:
            return 412, {}, b""
        source = request.headers.get("x-amz-copy-source")
        if source is not None:
            other = unquote(source).lstrip("/").partition("/")[2]
            sent = self.objects[other]
            headers = self.metadata.get(other, {})
        self.objects[key] = sent
        self.metadata[key] = headers
        e_tag = _e_tag(sent)
        is_copy = source is not None or "uploadId" in query
        body = f"<R><ETag>{escape(e_tag)}</ETag></R>".encode() if is_copy else b""
        return 200, {"ETag": e_tag}, body

    def _listing(self, prefix: str, has_delimiter: bool = False) -> bytes:
        keys = {key for key in self.objects if key.startswith(prefix)}
        folders = set()
        if has_delimiter:
            folders = {
                f"{prefix}{key.removeprefix(prefix).partition('/')[0]}/"
                for key in keys
                if "/" in key.removeprefix(prefix)
            }
            keys = {key for key in keys if "/" not in key.removeprefix(prefix)}
        prefixes = "".join(
            f"<CommonPrefixes><Prefix>{escape(name)}</Prefix></CommonPrefixes>"
            for name in sorted(folders)
        )
        rows = [
            f"<Contents><Key>{escape(key)}</Key><LastModified>2026-01-02T03:04:05.000Z</LastModified>"
            f"<ETag>&quot;{hashlib.md5(content).hexdigest()}&quot;</ETag><Size>{len(content)}</Size></Contents>"
            for key, content in sorted(self.objects.items())
            if key in keys
        ]
        text = f"<ListBucketResult><IsTruncated>false</IsTruncated>{''.join(rows)}{prefixes}</ListBucketResult>"
        return text.encode()


@contextmanager
def object_server(is_moto: bool = False) -> Iterator[ObjectServer]:
    """Yield a running server with an empty bucket."""
    server = ObjectServer(is_moto)
    try:
        yield server
    finally:
        server.close()


def begin_test(server: ObjectServer, monkeypatch: pytest.MonkeyPatch) -> Iterator[ObjectServer]:
    """Yield the server for one test, with its variables set and without a client; undo what the test changes.

    Clients repeat a request that fails after some milliseconds.
    """
    monkeypatch.setattr(object_requests, "_FIRST_PAUSE", 0.005)
    monkeypatch.setattr(object_requests, "_LONGEST_PAUSE", 0.05)
    for name, value in server.environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delitem(STORAGES, "s3", raising=False)
    server.requests.clear()
    objects = dict(server.objects)
    yield server
    server.objects = objects
    server.fault = lambda method, path: ""
    server.delay = 0.0
