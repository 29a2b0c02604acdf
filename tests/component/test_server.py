"""What `finetune serve` answers, in this process: predictions, refusals, and what watches a service.

As a process: test_serve.py and test_http_server.py; under load: test_busy_server.py; hostile: test_hostile_requests.py.
"""

import json
import re
import struct
import time
import zlib

import numpy as np
import pytest
from probabilities import probabilities
from prometheus_client.parser import text_string_to_metric_families
from services import LIMITS, client_of, image_bytes

from finetune.data.decode import decode
from finetune.inference.predictor import Predictor
from finetune.serving.service import Service


@pytest.fixture(scope="module")
def predictor(fitted_runs):
    return Predictor(fitted_runs.single / "checkpoints/best.ckpt")


@pytest.fixture
def service(predictor):
    return Service(predictor, LIMITS, max_batch=4)


@pytest.fixture
def client(service):
    with client_of(service) as client:
        yield client


def files(*contents: bytes) -> list[tuple[str, tuple[str, bytes]]]:
    return [("picture", (f"{i}.png", content)) for i, content in enumerate(contents)]


def one(response) -> dict:
    assert response.status_code == 200, response.text
    (prediction,) = response.json()["predictions"]
    return prediction


def test_predict_answers_each_image_of_a_form_as_the_predictor(client, predictor):
    kinds = ((0, (40, 60), "PNG"), (1, (90, 33), "JPEG"), (2, (8, 8), "WEBP"))
    contents = [image_bytes(*kind) for kind in kinds]
    predictions = client.post("/predict", files=files(*contents)).json()["predictions"]
    expected = probabilities(predictor, [decode(content) for content in contents])
    assert [each["name"] for each in predictions] == ["0.png", "1.png", "2.png"]
    for prediction, p in zip(predictions, expected, strict=True):
        found = prediction["probabilities"]
        assert list(found.values()) == sorted(found.values(), reverse=True)
        # seven digits, other neighbours
        by_class = [found[name] for name in predictor.class_names]
        np.testing.assert_allclose(by_class, p, rtol=0, atol=2e-6)
        assert prediction["label"] == predictor.class_names[p.argmax()]
        assert prediction["probability"] == found[prediction["label"]]
    alone = one(client.post("/predict", content=contents[1]))
    assert alone["name"] == "" and abs(alone["probability"] - predictions[1]["probability"]) < 2e-6


def test_predict_takes_an_image_whatever_the_request_calls_it_and_shows_names(client):
    content = image_bytes()
    expected = one(client.post("/predict", content=content))
    for kind in (
        "image/jpeg",
        "application/json",
        "application/x-www-form-urlencoded",
        "text/plain",
    ):
        answer = client.post("/predict", content=content, headers={"content-type": kind})
        assert one(answer) == expected
    for sent, name in (("ä b.png", "ä b.png"), ("evil\u202e.png", "evil\\u202e.png")):
        answer = client.post("/predict", files=[("x", (sent, content))])
        assert one(answer) == {**expected, "name": name}


def test_predict_with_top_k_has_the_best_classes(client):
    every = one(client.post("/predict", content=image_bytes()))["probabilities"]
    best = one(client.post("/predict?top_k=2", content=image_bytes()))["probabilities"]
    assert list(best.items()) == list(every.items())[:2]


def test_predict_with_heatmap_has_a_heat_map_if_it_is_fine_enough(client, service, monkeypatch):
    shown = {}
    for cells in (5, 4, None):  # None is of a network without maps
        maps = None if cells is None else np.full((1, cells, cells), 0.5)
        monkeypatch.setattr(service.predictor, "activation", lambda *_, maps=maps: maps)
        answer = one(client.post("/predict?heatmap=1", content=image_bytes()))
        shown[cells] = answer["heatmap"]
    assert shown[5].startswith("data:image/webp;base64,") and shown[4] is shown[None] is None
    assert "heatmap" not in one(client.post("/predict", content=image_bytes()))


def multipart(*parts: bytes, end: bytes = b"--edge--\r\n", kind: str = "boundary=edge") -> dict:
    head = b"--edge\r\nContent-Disposition: form-data; name=a"
    body = b"".join(head + part + b"\r\n" for part in parts) + end
    return {"content": body, "headers": {"content-type": f"multipart/form-data; {kind}"}}


