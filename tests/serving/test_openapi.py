"""The OpenAPI description matches the service."""

import re
from pathlib import Path

from openapi_spec_validator import validate

import finetune.serving
from finetune.serving import guard
from finetune.serving.openapi import description
from finetune.serving.uploads import Limits

API = description(Limits(1000, 2, 3000, 4, 5))


def test_it_is_valid_openapi():
    validate(API)


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


def test_every_status_that_the_code_answers_with_is_described():
    code = "".join(path.read_text() for path in Path(finetune.serving.__file__).parent.glob("*.py"))
    said = {*re.findall(r"Refused\(\s*(\d{3})", code)}
    assert len(said) > 6
    assert said | {"200"} == {*API["paths"]["/predict"]["post"]["responses"]}


def test_what_needs_a_token_says_so(client):
    for path, methods in API["paths"].items():
        for operation in methods.values():
            needs_one = path not in guard._OPEN
            assert ("security" in operation) == needs_one == ("401" in operation["responses"]), path


def test_an_answer_has_the_fields_that_are_described(client, picture):
    content = picture()
    answer = client.post("/predict?looked_at=true", content=content).json()["predictions"][0]
    assert answer.keys() == API["components"]["schemas"]["Prediction"]["properties"].keys()
    error = client.post("/predict", content=b"text").json()
    assert error.keys() == API["components"]["schemas"]["Error"]["properties"].keys()


def test_several_labels_are_described():
    several = description(Limits(1000, 2, 3000, 4, 5), "several")
    validate(several)
    required = several["components"]["schemas"]["Prediction"]["required"]
    assert required == ["name", "labels", "probabilities", "thresholds"]
    rest = {key: value for key, value in several.items() if key != "components"}
    assert rest == {key: value for key, value in API.items() if key != "components"}
