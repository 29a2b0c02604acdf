"""An S3 server on loopback, and a proxy before it that counts requests, delays them and makes them fail."""

import http.client
import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

BUCKET = "pictures"
CREDENTIALS = {
    "AWS_ACCESS_KEY_ID": "key",
    "AWS_SECRET_ACCESS_KEY": "secret",
    "AWS_REGION": "us-east-1",
}

# Returns what to do with a request, by its method and path: "" to forward it, "unavailable" for status 503, "cut" to
# close the connection, "truncate" to send half of the body, or "deny" for status 403.
Fault = Callable[[str, str], str]


class ObjectServer:
    """moto's S3 server behind the proxy.

    Attributes:
        address: The address of the bucket.
        requests: Number of requests by method.
        fault: The fault of each request.
        delay: Seconds before each answer.
    """

    def __init__(self) -> None:
        from moto.server import ThreadedMotoServer

        logging.getLogger("werkzeug").setLevel(logging.ERROR)
        self.moto = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
        self.moto.start()
        self.upstream = self.moto.get_host_and_port()
        self.address = f"s3://{BUCKET}"
        self.requests: Counter[str] = Counter()
        self.fault: Fault = lambda method, path: ""
        self.delay = 0.0
        self.port = 0
        self.start_proxy()
        self.send("PUT", f"/{BUCKET}")

    @property
    def environment(self) -> dict[str, str]:
        """The environment variables of its clients."""
        return {**CREDENTIALS, "AWS_ENDPOINT_URL": f"http://127.0.0.1:{self.port}"}

    def start_proxy(self) -> None:
        server = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                server._answer(self)

            do_HEAD = do_GET

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

    def stop_proxy(self) -> None:
        """Stop to answer, until `start_proxy`."""
        self.fault = lambda method, path: "cut"
        self._proxy.shutdown()
        self._proxy.server_close()

    def close(self) -> None:
        self.stop_proxy()
        self.moto.stop()

    def send(self, method: str, path: str, body: bytes = b"") -> None:
        """Send a request to moto, past the proxy."""
        connection = http.client.HTTPConnection(*self.upstream)
        headers = {
            "Authorization": "AWS4-HMAC-SHA256 Credential=key/20260101/us-east-1/s3/aws4_request"
        }
        connection.request(method, path, body, headers)
        status = connection.getresponse().status
        connection.close()
        assert status < 300, (method, path, status)

    def put(self, key: str, content: bytes) -> None:
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
        fault = self.fault(request.command, request.path)
        if fault == "cut":
            request.close_connection = True
            return
        if fault in ("unavailable", "deny"):
            request.send_response(503 if fault == "unavailable" else 403)
            request.send_header("Content-Length", "0")
            request.end_headers()
            return
        connection = http.client.HTTPConnection(*self.upstream)
        connection.request(request.command, request.path, headers=dict(request.headers))
        answer = connection.getresponse()
        body = answer.read()
        connection.close()
        request.send_response(answer.status)
        for name, value in answer.getheaders():
            if name.lower() not in ("connection", "transfer-encoding", "content-length"):
                request.send_header(name, value)
        length = answer.getheader("Content-Length") if request.command == "HEAD" else len(body)
        request.send_header("Content-Length", str(length))
        request.end_headers()
        if fault == "truncate":
            request.close_connection = True
            body = body[: len(body) // 2]
        request.wfile.write(body)


@contextmanager
def object_server() -> Iterator[ObjectServer]:
    """Yield a running server with an empty bucket."""
    server = ObjectServer()
    try:
        yield server
    finally:
        server.close()
