"""The routes of a review: hostile requests are refused, and the page's own requests are answered."""

import io
import json

import pytest
from PIL import Image
from reviews import TOKEN, begin_review, client_of, copy_with_wrong_labels, job_of
from starlette.testclient import TestClient

from finetune.review.review_app import make_review_app

DECISION = {"index": 0, "action": "exclude", "labels": None, "line": 0}


def test_the_page_its_state_and_its_images(client):
    page = client.get("")
    assert page.status_code == 200 and "connect-src 'self'" in page.text
    assert page.headers["cache-control"] == "no-store" and page.headers["x-frame-options"] == "DENY"
    state = client.get("state").json()
    assert state["class_names"] == ["blue", "green", "red"] and state["ranking"]["is_ready"]
    item = client.get(f"item/{state['next']}").json()
    for side, most in (("large", 1024), ("small", 224)):
        answer = client.get(f"image/{item['index']}/{side}")
        assert answer.headers["content-type"] == "image/webp"
        assert max(Image.open(io.BytesIO(answer.content)).size) <= most
    answer = client.post("decide", json={**DECISION, "index": item["index"]}).json()
    assert answer["item"]["action"] == "exclude" and answer["counts"]["excluded"] == 1
    assert client.post("decide", json={**DECISION, "index": item["index"]}).status_code == 409


@pytest.fixture(scope="module")
def folder(colours, tmp_path_factory):
    """A folder that is reviewed, and that no request may change."""
    return copy_with_wrong_labels(colours, tmp_path_factory.mktemp("review") / "wrong")


@pytest.fixture(scope="module")
def shared_client(folder):
    with client_of(begin_review(folder)) as client:
        yield client


HOSTILE = {
    "no token": ("GET", "http://127.0.0.1:8000/", {}, 404),
    "a token that is not ASCII": ("GET", "http://127.0.0.1:8000/w%C3%B6rd/", {}, 403),
    "another token": ("GET", "http://127.0.0.1:8000/wrod/", {}, 403),
    "another host": ("GET", f"http://127.0.0.1:8000/{TOKEN}/", {"Host": "evil.example"}, 403),
    "no host": ("GET", f"http://127.0.0.1:8000/{TOKEN}/", {"Host": ""}, 403),
    "another origin": ("POST", "decide", {"Origin": "http://evil.example"}, 403),
    "a form": ("POST", "decide", {"Content-Type": "text/plain"}, 422),
    "no type": ("POST", "decide", {"Content-Type": ""}, 422),
    "another method": ("PUT", "decide", {}, 405),
    "no such path": ("GET", "etc/passwd", {}, 404),
    "a path for an image": ("GET", "image/..%2f..%2fetc%2fpasswd/large", {}, 404),
    "an index out of range": ("GET", "image/60/large", {}, 404),
    "a huge index": ("GET", f"image/{10**30}/large", {}, 404),
    "an index of many digits": ("GET", f"item/{'9' * 5000}", {}, 422),
    "another size": ("GET", "image/0/huge", {}, 422),
}


@pytest.mark.parametrize("kind", HOSTILE)
def test_hostile_requests_are_refused_in_one_line_and_change_nothing(shared_client, folder, kind):
    method, url, headers, status = HOSTILE[kind]
    content = {"content": json.dumps(DECISION)} if method != "GET" else {}
    types = {"Content-Type": "application/json"} if content else {}
    answer = shared_client.request(method, url, headers={**types, **headers}, **content)
    assert answer.status_code == status and "\n" not in answer.json()["error"]
    assert answer.headers["referrer-policy"] == "no-referrer"
    assert not (folder.parent / "corrections.csv").exists()


BODIES = {
    b"": 422,
    b"{" * 2000: 422,
    b"[" * 4000: 400,
    b" " * 70_000: 413,
    json.dumps({**DECISION, "path": "x"}).encode(): 422,
    json.dumps({**DECISION, "index": True}).encode(): 422,
    json.dumps({**DECISION, "action": "delete"}).encode(): 422,
    json.dumps({**DECISION, "index": 10**30}).encode(): 404,
    json.dumps({**DECISION, "action": "change", "labels": [3]}).encode(): 404,
    json.dumps({**DECISION, "line": 7}).encode(): 409,
}


@pytest.mark.parametrize("body", BODIES, ids=range(len(BODIES)))
def test_bodies_that_are_no_decisions_are_refused(shared_client, folder, body):
    answer = shared_client.post(
        "decide", content=body, headers={"Content-Type": "application/json"}
    )
    assert answer.status_code == BODIES[body] and answer.json()["error"]
    assert not (folder.parent / "corrections.csv").exists()


def test_an_image_that_is_gone_is_reported_and_can_be_excluded(client, wrong):
    index = client.get("item/0").json()["index"]
    name = client.get("item/0").json()["name"]
    (wrong / name).unlink()
    assert client.get(f"image/{index}/large").status_code == 410
    assert client.post("decide", json={**DECISION, "index": index}).status_code == 200


def test_a_file_that_cannot_be_written_is_reported(client, monkeypatch):
    def fails(*_):
        raise OSError(30, "Read-only file system", "corrections.csv")

    session = "finetune.review.review_session.CorrectionsFile.append"
    monkeypatch.setattr(session, fails)
    answer = client.post("decide", json=DECISION)
    assert answer.status_code == 507
    assert answer.json()["error"] == "not saved: Read-only file system: corrections.csv"
    assert client.get("item/0").json()["action"] == "none"


def test_a_bad_line_in_the_file_is_named_until_it_is_put_right(client, wrong):
    file = wrong.parent / "corrections.csv"
    client.post("decide", json=DECISION)
    content = file.read_text()
    file.write_text(content + "blue/01.png,blue\n")
    for answer in (client.get("state"), client.get("item/0"), client.post("decide", json=DECISION)):
        assert answer.status_code in (503, 507)
        assert answer.json()["error"].endswith(f"{file}, line 3 has 2 values, expected 5")
    file.write_text(content)
    assert client.get("item/0").json()["action"] == "exclude"


def test_a_ranking_that_fails_is_reported_and_the_review_continues(wrong, begin):
    session = begin(wrong)
    job = job_of(session)
    job.network = job.network._replace(preparation={"image_size": -1})
    job.rank()
    app = make_review_app(session, job, TOKEN, "Review")
    with TestClient(app, f"http://127.0.0.1:8000/{TOKEN}/") as client:
        ranking = client.get("state").json()["ranking"]
        assert ranking["error"] and not ranking["is_ready"]
        assert client.get("item/0").status_code == 200
