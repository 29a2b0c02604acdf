"""Hostile requests to `serve` and `review` among good ones: no failure, and each good one gets its own answer."""

import json
from collections import Counter
from pathlib import Path

import httpx
import numpy as np
import pytest
from mutated_files import other_bytes, other_json
from mutated_images import mutated
from promise import promise
from reviews import begin_review, client_of, copy_with_wrong_labels
from small_fits import write_checkpoints
from starlette.testclient import TestClient

from finetune.data.corrections import parse_corrections
from finetune.inference.predictor import Predictor
from finetune.serving import service as service_module
from finetune.serving.app import make_app
from finetune.serving.service import Service
from finetune.serving.uploads import Limits

LIMITS = Limits(max_bytes=200_000, max_images=4, max_pixels=100_000, max_waiting=8, seconds=20)
_TYPES = (
    "image/png",
    "multipart/form-data; boundary=x",
    "multipart/form-data",
    "text/plain",
    "a" * 9000,
    "",
)
_PATHS = (
    "state",
    "item/0",
    "item/99999999999999999999",
    "image/0/huge",
    "../x",
    "image/0/small",
    "decide",
    "%00",
)
_METHODS = ("GET", "PUT", "DELETE", "HEAD", "POST", "OPTIONS")


@pytest.fixture(scope="module")
def predictor(colours, tmp_path_factory) -> Predictor:
    folder = write_checkpoints(tmp_path_factory.mktemp("served"), colours, "small_cnn", 28)
    return Predictor(folder / "plain.ckpt")


def hostile_upload(client: TestClient, number: int) -> httpx.Response:
    """Send a mutated image, form or request; always the same one by its number."""
    rng = np.random.default_rng(number)
    content = mutated(int(rng.integers(10_000))).content
    kind = str(rng.choice(_TYPES))
    form = rng.integers(4)
    if form == 0:
        return client.post("/predict", content=content)
    if form == 1:
        return client.post("/predict", content=content, headers={"Content-Type": kind})
    if form == 2:
        request = client.build_request("POST", "/predict", files=[("file", ("a.png", content))])
        body = other_bytes(request.read(), rng)
        return client.post(
            "/predict", content=body, headers={"Content-Type": request.headers["content-type"]}
        )
    return client.request(str(rng.choice(_METHODS)), f"/{rng.choice(_PATHS)}", headers={"X": kind})


def catch_no_bad_image(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(service_module, "DecodeError", KeyError)


@promise("hostile-requests", controls=[catch_no_bad_image])
def test_serve_answers_good_requests_among_hostile_ones(predictor, colours, trials, record_row):
    paths = sorted(Path(colours, "test").rglob("*.png"))
    app = make_app(Service(predictor, LIMITS, max_batch=4), None, "127.0.0.1")
    number = trials(100, 10_000)
    statuses: Counter[int] = Counter()
    with TestClient(app, "http://127.0.0.1", raise_server_exceptions=False) as client:
        expected = [client.post("/predict", content=path.read_bytes()).json() for path in paths]
        wrong = []
        for i in range(number):
            if i % 10:
                answer = client.post("/predict", content=paths[i % len(paths)].read_bytes())
                if without_times(answer.json()) != without_times(expected[i % len(paths)]):
                    wrong.append((i, answer.text))
            else:
                answer = hostile_upload(client, i)
                statuses[answer.status_code] += 1
                if answer.status_code >= 500:
                    wrong.append((i, answer.text))
    record_row(
        "request to serve, 1 in 10 hostile", number, f"{len(wrong)} faults; {dict(statuses)}"
    )
    assert wrong == []
    assert statuses[422] and statuses[200]


def without_times(answer: dict) -> dict:
    return {
        name: value for name, value in answer.items() if name not in ("seconds", "milliseconds")
    }


def hostile_decision(client: TestClient, number: int) -> httpx.Response:
    rng = np.random.default_rng(number)
    decision = {"index": int(rng.integers(60)), "action": "exclude", "labels": None, "line": 0}
    form = rng.integers(4)
    body = other_json(json.dumps(decision).encode(), rng)
    headers = {"Content-Type": "application/json"}
    if form == 0:
        headers["Origin"] = "http://evil.example"
    if form == 1:
        headers["Content-Type"] = str(rng.choice(_TYPES))
    if form == 2:
        method = str(rng.choice(_METHODS))
        return client.request(method, str(rng.choice(_PATHS)), content=body, headers=headers)
    return client.post("decide", content=body, headers=headers)


@promise("hostile-requests")
def test_review_saves_each_good_decision_among_hostile_ones(colours, tmp_path, trials, record_row):
    folder = copy_with_wrong_labels(colours, tmp_path / "wrong")
    number = trials(100, 10_000)
    statuses: Counter[int] = Counter()
    wrong = []
    num_saved = 0
    with client_of(begin_review(folder)) as client:
        for i in range(number):
            if i % 10 == 0:
                answer = hostile_decision(client, i)
                statuses[answer.status_code] += 1
                is_wrong = answer.status_code >= 500
                num_saved += answer.status_code == 200 and answer.url.path.endswith("/decide")
            else:
                item = client.get(f"item/{i % 60}").json()
                action = "exclude" if item["action"] != "exclude" else "right"
                decision = {"index": i % 60, "action": action, "labels": None, "line": item["line"]}
                answer = client.post("decide", json=decision)
                is_wrong = answer.status_code != 200
                num_saved += answer.status_code == 200
            if is_wrong:
                wrong.append((i, answer.status_code, answer.text))
    record_row(
        "request to review, 1 in 10 hostile", number, f"{len(wrong)} faults; {dict(statuses)}"
    )
    assert wrong == []
    file = tmp_path / "corrections.csv"
    assert len(parse_corrections(file.read_bytes(), file)) == num_saved
    assert statuses[422] and statuses[403]
