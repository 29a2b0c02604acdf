"""Sockets are opened before the checkpoint is loaded, and a wrong address is reported in a line."""

import gc
import signal
import socket
import time
from contextlib import ExitStack, contextmanager

import pytest
from processes import start_script

from finetune.serving.http_server import (
    address_of,
    listen,
    serve_until_stopped,
)
from finetune.system.messages import WrongUsage


def test_a_free_port_is_found():
    with listen("127.0.0.1", 0) as listener:
        port = listener.getsockname()[1]
        assert port > 0 and address_of(listener) == f"http://127.0.0.1:{port}"


def test_a_taken_port_is_reported():
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        with pytest.raises(WrongUsage, match=f"--port {port}: "):
            listen("127.0.0.1", port)


@pytest.mark.parametrize(
    ("host", "port"),
    [
        ("127.0.0.1", -1),
        ("127.0.0.1", 65536),
        ("no such host.invalid", 1),
        ("192.0.2.1", 0),
        ("a..b", 0),
    ],
)
def test_addresses_that_are_none(host, port):
    with pytest.raises(WrongUsage, match="--port"):
        listen(host, port)


def test_the_address_of_all_interfaces_is_one_that_a_browser_takes():
    with listen("0.0.0.0", 0) as listener:
        assert address_of(listener).startswith("http://localhost:")


def test_of_two_that_began_at_once_the_second_is_notified():
    """Both could bind the port, because neither listens on it while it loads its model."""
    with listen("127.0.0.1", 0) as first, listen("127.0.0.1", first.getsockname()[1]) as second:
        first.listen()
        with pytest.raises(WrongUsage, match=r"--port \d+: "):
            serve_until_stopped(lambda *_: None, second, 1, lambda: None, lambda: None)


_BUSY = """
import asyncio, time
from finetune.serving.http_server import listen, serve_until_stopped

async def app(scope, receive, send):
    if scope["type"] == "lifespan":
        await receive()
        await send({"type": "lifespan.startup.complete"})
        await receive()
        await send({"type": "lifespan.shutdown.complete"})
    else:
        await asyncio.to_thread(time.sleep, 30)

with listen("127.0.0.1", 0) as listener:
    serve_until_stopped(app, listener, 60, lambda: print(listener.getsockname()[1], flush=True), lambda: None)
"""


_OK = """
        while (await receive()).get("more_body"):
            pass
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"0")]})
        await send({"type": "http.response.body", "body": b""})
"""


@contextmanager
def serving(script, folder):
    """A process that runs a script, and its port."""
    (folder / "script.py").write_text(script)
    process = start_script(folder / "script.py", cwd=folder)
    try:
        while not process.stdout.endswith("\n"):
            assert process.poll() is None, process.stderr
            time.sleep(0.01)
        yield process, int(process.stdout)
    finally:
        process.kill()


@pytest.mark.slow
def test_who_asks_at_once_is_answered_though_it_stops_at_once(tmp_path):
    """It reports that it serves only when it accepts connections. Earlier ones would be lost with the socket."""
    # what a start does last, on a busy machine
    slow = "import gc; gc.collect = lambda: time.sleep(2)\n"
    script = _BUSY.replace("with listen", slow + "with listen").replace(
        "await asyncio.to_thread(time.sleep, 30)", _OK
    )
    with serving(script, tmp_path) as (process, port):
        with socket.create_connection(("127.0.0.1", port)) as client:
            client.sendall(b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 2\r\n\r\n")
            time.sleep(0.5)
            process.send_signal(signal.SIGTERM)
            time.sleep(0.5)
            client.sendall(b"ab")
            assert client.recv(1000).startswith(b"HTTP/1.1 200")
        assert process.wait(15) == 0


@pytest.mark.slow
def test_a_second_ctrl_c_waits_for_no_thread(tmp_path):
    with (
        serving(_BUSY, tmp_path) as (process, port),
        socket.create_connection(("127.0.0.1", port)) as client,
    ):
        client.sendall(b"GET / HTTP/1.1\r\nHost: a\r\n\r\n")
        for _ in range(2):
            time.sleep(0.5)
            assert process.poll() is None
            process.send_signal(signal.SIGINT)
        assert process.wait(15) == 130 and "Traceback" not in process.stderr


@pytest.mark.slow
def test_headers_have_a_limit(tmp_path):
    script = _BUSY.replace("await asyncio.to_thread(time.sleep, 30)", _OK)
    request = b"GET / HTTP/1.1\r\nHost: a\r\n"
    with serving(script, tmp_path) as (_, port), ExitStack() as clients:
        for more, status in ((b"", b"200"), (b"X-A: " + b"a" * 40_000, b"400")):
            client = clients.enter_context(socket.create_connection(("127.0.0.1", port)))
            client.settimeout(10)
            client.sendall(request + more + (b"" if more else b"\r\n"))
            assert client.recv(1000).startswith(b"HTTP/1.1 " + status)


@pytest.mark.slow
def test_what_was_loaded_before_is_not_collected_through_while_it_serves():
    counts = []

    async def stops_at_once(scope, receive, send):
        assert scope["type"] == "lifespan"
        await receive()
        counts.append(gc.get_freeze_count())
        await send({"type": "lifespan.startup.complete"})
        signal.raise_signal(signal.SIGTERM)
        await receive()
        await send({"type": "lifespan.shutdown.complete"})

    gc.unfreeze()  # what another test has left
    before = gc.get_freeze_count()
    with listen("127.0.0.1", 0) as listener:
        serve_until_stopped(stops_at_once, listener, 1, lambda: None, lambda: None)
    assert counts[0] > before + 10_000  # objects of Python and its libraries
    assert gc.get_freeze_count() <= before
