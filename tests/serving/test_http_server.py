"""Sockets are taken before the work of loading, and what is wrong with an address is told in a line."""

import asyncio
import gc
import json
import resource
import signal
import socket
import time
from contextlib import contextmanager

import pytest
from processes import start_script
from uvicorn import Config
from uvicorn.server import ServerState

from finetune.serving import http_server
from finetune.serving.http_server import (
    PatientProtocol,
    address_of,
    listen,
    most_connections,
    serve_until_stopped,
)
from finetune.system.messages import WrongUsage


def test_a_free_port_is_found():
    with listen("127.0.0.1", 0) as listener:
        port = listener.getsockname()[1]
        assert port > 0 and address_of(listener) == f"http://127.0.0.1:{port}"


def test_a_taken_port_is_told():
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        with pytest.raises(
            WrongUsage, match=f"--port {port}: Address already in use; --port 0 takes"
        ):
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


def test_of_two_that_began_at_once_the_second_is_told():
    """Both could bind the port, since none listened at it while they were loading."""
    with listen("127.0.0.1", 0) as first, listen("127.0.0.1", first.getsockname()[1]) as second:
        first.listen()
        with pytest.raises(WrongUsage, match=r"--port \d+: Address already in use"):
            serve_until_stopped(lambda *_: None, second, 1, lambda: None, lambda: None)


def connection(monkeypatch, script, app=None):
    """Run a script against an app whose connections have half a second for their headers; return what came back."""
    monkeypatch.setattr(http_server, "_HEADER_SECONDS", 0.5)

    async def answer(scope, receive, send):
        while (await receive()).get("more_body"):
            pass
        await send(
            {"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"2")]}
        )
        await send({"type": "http.response.body", "body": b"ok"})

    async def run():
        loop = asyncio.get_running_loop()
        config = Config(
            app or answer,
            http=PatientProtocol,
            log_config=None,
            h11_max_incomplete_event_size=2**14,
        )
        config.load()
        state = ServerState()
        server = await loop.create_server(
            lambda: PatientProtocol(config, state, {}), "127.0.0.1", 0
        )
        reader, writer = await asyncio.open_connection(*server.sockets[0].getsockname())
        try:
            async with asyncio.timeout(10):
                return await script(reader, writer)
        finally:
            writer.close()
            server.close()

    return asyncio.run(run())


@pytest.mark.slow
def test_who_brings_no_headers_in_time_is_let_go(monkeypatch):
    async def silent(reader, writer):
        return await reader.read()

    async def slow(reader, writer):
        writer.write(b"POST / HTTP/1.1\r\nHost: a\r\n")
        for _ in range(20):
            await asyncio.sleep(0.1)
            if reader.at_eof():
                break
            writer.write(b"X-A: b\r\n")
        return await reader.read()

    async def slow_second(reader, writer):
        writer.write(b"GET / HTTP/1.1\r\nHost: a\r\n\r\n")
        assert (await reader.readuntil(b"ok")).startswith(b"HTTP/1.1 200")
        writer.write(b"GET / HTTP/1.1\r\n")
        return await reader.read()

    for script in (silent, slow, slow_second):
        assert connection(monkeypatch, script) == b""


@pytest.mark.slow
def test_a_body_may_take_longer_than_headers(monkeypatch):
    async def slow_body(reader, writer):
        writer.write(b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 8\r\n\r\n")
        for _ in range(8):
            await asyncio.sleep(0.15)
            writer.write(b"x")
        return await reader.readuntil(b"ok")

    assert connection(monkeypatch, slow_body).startswith(b"HTTP/1.1 200")


@pytest.mark.slow
def test_a_connection_is_used_again(monkeypatch):
    async def twice(reader, writer):
        for _ in range(3):
            await asyncio.sleep(0.3)
            writer.write(b"GET / HTTP/1.1\r\nHost: a\r\n\r\n")
            await reader.readuntil(b"ok")
        return True

    assert connection(monkeypatch, twice)


def test_headers_have_a_limit(monkeypatch):
    async def huge(reader, writer):
        writer.write(b"GET / HTTP/1.1\r\nHost: a\r\nX-A: " + b"a" * 40_000)
        return await reader.read()

    assert connection(monkeypatch, huge).startswith(b"HTTP/1.1 400")


def test_connections_leave_files_for_those_that_come_next(monkeypatch):
    for files in (64, 1024):
        monkeypatch.setattr(resource, "getrlimit", lambda kind, files=files: (files, files))
        assert 8 <= most_connections() <= files - http_server._backlog() - 16


def test_one_connection_too_many_is_told(monkeypatch):
    async def second(reader, writer):
        others = await asyncio.open_connection(*writer.get_extra_info("peername"))
        told = await others[0].read()
        others[1].close()
        writer.write(b"GET / HTTP/1.1\r\nHost: a\r\n\r\n")
        await reader.readuntil(b"ok")
        return told

    monkeypatch.setattr(http_server, "most_connections", lambda: 1)
    head, _, body = connection(monkeypatch, second).partition(b"\r\n\r\n")
    assert (
        head.startswith(b"HTTP/1.1 503")
        and b"Retry-After" in head
        and "connections" in json.loads(body)["error"]
    )


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
    """It says that it serves when it takes connections: what the system holds till then is lost with the socket."""
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
@pytest.mark.parametrize("reads", [True, False])
def test_who_does_not_read_is_let_go(monkeypatch, reads):
    monkeypatch.setattr(http_server, "_READ_SECONDS", 1.5)
    size = 20_000_000

    async def large(scope, receive, send):
        await send({"type": "http.response.start", "status": 200})
        await send({"type": "http.response.body", "body": bytes(size)})

    async def read(reader, writer):
        writer.write(b"GET / HTTP/1.0\r\nHost: a\r\n\r\n")
        got = 0
        await asyncio.sleep(0 if reads else 4)
        while content := await reader.read(1_000_000):
            got += len(content)
            await asyncio.sleep(0.05 if reads else 0)
        return got

    assert (connection(monkeypatch, read, large) > size) == reads


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

    before = gc.get_freeze_count()
    with listen("127.0.0.1", 0) as listener:
        serve_until_stopped(stops_at_once, listener, 1, lambda: None, lambda: None)
    assert counts[0] > before + 10_000  # objects of Python and its libraries
    assert gc.get_freeze_count() <= before
