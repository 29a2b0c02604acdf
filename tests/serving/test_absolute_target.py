"""The whole address as the target of a request means what its path means."""

import asyncio

import pytest

from finetune.serving.app import make_app


def answer(service, target: bytes, host: bytes, token: str | None = None) -> tuple[int, bytes]:
    """Return status and body of a GET as a server hands it on; what an HTTP client writes of an address is its path."""
    raw_path, _, query = target.partition(b"?")
    scope = {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "scheme": "http",
        "method": "GET",
        "root_path": "",
        "path": raw_path.decode(),
        "raw_path": raw_path,
        "query_string": query,
        "headers": [(b"host", host)],
    }
    sent = []

    async def receive():
        return {"type": "http.request", "body": b"", "more_body": False}

    async def send(message):
        sent.append(message)

    asyncio.run(make_app(service, token, "127.0.0.1")(scope, receive, send))
    return sent[0]["status"], b"".join(message.get("body", b"") for message in sent)


@pytest.mark.parametrize(
    ("target", "path"),
    [
        (b"http://localhost/healthz", b"/healthz"),
        (b"HTTP://localhost:8000/healthz", b"/healthz"),
        (b"https://[::1]:8000/model", b"/model"),
        (b"http://somebody@127.0.0.1/health%7A?x=1", b"/healthz"),
        (b"http://localhost", b"/"),
    ],
)
def test_it_is_answered_as_its_path(service, target, path):
    whole = answer(service, target, b"localhost")
    assert whole[0] == 200 and whole == answer(service, path, b"localhost")


@pytest.mark.parametrize(
    "target", [b"http:///healthz", b"ftp://localhost/healthz", b"/http://localhost/healthz", b"*"]
)
def test_what_is_no_such_address_is_not_there(service, target):
    assert answer(service, target, b"localhost")[0] == 404


def test_the_host_that_it_names_counts_and_not_the_header(service):
    assert answer(service, b"http://elsewhere.example/model", b"localhost")[0] == 403
    assert answer(service, b"http://localhost:1@elsewhere.example/model", b"localhost")[0] == 403
    assert answer(service, b"http://localhost/model", b"elsewhere.example")[0] == 200


def test_it_opens_nothing_that_needs_a_token(service):
    assert answer(service, b"http://localhost/model", b"localhost", token="word")[0] == 401
    assert answer(service, b"http://localhost/healthz", b"localhost", token="word")[0] == 200
