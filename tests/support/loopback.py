"""A web server on 127.0.0.1 in threads of this process, which the servers of tests extend."""

import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

Answer = tuple[int, dict[str, str], bytes]  # status, headers and body


class LoopbackServer:
    """A server, of which a subclass defines `answer`. It keeps its port when it is stopped and started again.

    Attributes:
        port: The port.
        address: The address, with http://.
    """

    def __init__(self) -> None:
        self.port = 0
        self.start()
        self.address = f"http://127.0.0.1:{self.port}"

    def answer(self, request: BaseHTTPRequestHandler) -> None:
        """Answer a request, by `reply` or by its methods."""
        raise NotImplementedError

    def start(self) -> None:
        answer: Callable[[BaseHTTPRequestHandler], None] = self.answer

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"
            # head and body in one packet, or else each answer waits for an acknowledgement
            wbufsize = -1
            disable_nagle_algorithm = True

            def do_GET(self) -> None:
                answer(self)

            do_HEAD = do_PUT = do_POST = do_GET

            def log_message(self, *args: Any) -> None:
                pass

        class Server(ThreadingHTTPServer):
            daemon_threads = True
            request_queue_size = 128

            def handle_error(self, *args: Any) -> None:
                pass

        self._server = Server(("127.0.0.1", self.port), Handler)
        self.port = self._server.server_port
        threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True).start()

    def stop(self) -> None:
        """Accept no more connections, until `start`."""
        self._server.shutdown()
        self._server.server_close()


def reply(request: BaseHTTPRequestHandler, answer: Answer, num_sent: int | None = None) -> None:
    """Send an answer; of the body only some bytes, if their number is given, before the connection is closed."""
    status, headers, body = answer
    request.send_response(status)
    for name, value in {"Content-Length": str(len(body)), **headers}.items():
        request.send_header(name, value)
    request.end_headers()
    if request.command != "HEAD":
        request.wfile.write(body[:num_sent])
    if num_sent is not None:
        request.close_connection = True
