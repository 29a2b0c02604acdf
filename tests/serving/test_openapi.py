"""The OpenAPI description matches the service."""

import re
from pathlib import Path

from openapi_spec_validator import validate
from starlette.routing import Route

import finetune.serving
from finetune.serving import guard
from finetune.serving.app import Pages
from finetune.serving.openapi import description
from finetune.serving.service import Service
from finetune.serving.uploads import Limits

LIMITS = Limits(1000, 2, 3000, 4, 5)
ROUTES = [
    Route("/", Pages.page),
    Route("/predict", Service.predict, methods=["POST"]),
    Route("/model", Pages.about),
    Route("/healthz", Pages.healthz),
    Route("/readyz", Pages.readyz),
    Route("/metrics", Pages.prometheus),
]
API = description(ROUTES, LIMITS)


def test_it_is_valid_openapi():
    validate(API)


def test_the_description_is_made_of_options_limits_and_types():
    """Worked out by hand from `RequestOptions`, the limits above and `response_types`."""
    predict = API["paths"]["/predict"]["post"]
    assert [(p["name"], p["schema"]) for p in predict["parameters"]] == [
        ("top_k", {"type": "integer", "minimum": 1}),
        ("looked_at", {"type": "boolean", "default": False}),
    ]
    assert (
        predict["parameters"][0]["description"] == "the number of most probable classes to return"
    )
    assert "at most 3,000 pixels" in predict["description"]
    assert predict["responses"]["413"]["description"] == "more than 2 images or 1,000 bytes"
    prediction = API["components"]["schemas"]["Prediction"]
    assert prediction["required"] == ["name", "label", "probability", "probabilities"]
    text = "of every class, or of the top_k most probable, in that order"
    classes = {"type": "object", "additionalProperties": {"type": "number"}, "description": text}
    assert prediction["properties"]["probabilities"] == classes
    assert prediction["properties"]["looked_at"]["type"] == ["string", "null"]
    error = API["components"]["schemas"]["Error"]
    assert error["required"] == ["error"]
    fields = {"index": {"type": "integer"}, "name": {"type": "string"}, "error": {"type": "string"}}
    assert error["properties"]["pictures"]["items"] == {"type": "object", "properties": fields}
    status = {"type": "object", "properties": {"status": {"type": "string"}}}
    busy = API["paths"]["/readyz"]["get"]["responses"]["503"]
    assert busy["content"] == {"application/json": {"schema": status}}
    assert API["paths"]["/metrics"]["get"]["responses"]["200"]["content"].keys() == {"text/plain"}


def test_every_address_for_programs_is_described_and_is_there(client):
    described = {(path, method) for path, methods in API["paths"].items() for method in methods}
    routes = {
        (route.path, method.lower())
        for route in client.app.routes
        for method in route.methods - {"HEAD"}
    }
    assert routes - described == {("/", "get"), ("/openapi.json", "get")}
    assert described <= routes
    assert client.get("/openapi.json").json()["paths"].keys() == API["paths"].keys()
    assert {route.path for route in ROUTES} == {path for path, _ in routes} - {"/openapi.json"}


def test_every_status_that_the_code_answers_with_is_described():
    code = "".join(path.read_text() for path in Path(finetune.serving.__file__).parent.glob("*.py"))
    statuses = {*re.findall(r"Refused\(\s*(\d{3})", code)}
    assert len(statuses) > 6
    assert statuses | {"200"} == {*API["paths"]["/predict"]["post"]["responses"]}


def test_what_needs_a_token_says_so(client):
    for path, methods in API["paths"].items():
        for operation in methods.values():
            needs_one = path not in guard.OPEN_PATHS
            assert ("security" in operation) == needs_one == ("401" in operation["responses"]), path


def test_an_answer_has_the_fields_that_are_described(client, png_image):
    content = png_image()
    answer = client.post("/predict?looked_at=true", content=content).json()["predictions"][0]
    assert answer.keys() == API["components"]["schemas"]["Prediction"]["properties"].keys()
    error = client.post("/predict", content=b"text").json()
    assert error.keys() == API["components"]["schemas"]["Error"]["properties"].keys()


def test_several_labels_are_described():
    several = description(ROUTES, LIMITS, "several")
    validate(several)
    required = several["components"]["schemas"]["Prediction"]["required"]
    assert required == ["name", "labels", "probabilities", "thresholds"]
    rest = {key: value for key, value in several.items() if key != "components"}
    assert rest == {key: value for key, value in API.items() if key != "components"}
