"""The sockets of `finetune serve` and `review`: opened before the model is loaded, closed when all is answered."""

import signal
import socket
import time
from contextlib import ExitStack, contextmanager

import pytest
from processes import start_script

from finetune.serving.http_server import address_of, listen
from finetune.system.messages import WrongUsage


def test_port_0_is_a_free_one_and_all_interfaces_are_localhost_for_a_browser():
    with listen("127.0.0.1", 0) as listener:
        port = listener.getsockname()[1]
        assert port > 0 and address_of(listener) == f"http://127.0.0.1:{port}"
    with listen("0.0.0.0", 0) as listener:
        assert address_of(listener).startswith("http://localhost:")


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
def test_host_and_port_that_are_none_are_named(host, port):
    with pytest.raises(WrongUsage, match="--port"):
        listen(host, port)


def test_a_port_that_is_taken_is_named():
    with listen("127.0.0.1", 0) as first:
        port = first.getsockname()[1]
        with pytest.raises(WrongUsage, match=f"--port {port}: "):
            listen("127.0.0.1", port)


def test_who_connects_while_the_model_is_loaded_waits():
    with listen("127.0.0.1", 0) as listener:
        socket.create_connection(listener.getsockname(), timeout=5).close()


SERVER = """
import asyncio, gc, time
from finetune.serving.http_server import listen, serve_until_stopped

async def app(scope, receive, send):
    if scope["type"] == "lifespan":
        await receive()
        await send({"type": "lifespan.startup.complete"})
        await receive()
        await send({"type": "lifespan.shutdown.complete"})
        return
    ANSWER

with listen("127.0.0.1", 0) as listener:
    serve_until_stopped(app, listener, 60, lambda: print(listener.getsockname()[1], flush=True), lambda: None)
"""
BUSY = "await asyncio.to_thread(time.sleep, 30)"
AT_ONCE = """
    while (await receive()).get("more_body"):
        pass
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"0")]})
    await send({"type": "http.response.body", "body": b""})
"""


@contextmanager
def serving(answer, folder, setup=""):
    """A process that serves, and its port."""
    (folder / "script.py").write_text(setup + SERVER.replace("ANSWER", answer))
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
    slow = "import gc, time\ngc.collect = lambda: time.sleep(2)\n"
    with serving(AT_ONCE, tmp_path, slow) as (process, port):
        with socket.create_connection(("127.0.0.1", port)) as client:
            client.sendall(b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 2\r\n\r\n")
            time.sleep(0.5)
            process.send_signal(signal.SIGTERM)
            time.sleep(0.5)
            client.sendall(b"ab")
            assert client.recv(1000).startswith(b"HTTP/1.1 200")
        assert process.wait(15) == 0


@pytest.mark.slow
def test_a_second_ctrl_c_waits_for_no_request(tmp_path):
    with (
        serving(BUSY, tmp_path) as (process, port),
        socket.create_connection(("127.0.0.1", port)) as client,
    ):
        client.sendall(b"GET / HTTP/1.1\r\nHost: a\r\n\r\n")
        for _ in range(2):
            time.sleep(0.5)
            assert process.poll() is None
            process.send_signal(signal.SIGINT)
        assert process.wait(15) == 130 and "Traceback" not in process.stderr


@pytest.mark.slow
def test_headers_that_do_not_end_have_a_limit(tmp_path):
    request = b"GET / HTTP/1.1\r\nHost: a\r\n"
    with serving(AT_ONCE, tmp_path) as (_, port), ExitStack() as clients:
        for more, status in ((b"\r\n", b"200"), (b"X-A: " + b"a" * 40_000, b"400")):
            client = clients.enter_context(socket.create_connection(("127.0.0.1", port)))
            client.settimeout(10)
            client.sendall(request + more)
            assert client.recv(1000).startswith(b"HTTP/1.1 " + status)


def test_an_answer_is_sent_at_once_and_not_when_its_head_is_acknowledged():
    with listen("127.0.0.1", 0) as listener, socket.create_connection(listener.getsockname()):
        connection, _ = listener.accept()
        with connection:
            assert connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
