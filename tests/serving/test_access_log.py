"""The log of requests has one line of JSON for each."""

import hashlib
import json

import pytest
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route
from starlette.testclient import TestClient

from finetune.serving.access_log import AccessLog, file_fingerprint
from finetune.serving.guard import Guard, service_check


async def answer(request: Request) -> Response:
    return PlainTextResponse("yes")


async def fail(request: Request) -> Response:
    raise RuntimeError("broken")


def client(token: str | None = None) -> TestClient:
    middleware = [
        Middleware(AccessLog, model="0123456789abcdef"),
        Middleware(Guard, check=service_check(token, "127.0.0.1"), seconds=5),
    ]
    routes = [Route("/predict", answer, methods=["POST"]), Route("/broken", fail)]
    app = Starlette(routes=routes, middleware=middleware)
    return TestClient(app, "http://127.0.0.1:8000", raise_server_exceptions=False)


@pytest.fixture
def lines(capfd):
    return lambda: [json.loads(line) for line in capfd.readouterr().out.splitlines()]


def test_a_line_for_each_request_without_its_query(lines):
    with client() as service:
        response = service.post("/predict?token=secret", headers={"x-request-id": "proxy-1.a:b"})
    (line,) = lines()
    assert list(line) == [
        "time",
        "request_id",
        "method",
        "path",
        "status",
        "milliseconds",
        "model",
    ]
    assert line["request_id"] == response.headers["x-request-id"] == "proxy-1.a:b"
    assert (line["method"], line["path"], line["status"]) == ("POST", "/predict", 200)
    assert line["milliseconds"] >= 0 and line["model"] == "0123456789abcdef"


@pytest.mark.parametrize("sent", ["", "two words", '"quote', "x" * 129, "é".encode()])
def test_an_id_that_is_none_is_replaced(lines, sent):
    with client() as service:
        ids = [service.post("/predict", headers={"x-request-id": sent}) for _ in range(2)]
    logged = [line["request_id"] for line in lines()]
    assert logged == [response.headers["x-request-id"] for response in ids]
    assert len(set(logged)) == 2 and all(len(text) == 32 for text in logged)


def test_refused_and_failed_requests_are_logged(lines):
    with client(token="word") as service:
        service.post("/predict")
        service.get("/broken", headers={"authorization": "Bearer word"})
        service.get("/%0Anew line" + 300 * "x", headers={"authorization": "Bearer word"})
    refused, failed, absent = lines()  # each is one line
    assert [line["status"] for line in (refused, failed, absent)] == [401, 500, 404]
    assert absent["path"].startswith("/\nnew line") and len(absent["path"]) == 200


def test_the_model_is_named_as_sha256sum_does(tmp_path):
    (tmp_path / "best.ckpt").write_bytes(b"weights")
    assert file_fingerprint(tmp_path / "best.ckpt") == hashlib.sha256(b"weights").hexdigest()[:16]
