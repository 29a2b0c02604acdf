"""The HTTP server: uvicorn on a socket, with a graceful shutdown that answers every accepted request."""

import gc
import os
import signal
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

import uvicorn
from starlette.types import ASGIApp

from finetune.serving.guard import is_loopback
from finetune.system.messages import WrongUsage, reason

# Connections that the system queues until they are accepted. asyncio accepts all of them at once.
_BACKLOG = 1024
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_MAX_HEADER_BYTES = 2**14  # of headers that arrive in parts


class _Server(uvicorn.Server):
    """Calls `on_start` once it listens and `on_stop` at a signal. A second Ctrl-C ends the process at once."""

    def __init__(
        self, config: uvicorn.Config, on_start: Callable[[], None], on_stop: Callable[[], None]
    ) -> None:
        super().__init__(config)
        self.on_start = on_start
        self.on_stop = on_stop

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        if self.started:
            self.on_start()

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Handle SIGHUP, too, and do not raise the signals again at the end: the exit is a normal one."""
        signums = [s for s in _SIGNALS if signal.getsignal(s) != signal.SIG_IGN]
        before = [signal.signal(signum, self.handle_exit) for signum in signums]
        try:
            yield
        finally:
            for signum, handler in zip(signums, before, strict=True):
                signal.signal(signum, handler)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        self.on_stop()
        if self.should_exit and sig == signal.SIGINT:
            # A normal exit would wait for the decoder threads, and print a traceback for each request.
            os._exit(128 + sig)
        self.should_exit = True


def listen(host: str, port: int) -> socket.socket:
    """Return a socket that listens at an address; port 0 means any free port. Connections wait until they are served.

    Raises:
        WrongUsage: This machine does not have the address, or the port is in use.
    """
    if not 0 <= port < 2**16:
        raise WrongUsage(f"--port {port}: a port is from 1 to {2**16 - 1}; 0 takes a free one")
    try:
        family, *_, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        is_ipv6 = family == socket.AF_INET6
        listener = socket.create_server(
            address, family=family, backlog=_BACKLOG, dualstack_ipv6=is_ipv6
        )
        # Connections inherit it. asyncio sets it only on sockets of an explicit protocol; without it the body of an
        # answer waits for the acknowledgement of its head, which takes 40 ms.
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return listener
    except UnicodeError as error:  # the name cannot be a host name
        raise WrongUsage(f"--host {host} --port {port}: that is not a host name") from error
    except OSError as error:
        hint = "; --port 0 takes a free one" if is_loopback(host) else ""
        raise WrongUsage(f"--host {host} --port {port}: {reason(error)}{hint}") from error


def address_of(listener: socket.socket) -> str:
    """Return the URL for a browser on this machine."""
    host, port = listener.getsockname()[:2]
    if host in ("0.0.0.0", "::"):
        host = "localhost"
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def serve_until_stopped(
    app: ASGIApp,
    listener: socket.socket,
    seconds: float,
    on_start: Callable[[], None],
    on_stop: Callable[[], None],
) -> None:
    """Serve until Ctrl-C, SIGTERM or SIGHUP, then finish the accepted requests.

    Args:
        app: The application.
        listener: The socket that `listen` returned.
        seconds: Time for the accepted requests to finish. A second Ctrl-C ends the process at once, with status 130.
        on_start: Called in the running event loop when the server accepts requests.
        on_stop: Called when a signal asks the server to stop.
    """
    config = uvicorn.Config(
        app,
        http="h11",  # this parser limits the size of headers that arrive in parts
        ws="none",
        lifespan="on",
        loop="asyncio",
        log_config=None,
        access_log=False,
        server_header=False,
        proxy_headers=False,
        backlog=_BACKLOG,
        h11_max_incomplete_event_size=_MAX_HEADER_BYTES,
        timeout_graceful_shutdown=max(1, round(seconds)),
    )
    # Without `freeze` each full garbage collection scans all loaded modules while every client waits. With 64
    # clients the 99th percentile of the response time was twice as long.
    gc.collect()
    gc.freeze()
    try:
        _Server(config, on_start, on_stop).run(sockets=[listener])
    finally:
        gc.unfreeze()
