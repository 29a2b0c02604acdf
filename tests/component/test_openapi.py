"""The OpenAPI description is valid, and that of the service's options, limits and answers."""

import pytest
from openapi_spec_validator import validate
from services import LIMITS, client_of, image_bytes

from finetune.inference.predictor import Predictor
from finetune.serving.service import Service


@pytest.fixture(scope="module")
def clients(fitted_runs):
    """A client of a service by the kind of its labels."""
    checkpoints = {"single": fitted_runs.single, "several": fitted_runs.several}
    found = {}
    for kind, run in checkpoints.items():
        service = Service(Predictor(run / "checkpoints/best.ckpt"), LIMITS, max_batch=4)
        found[kind] = client_of(service)
    yield found
    for client in found.values():
        with client:
            pass


@pytest.mark.parametrize("kind", ["single", "several"])
def test_the_description_is_valid_and_has_the_fields_of_answers(clients, kind):
    client = clients[kind]
    description = client.get("/openapi.json").json()
    validate(description)
    schemas = description["components"]["schemas"]
    prediction = schemas["Prediction"]
    answer = client.post("/predict?heatmap=true", content=image_bytes()).json()
    assert answer["predictions"][0].keys() == prediction["properties"].keys()
    assert {*prediction["required"]} == answer["predictions"][0].keys() - {"heatmap"}
    error = client.post("/predict", content=b"text").json()
    assert error.keys() == schemas["Error"]["properties"].keys()


def test_every_address_for_programs_is_described_and_is_there(clients):
    client = clients["single"]
    paths = client.get("/openapi.json").json()["paths"]
    described = {(path, method) for path, methods in paths.items() for method in methods}
    assert described == {
        ("/predict", "post"),
        *((f"/{name}", "get") for name in ("model", "healthz", "readyz", "metrics")),
    }
    for path, method in described:
        assert client.request(method, path).status_code != 404


def test_the_description_of_predict_is_made_of_options_and_limits(clients):
    predict = clients["single"].get("/openapi.json").json()["paths"]["/predict"]["post"]
    assert [p["name"] for p in predict["parameters"]] == ["top_k", "heatmap"]
    assert all(p["description"] for p in predict["parameters"])
    assert "10,000 pixels" in predict["description"] and "AVIF" in predict["description"]
    assert "4 images or 200,000 bytes" in predict["responses"]["413"]["description"]
