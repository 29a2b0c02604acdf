"""The OpenAPI 3.1 description of the service, made from its routes, their options and the types of their answers."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from types import NoneType, UnionType
from typing import Annotated, Any, NotRequired, TypeVar, get_args, get_origin, get_type_hints

from starlette.routing import BaseRoute, Route

import finetune
from finetune.serving.guard import MAX_HEADER_BYTES, OPEN_PATHS
from finetune.serving.response_types import Error, LabelsPrediction, Prediction
from finetune.serving.uploads import Limits
from finetune.settings.schema import LabelKind

Schema = dict[str, Any]
Handler = TypeVar("Handler", bound=Callable)

_TYPES = {str: "string", int: "integer", float: "number", bool: "boolean", NoneType: "null"}
_PREDICTION = {"$ref": "#/components/schemas/Prediction"}
_ERROR = {"$ref": "#/components/schemas/Error"}
PREDICTIONS: Schema = {
    "type": "object",
    "required": ["predictions"],
    "properties": {"predictions": {"type": "array", "items": _PREDICTION}},
}
_FILE = {"type": "string", "format": "binary"}
_FORM = {"type": "object", "additionalProperties": {"type": "array", "items": _FILE}}
IMAGES: Schema = {
    "multipart/form-data": _FORM,
    **dict.fromkeys(("application/octet-stream", "image/*"), _FILE),
}
_TOKEN_ANSWERS = {401: "a token is needed", 403: "the service answers to localhost alone"}


@dataclass(frozen=True)
class Operation:
    """The description of a handler; its texts may contain `{limits.…}`.

    Attributes:
        summary: What it does.
        answer: Schema or type of the answer with status 200; None for plain text.
        text: Description of that answer.
        description: More than the summary says.
        options: The named tuple of its query options.
        body: Schema of the body for each content type.
        errors: Description of each other status.
        error_type: Schema or type of these answers.
    """

    summary: str
    answer: Any
    text: str = ""
    description: str = ""
    options: type | None = None
    body: Schema | None = None
    errors: dict[int, str] | None = None
    error_type: Any = None


def described(operation: Operation) -> Callable[[Handler], Handler]:
    """Return a decorator that gives a handler its description."""

    def describe(handler: Handler) -> Handler:
        handler.operation = operation  # type: ignore[attr-defined]
        return handler

    return describe


def description(
    routes: Iterable[BaseRoute], limits: Limits, label_kind: LabelKind = "single"
) -> dict[str, Any]:
    """Return the OpenAPI description of a service.

    Args:
        routes: Its routes. Those whose handler is not `described` are pages for people.
        limits: Limits of requests.
        label_kind: Whether the network predicts one class or several labels per image.
    """
    paths: dict[str, Any] = {}
    for route in routes:
        operation = getattr(getattr(route, "endpoint", None), "operation", None)
        if operation is not None:
            assert isinstance(route, Route)
            (method,) = (route.methods or set()) - {"HEAD"}
            needs_token = route.path not in OPEN_PATHS
            paths[route.path] = {method.lower(): _operation(operation, limits, needs_token)}
    prediction = Prediction if label_kind == "single" else LabelsPrediction
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "finetune",
            "version": finetune.__version__,
            "description": "An image classifier.",
        },
        "paths": paths,
        "components": {
            "schemas": {"Prediction": schema_of(prediction), "Error": schema_of(Error)},
            "securitySchemes": {"token": {"type": "http", "scheme": "bearer"}},
        },
    }


def _operation(operation: Operation, limits: Limits, needs_token: bool) -> dict[str, Any]:
    """Return the description of a handler as an Operation Object of OpenAPI."""
    result: dict[str, Any] = {"summary": operation.summary}
    if operation.description:
        result["description"] = operation.description.format(limits=limits)
    if operation.options is not None:
        result["parameters"] = _parameters(operation.options)
    if operation.body is not None:
        content = {kind: {"schema": schema} for kind, schema in operation.body.items()}
        result["requestBody"] = {"required": True, "content": content}
    answers = {200: _answer(operation.text or operation.summary, operation.answer)}
    for status, text in (operation.errors or {}).items():
        answers[status] = _answer(text.format(limits=limits), operation.error_type or _ERROR)
    answers[431] = _answer(
        f"an address and headers of more than {MAX_HEADER_BYTES:,} bytes", _ERROR
    )
    if needs_token:
        answers |= {status: _answer(text, _ERROR) for status, text in _TOKEN_ANSWERS.items()}
    result["responses"] = {str(status): answer for status, answer in sorted(answers.items())}
    if needs_token:
        result["security"] = [{}, {"token": []}]
    return result


def _parameters(options: Any) -> list[dict[str, Any]]:
    """Return the description of query options: a named tuple whose fields are annotated with a text."""
    parameters = []
    for name, hint in get_type_hints(options, include_extras=True).items():
        kind, text, *constraints = get_args(hint)
        (plain,) = set(get_args(kind) or [kind]) - {NoneType}
        schema: Schema = {"type": _TYPES[plain]}
        for constraint in constraints:
            schema |= constraint
        default = options._field_defaults[name]
        if default is not None:
            schema["default"] = default
        about = {"name": name, "in": "query", "required": False, "description": text}
        parameters.append({**about, "schema": schema})
    return parameters


def _answer(text: str, answer: Any) -> dict[str, Any]:
    """Return a Response Object of OpenAPI: a description, and the schema or type of the answer; None for text."""
    if answer is None:
        return {"description": text, "content": {"text/plain": {"schema": schema_of(str)}}}
    schema = answer if isinstance(answer, dict) else schema_of(answer)
    return {"description": text, "content": {"application/json": {"schema": schema}}}


def schema_of(kind: Any) -> Schema:
    """Return the JSON schema of a type: a TypedDict, or one of the types of its fields."""
    if get_origin(kind) is NotRequired:
        return schema_of(get_args(kind)[0])
    if get_origin(kind) is Annotated:
        inner, text = get_args(kind)
        return {**schema_of(inner), "description": text}
    if isinstance(kind, UnionType):
        return {"type": [_TYPES[one] for one in get_args(kind)]}
    if get_origin(kind) is list:
        return {"type": "array", "items": schema_of(get_args(kind)[0])}
    if get_origin(kind) is dict:
        return {"type": "object", "additionalProperties": schema_of(get_args(kind)[1])}
    if kind in _TYPES:
        return {"type": _TYPES[kind]}
    hints = get_type_hints(kind, include_extras=True)
    schema: Schema = {"type": "object"}
    if kind.__required_keys__:
        schema["required"] = [name for name in hints if name in kind.__required_keys__]
    return {**schema, "properties": {name: schema_of(hint) for name, hint in hints.items()}}
