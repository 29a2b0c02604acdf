"""The routes of the service."""

import re

from starlette.testclient import TestClient

from finetune.serving.app import make_app


def test_the_page_needs_nothing_from_elsewhere(client):
    page = client.get("/")
    assert page.status_code == 200 and page.headers["content-type"].startswith("text/html")
    assert not re.findall(r"""(?:src|href)=["'](?:https?:)?//""", page.text)
    assert "default-src 'none'" in page.text


def test_health_and_readiness(client, service):
    assert client.get("/healthz").json() == {"status": "ok"}
    assert client.get("/readyz").json() == {"status": "ready"}
    with service.capacity.waiting_images(8):
        assert client.get("/readyz").status_code == 503
    service.stop()
    assert client.get("/readyz").status_code == 503 and client.get("/healthz").status_code == 200


def test_what_the_model_is(client, predictor):
    about = client.get("/model").json()
    assert (
        about["class_names"] == ["blue", "green", "red"] and about["backbone"] == "resnet18_small"
    )
    assert (
        about["image_size"] == 32 and about["threshold"] is None and about["precision"] == "32-true"
    )


def test_metrics_count_requests(client, png_image):
    client.post("/predict", content=png_image())
    client.post("/predict", content=b"no")
    text = client.get("/metrics").text
    assert 'finetune_requests_total{status="200"} 1.0' in text and 'status="422"} 1.0' in text


def test_other_addresses_and_methods_are_reported_in_json(client):
    missing = client.get("/predic%0a" + "x" * 500)
    assert missing.status_code == 404 and len(missing.json()["error"]) < 300
    assert "/predict" in missing.json()["error"]
    removed = client.get("/docs")
    assert removed.status_code == 404 and "/openapi.json" in removed.json()["error"]
    wrong = client.get("/predict")
    assert (
        wrong.status_code == 405
        and wrong.headers["allow"] == "POST"
        and "POST" in wrong.json()["error"]
    )


def test_a_fault_of_ours_is_reported_without_its_inside(client, service, png_image, monkeypatch):
    monkeypatch.setattr(service, "_image", lambda upload, index: 1 / 0)
    response = client.post("/predict", content=png_image())
    assert (
        response.status_code == 500 and "division" not in response.text and response.json()["error"]
    )
    monkeypatch.undo()
    assert client.post("/predict", content=png_image()).status_code == 200


def test_a_page_of_a_service_with_a_token_asks_for_it(service):
    with TestClient(make_app(service, "word", "0.0.0.0"), "http://elsewhere") as client:
        assert "HAS_TOKEN = true" in client.get("/").text
        assert client.post("/predict", content=b"x").status_code == 401
