"""Only authorised requests are answered."""

import pytest
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.responses import PlainTextResponse
from starlette.routing import Route
from starlette.testclient import TestClient

from finetune.serving.guard import Guard, is_loopback, service_check


def client(token: str | None, host: str) -> TestClient:
    routes = [
        Route(path, lambda request: PlainTextResponse("yes")) for path in ("/", "/model", "/readyz")
    ]
    app = Starlette(
        routes=routes, middleware=[Middleware(Guard, check=service_check(token, host), seconds=5)]
    )
    return TestClient(app, "http://127.0.0.1:8000")


@pytest.mark.parametrize(
    "name", ["localhost", "127.0.0.1:8000", "[::1]:8000", "127.8.8.8", "LOCALHOST:1"]
)
def test_this_machine_s_own_names_are_answered(name):
    assert client(None, "127.0.0.1").get("/model", headers={"host": name}).text == "yes"


@pytest.mark.parametrize(
    "name", ["evil.example", "127.0.0.1.evil.example:8000", "10.0.0.1", "", "[::1"]
)
def test_other_names_are_not_where_only_this_machine_may_ask(name):
    response = client(None, "127.0.0.1").get("/model", headers={"host": name})
    if name == "[::1":
        return  # read as ::1
    assert response.status_code == 403 and "localhost" in response.json()["error"]
    assert client(None, "0.0.0.0").get("/model", headers={"host": name}).text == "yes"


def test_a_token_is_asked_for_where_there_is_one():
    asked = client("wörd".encode().decode("latin-1"), "127.0.0.1")
    for given in (None, "Bearer", "Bearer ", "Bearer other", "word", "bearer word", "Basic word"):
        response = asked.get("/model", headers={"authorization": given} if given else {})
        assert response.status_code == 401 and response.headers["www-authenticate"] == "Bearer"
    plain = client("word", "0.0.0.0")
    assert (
        plain.get("/model", headers={"authorization": "Bearer word", "host": "any.example"}).text
        == "yes"
    )
    # RFC 9110, 11.1 and 11.4
    assert plain.get("/model", headers={"authorization": "bearer  word"}).text == "yes"
    for other in ("Bearer wor", "Basic word", "word", "Bearer word x"):
        assert plain.get("/model", headers={"authorization": other}).status_code == 401


@pytest.mark.parametrize("place", ["header", "query"])
def test_headers_that_arrive_at_once_are_limited_too(place):
    for size, status in ((15_000, 200), (20_000, 431)):  # the first is the control
        text = "x" * size
        headers = {"x-long": text} if place == "header" else {}
        params = {"q": text} if place == "query" else {}
        response = client(None, "127.0.0.1").get("/model", headers=headers, params=params)
        assert response.status_code == status
    assert response.json() == {
        "error": "the address and the headers of a request have more than 16,384 bytes"
    }


def test_the_page_and_what_watches_the_service_need_none():
    for path in ("/", "/readyz"):
        assert client("word", "0.0.0.0").get(path).text == "yes"


def test_every_answer_reports_browsers_to_trust_nothing_else():
    for response in (client(None, "127.0.0.1").get("/"), client("word", "::").get("/model")):
        assert response.headers["x-content-type-options"] == "nosniff"
        assert response.headers["x-frame-options"] == "DENY"


def test_loopback():
    assert [is_loopback(host) for host in ("127.0.0.1", "127.3.2.1", "::1", "localhost")] == [
        True
    ] * 4
    assert not any(
        is_loopback(host)
        for host in ("0.0.0.0", "::", "10.0.0.1", "example.org", "localhost.evil", "")
    )
