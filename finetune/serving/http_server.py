"""Listening: a socket, uvicorn on it, and an end that leaves no accepted request without its answer."""

import gc
import os
import resource
import signal
import socket
from collections.abc import Callable
from types import FrameType
from typing import Any

import uvicorn
from starlette.types import ASGIApp

from finetune.serving.guard import is_loopback
from finetune.system.messages import WrongUsage, reason

_MAX_HEADER_BYTES = 2**14
# connections that the system holds until they are taken, which asyncio does with all of them at once
_BACKLOG = 1024
_FILES = 24  # that are open beside connections


class _Server(uvicorn.Server):
    def __init__(
        self, config: uvicorn.Config, on_start: Callable[[], None], on_stop: Callable[[], None]
    ) -> None:
        super().__init__(config)
        self.on_start = on_start
        self.on_stop = on_stop
        self.has_ended = False

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        if self.started:
            self.on_start()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        await super().shutdown(sockets)
        self.has_ended = True

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        self.on_stop()
        if self.should_exit and sig == signal.SIGINT and not self.has_ended:
            # Python would wait for threads that decode, and each request tell of its end in a traceback.
            os._exit(128 + sig)
        super().handle_exit(sig, frame)


def _backlog() -> int:
    return min(_BACKLOG, resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 4)


def most_connections() -> int:
    """Return how many connections there may be.

    So many that those which asyncio takes next still find a file descriptor each: without one it tries again and
    again, and writes a traceback each time.
    """
    return max(1, resource.getrlimit(resource.RLIMIT_NOFILE)[0] - _backlog() - _FILES)


def listen(host: str, port: int) -> socket.socket:
    """Return a socket that listens; port 0 takes any that is free.

    Raises:
        WrongUsage: There is no such address here, or the port is taken.
    """
    if not 0 <= port < 2**16:
        raise WrongUsage(
            f"--port {port}: a port is from 1 to {2**16 - 1}; 0 takes one that is free"
        )
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM
        )[0]
        listener = socket.socket(family, kind, protocol)
        try:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(address)
        except OSError:
            listener.close()
            raise
    except UnicodeError as error:  # of a name that could be no host's
        raise WrongUsage(f"--host {host} --port {port}: that is no name of a host") from error
    except OSError as error:
        raise _taken(host, port, error) from error
    return listener


def _taken(host: str, port: int, error: OSError) -> WrongUsage:
    hint = "; --port 0 takes one that is free" if is_loopback(host) else ""
    return WrongUsage(f"--host {host} --port {port}: {reason(error)}{hint}")


def address_of(listener: socket.socket) -> str:
    """Return the address that a browser on this machine takes."""
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
    """Answer until Ctrl-C, SIGTERM or a closed terminal, then finish what was accepted.

    Args:
        app: What answers.
        listener: As `listen` makes it.
        seconds: That requests have to end, once it stops; a second Ctrl-C ends the process, with status 130.
        on_start: Called when requests are taken, by a loop that runs.
        on_stop: Called when it is asked to stop.

    Raises:
        WrongUsage: Another has begun to listen at the port in the meantime.
    """
    config = uvicorn.Config(
        app,
        http="h11",  # the parser in pure Python, which limits headers
        ws="none",
        lifespan="on",
        loop="asyncio",
        log_config=None,
        access_log=False,
        server_header=False,
        proxy_headers=False,
        backlog=_backlog(),
        limit_concurrency=most_connections(),
        h11_max_incomplete_event_size=_MAX_HEADER_BYTES,
        timeout_graceful_shutdown=max(1, round(seconds)),
    )
    server = _Server(config, on_start, on_stop)
    # uvicorn raises the signals that ended it once more, when its own handlers are gone: its end is no error here.
    signums = [
        s
        for s in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
        if signal.getsignal(s) != signal.SIG_IGN
    ]
    before: dict[int, Any] = {
        signum: signal.signal(signum, server.handle_exit) for signum in signums
    }
    try:
        try:
            # who asks from now on is answered, as soon as the loop runs
            listener.listen(_backlog())
        except OSError as error:
            host, port = listener.getsockname()[:2]
            raise _taken(host, port, error) from error
        # Each full collection would look through all that torch and we have loaded, and every client wait for it: the
        # slowest hundredth of 64 clients waited twice as long.
        gc.collect()
        gc.freeze()
        server.run(sockets=[listener])
    finally:
        gc.unfreeze()
        for signum, handler in before.items():
            signal.signal(signum, handler)