FILE = b'; filename="a"\r\n\r\n1'
REFUSED = {
    "no option": (422, "topk", "?topk=2", {"content": b"x"}),
    "top_k of none": (422, "top_k", "?top_k=0", {"content": b"x"}),
    "top_k in words": (422, "top_k", "?top_k=x", {"content": b"x"}),
    "top_k as a power": (422, "top_k", "?top_k=²", {"content": b"x"}),
    "top_k of many digits": (422, "top_k", f"?top_k=1{'9' * 5000}", {"content": b"x"}),
    "another heat map": (422, "heatmap", "?heatmap=maybe", {"content": b"x"}),
    "a large body": (413, "200,000 bytes", "", {"content": b"x" * 200_001}),
    "a large body in parts": (413, "200,000 bytes", "", {"content": iter([b"x" * 150_000] * 2)}),
    "many images": (413, "4 images", "", multipart(*[FILE] * 5)),
    "nothing": (422, "no image", "", {"content": b""}),
    "an empty form": (422, "no image", "", multipart()),
    "no boundary": (400, "unreadable", "", multipart(FILE, kind="")),
    "another boundary": (400, "unreadable", "", multipart(end=b"no edge at all")),
    "a form that was cut": (400, "last boundary", "", multipart(FILE, end=b"--ed")),
    "an unknown charset": (415, "UTF-8", "", multipart(FILE, kind="boundary=edge; charset=x")),
    # Quadratic in Python: a megabyte would take minutes, in which nothing else is answered.
    "punycode": (415, "UTF-8", "", multipart(FILE, kind='boundary=edge; charset="punycode"')),
    "a field that is no file": (422, "'a'", "", multipart(b"\r\n\r\n3")),
    "no image": (422, "cannot be decoded", "", {"content": b"hello"}),
}


@pytest.mark.parametrize("case", REFUSED)
def test_predict_refuses_a_request_in_one_line(client, case):
    status, words, query, request = REFUSED[case]
    began = time.monotonic()
    answer = client.post("/predict" + query, **request)
    assert time.monotonic() - began < 5  # and not when the time of a request is over
    error = answer.json()["error"]
    assert answer.status_code == status and words in error, error
    assert "\n" not in error and len(error) < 300
    described = client.get("/openapi.json").json()["paths"]["/predict"]["post"]["responses"]
    assert str(status) in described
    assert client.post("/predict", content=image_bytes()).status_code == 200


def bomb(width: int, height: int) -> bytes:
    """A small PNG whose header states this many pixels."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return (
            struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
        )

    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", b"") + chunk(b"IEND", b"")


def test_a_bad_image_is_named_and_fails_its_own_request(client):
    contents = image_bytes(), b"", image_bytes()[:200], bomb(30_000, 30_000)
    answer = client.post("/predict", files=files(*contents))
    bad = answer.json()["images"]
    assert answer.status_code == 422 and answer.json()["error"] == bad[0]["error"]
    assert [(each["index"], each["name"]) for each in bad] == [
        (1, "1.png"),
        (2, "2.png"),
        (3, "3.png"),
    ]
    assert "empty" in bad[0]["error"] and "limit of 178956970" in bad[2]["error"]
    # more than the service's limit, less than the decoder's
    assert "10,000" in client.post("/predict", content=bomb(200, 100)).json()["error"]


def test_probabilities_that_are_not_numbers_fail_their_own_request(
    client, service, monkeypatch, caplog
):
    scores = service.predictor.scores

    def black_is_lost(images):
        found = scores(images)
        found.probabilities[(images == 0).all(axis=(1, 2, 3))] = np.nan
        return found

    monkeypatch.setattr(service.predictor, "scores", black_is_lost)
    black = bytes.fromhex("424d3a0000000000000036000000280000000100000001000000010018")
    black = black.ljust(58, b"\0")  # a BMP of one pixel
    answer = client.post("/predict", files=files(image_bytes(), black))
    (bad,) = answer.json()["images"]
    assert answer.status_code == 500 and answer.json()["error"] == bad["error"]
    assert bad["index"] == 1 and "not finite numbers" in bad["error"]
    assert str(service.predictor.path) in caplog.text
    assert client.post("/predict", content=image_bytes()).status_code == 200


def test_a_fault_of_ours_is_reported_without_its_inside_and_counted(client, service, monkeypatch):
    monkeypatch.setattr(service.predictor, "scores", lambda images: 1 / 0)
    answer = client.post("/predict", content=image_bytes())
    assert answer.status_code == 500 and answer.json()["error"] and "division" not in answer.text
    monkeypatch.undo()
    assert client.post("/predict", content=image_bytes()).status_code == 200
    assert 'finetune_requests_total{status="500"} 1.0' in client.get("/metrics").text


@pytest.mark.parametrize(
    ("method", "path", "status", "words"),
    [
        ("GET", "/predic%0a" + "x" * 500, 404, "/predic"),
        ("GET", "/docs", 404, "/docs"),
        ("GET", "/predict", 405, "GET"),
        ("POST", "/model", 405, "POST"),
    ],
)
def test_other_addresses_and_methods_are_answered_in_one_line(client, method, path, status, words):
    answer = client.request(method, path)
    error = answer.json()["error"]
    assert answer.status_code == status and words in error and len(error) < 300
    assert "\n" not in error


def test_model_health_and_readiness(client, service):
    about = client.get("/model").json()
    assert about["class_names"] == ["blue", "green", "red"] and about["backbone"] == "small_cnn"
    assert about["image_size"] == 28 and about["threshold"] is None
    assert about["precision"] == "32-true"
    assert client.get("/healthz").json() == {"status": "ok"}
    assert client.get("/readyz").json() == {"status": "ready"}
    with service.capacity.waiting_images(8):
        assert client.get("/readyz").status_code == 503
    service.stop()
    assert client.get("/readyz").status_code == 503 and client.get("/healthz").status_code == 200


def test_metrics_count_requests_classes_and_batches_of_each_service(client, predictor):
    client.post("/predict", files=files(image_bytes(), image_bytes(1)))
    client.post("/predict", content=b"no")

    def found(client) -> dict:
        families = text_string_to_metric_families(client.get("/metrics").text)
        return {
            (s.name, *s.labels.values()): s.value for family in families for s in family.samples
        }

    counts = found(client)
    assert counts["finetune_requests_total", "200"] == 1
    assert counts["finetune_requests_total", "422"] == 1
    assert sum(counts["finetune_images_total", name] for name in predictor.class_names) == 2
    assert counts["finetune_request_seconds_count",] == 1  # of good ones
    assert counts["finetune_batch_size_sum",] == 2 and counts["finetune_waiting_images",] == 0
    assert counts["process_resident_memory_bytes",] > 1e6
    with client_of(Service(predictor, LIMITS, max_batch=4)) as other:
        assert ("finetune_requests_total", "200") not in found(other)


@pytest.mark.parametrize(
    ("name", "is_answered"),
    [
        *((name, True) for name in ("localhost", "127.0.0.1:8000", "[::1]:8000", "127.8.8.8")),
        *((name, True) for name in ("LOCALHOST:1", "[::1")),
        *(
            (name, False)
            for name in ("evil.example", "127.0.0.1.evil.example:8000", "10.0.0.1", "")
        ),
    ],
)
def test_host_names_of_others_are_refused_where_only_this_machine_may_ask(
    client, service, name, is_answered
):
    """A web page could point its own name at 127.0.0.1 and read the answers."""
    answer = client.get("/model", headers={"host": name})
    assert answer.status_code == (200 if is_answered else 403)
    assert (
        client_of(service, host="0.0.0.0").get("/model", headers={"host": name}).status_code == 200
    )


@pytest.mark.parametrize(
    ("sent", "status"),
    [
        *((sent, 200) for sent in ("Bearer word", "bearer  word")),  # RFC 9110, 11.1 and 11.4
        *((sent, 401) for sent in ("", "Bearer", "Bearer ", "Bearer wor", "word", "Basic word")),
        ("Bearer word x", 401),
        ("Bearer wörd".encode().decode("latin-1"), 401),
    ],
)
def test_a_token_is_needed_for_all_but_the_page_and_what_watches(service, sent, status):
    client = client_of(service, token="word", host="0.0.0.0")
    headers = {"authorization": sent.encode("latin-1")}
    answer = client.get("/model", headers=headers)
    assert answer.status_code == status
    assert status == 200 or answer.headers["www-authenticate"] == "Bearer"
    assert client.post("/predict", content=image_bytes(), headers=headers).status_code == status
    paths = client.get("/openapi.json").json()["paths"]
    for path in ("/", "/healthz", "/readyz"):
        assert client.get(path).status_code == 200
        assert path == "/" or "security" not in paths[path]["get"]
    assert "security" in paths["/model"]["get"] and "security" in paths["/predict"]["post"]


def test_the_page_fetches_nothing_from_elsewhere_and_asks_for_a_token(client, service):
    page = client.get("/")
    assert page.headers["content-type"].startswith("text/html")
    assert not re.findall(r"""(?:src|href)=["'](?:https?:)?//""", page.text)
    assert "default-src 'none'" in page.text and "HAS_TOKEN = true" not in page.text
    assert "HAS_TOKEN = true" in client_of(service, token="word").get("/").text
    for answer in (page, client.get("/model")):
        assert answer.headers["x-content-type-options"] == "nosniff"
        assert answer.headers["x-frame-options"] == "DENY"


