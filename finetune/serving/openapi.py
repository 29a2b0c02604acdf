"""The OpenAPI 3.1 description of the service."""

from typing import Any

import finetune
from finetune.models.heads import LabelKind
from finetune.serving.uploads import Limits

_PREDICTION: dict[str, Any] = {
    "type": "object",
    "required": ["name", "label", "probability", "probabilities"],
    "properties": {
        "name": {
            "type": "string",
            "description": "of the file, as the request has it; empty for a body without one",
        },
        "label": {
            "type": "string",
            "description": "the predicted class, by the checkpoint's threshold if it has one",
        },
        "probability": {"type": "number", "description": "of that class, from 0 to 1"},
        "probabilities": {
            "type": "object",
            "description": "of every class, or of the top_k most probable, in that order",
            "additionalProperties": {"type": "number"},
        },
        "looked_at": {
            "type": ["string", "null"],
            "description": "a data: URL of a heat map of the predicted class; "
            "null if the network does not support it, and absent unless requested",
        },
    },
}
_OF_EACH = {"type": "object", "additionalProperties": {"type": "number"}}
# of a network for several labels an image
_LABELS_PREDICTION = {
    "type": "object",
    "required": ["name", "labels", "probabilities", "thresholds"],
    "properties": {
        "name": _PREDICTION["properties"]["name"],
        "labels": {
            "type": "array",
            "description": "labels whose probability is at least their threshold; any number of them",
            "items": {"type": "string"},
        },
        "probabilities": {
            **_OF_EACH,
            "description": "of every label, or of the top_k most probable, in that order",
        },
        "thresholds": {**_OF_EACH, "description": "of the same labels"},
        "looked_at": {
            "type": "object",
            "description": "for each predicted label a data: URL of its heat map; "
            "null for networks that have none. Only if it was requested",
            "additionalProperties": {"type": ["string", "null"]},
        },
    },
}
_ERROR = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {"type": "string", "description": "one line: what is wrong, and what to do"},
        "pictures": {
            "type": "array",
            "description": "the images of the request that failed",
            "items": {
                "type": "object",
                "properties": {
                    "index": {"type": "integer"},
                    "name": {"type": "string"},
                    "error": {"type": "string"},
                },
            },
        },
    },
}


def description(limits: Limits, label_kind: LabelKind = "single") -> dict[str, Any]:
    """Return the OpenAPI description of a service with these limits, for one class or several labels per image."""
    prediction = _PREDICTION if label_kind == "single" else _LABELS_PREDICTION
    refusals = {
        400: "an unreadable option or form",
        408: f"the request took longer than {limits.seconds:g} s to arrive",
        413: f"more than {limits.max_pictures} images or {limits.max_bytes:,} bytes",
        415: "a compressed body, or JSON, base64 or another text where the bytes of an image are expected",
        422: "no image, or an unreadable one: `pictures` lists which, and why",
        429: f"more than {limits.max_waiting} images or too many large requests: retry after Retry-After seconds",
        500: "a failure of the service, or probabilities that are not finite numbers: `pictures` lists the images",
        503: f"no answer within {limits.seconds:g} s, or too many connections",
    }
    pixels = f"JPEG, PNG, WebP, BMP, TIFF or GIF of at most {limits.max_pixels:,} pixels"
    form = {"type": "object", "additionalProperties": {"type": "array", "items": _BINARY}}
    predict = {
        "summary": "Classify images",
        "description": f"One image as the body, or several as files of a multipart form: {pixels}.",
        "parameters": [
            _option(
                "top_k",
                {"type": "integer", "minimum": 1},
                "the number of most probable classes to return",
            ),
            _option(
                "looked_at",
                {"type": "boolean", "default": False},
                "return a heat map of the predicted class",
            ),
        ],
        "requestBody": {
            "required": True,
            "content": {
                "multipart/form-data": {"schema": form},
                **{kind: {"schema": _BINARY} for kind in ("application/octet-stream", "image/*")},
            },
        },
        "responses": {
            "200": _json("one for each image, in the order of the request", _PREDICTIONS),
            **{str(status): _json(text, _FAULT) for status, text in refusals.items()},
        },
    }
    plain = {"type": "object", "properties": {"status": {"type": "string"}}}
    ready = _get("Whether it takes requests", plain)
    ready["responses"]["503"] = _json("it stops, or is full", plain)
    text = {"description": "text", "content": {"text/plain": {"schema": {"type": "string"}}}}
    counts: dict[str, Any] = {"summary": "Counts for Prometheus", "responses": {"200": text}}
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "finetune",
            "version": finetune.__version__,
            "description": "An image classifier.",
        },
        "paths": {
            "/predict": {"post": _for_token(predict)},
            "/model": {
                "get": _for_token(_get("Classes, network and threshold", {"type": "object"}))
            },
            "/healthz": {"get": _get("Whether the process lives", plain)},
            "/readyz": {"get": ready},
            "/metrics": {"get": _for_token(counts)},
        },
        "components": {
            "schemas": {"Prediction": prediction, "Error": _ERROR},
            "securitySchemes": {"token": {"type": "http", "scheme": "bearer"}},
        },
    }


_FAULT = {"$ref": "#/components/schemas/Error"}
_REFUSALS = {401: "a token is needed", 403: "the service answers to localhost alone"}
_BINARY = {"type": "string", "format": "binary"}
_PREDICTIONS = {
    "type": "object",
    "required": ["predictions"],
    "properties": {
        "predictions": {"type": "array", "items": {"$ref": "#/components/schemas/Prediction"}}
    },
}


def _option(name: str, schema: dict[str, Any], text: str) -> dict[str, Any]:
    return {"name": name, "in": "query", "required": False, "description": text, "schema": schema}


def _json(text: str, schema: dict[str, Any]) -> dict[str, Any]:
    return {"description": text, "content": {"application/json": {"schema": schema}}}


def _for_token(operation: dict[str, Any]) -> dict[str, Any]:
    """Return the description of an operation with the token that it needs, if the service has one."""
    refusals = {status: _json(_REFUSALS[int(status)], _FAULT) for status in ("401", "403")}
    responses = dict(sorted({**operation["responses"], **refusals}.items()))
    return {**operation, "responses": responses, "security": [{}, {"token": []}]}


def _get(text: str, schema: dict[str, Any]) -> dict[str, Any]:
    return {"summary": text, "responses": {"200": _json(text, schema)}}