@pytest.fixture
def logged(service):
    return client_of(service, token="word", logged_model="0123456789abcdef")


KEY = {"authorization": "Bearer word"}


def test_log_json_has_a_line_for_each_request_without_its_query(logged, capfd):
    answer = logged.get("/model?token=secret", headers={**KEY, "x-request-id": "proxy-1.a:b"})
    logged.get("/model")
    logged.get("/%0Anew line" + 300 * "x", headers=KEY)
    lines = [json.loads(line) for line in capfd.readouterr().out.splitlines()]
    names = ["time", "request_id", "method", "path", "status", "milliseconds", "model"]
    assert [list(line) for line in lines] == [names] * 3
    assert lines[0]["request_id"] == answer.headers["x-request-id"] == "proxy-1.a:b"
    assert [line["status"] for line in lines] == [200, 401, 404]
    assert lines[0]["path"] == "/model" and lines[0]["model"] == "0123456789abcdef"
    assert lines[2]["path"].startswith("/\nnew line") and len(lines[2]["path"]) == 200


@pytest.mark.parametrize("sent", ["", "two words", '"quote', "x" * 129, "é".encode()])
def test_log_json_replaces_a_request_id_that_is_none(logged, capfd, sent):
    answers = [logged.get("/healthz", headers={"x-request-id": sent}) for _ in range(2)]
    ids = [json.loads(line)["request_id"] for line in capfd.readouterr().out.splitlines()]
    assert ids == [answer.headers["x-request-id"] for answer in answers]
    assert len(set(ids)) == 2 and all(len(text) == 32 for text in ids)
