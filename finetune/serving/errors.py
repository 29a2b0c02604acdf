"""Error responses: JSON with one line about what is wrong and what to do."""

from collections.abc import Callable, Coroutine, Mapping
from typing import Any

from fastapi import HTTPException, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException as StarletteHTTPException
from starlette.requests import ClientDisconnect

from finetune.serving.schemas import Error
from finetune.system.messages import shown

CLIENT_LEFT = 499  # as nginx logs it: the client closed the connection before there was a response
_MAX_NAME = 80  # characters of a name from a request in a message


def error_response(
    status: int, error: Error | str, headers: Mapping[str, str] | None = None
) -> JSONResponse:
    """Return the response to a request that is refused."""
    content = error if isinstance(error, Error) else Error(error=error)
    return JSONResponse(content.model_dump(exclude_unset=True), status, headers)


def busy(status: int, message: str) -> HTTPException:
    """Return an error with the header Retry-After: the service may answer after a second."""
    return HTTPException(status, message, {"Retry-After": "1"})


def quoted(name: str) -> str:
    """Return a name from a request for a message: in quotes, printable, and not too long."""
    return f"'{shown(name)[:_MAX_NAME]}'"


async def _http_error(request: Request, error: Any) -> Response:
    messages = {
        404: f"there is no route {quoted(request.url.path)}",
        405: f"{quoted(request.url.path)} does not take {request.method}",
    }
    is_by_us = isinstance(error, HTTPException)  # Starlette raises its own class
    detail = error.detail if is_by_us else messages.get(error.status_code, error.detail)
    return error_response(error.status_code, detail, error.headers)


async def _invalid_request(request: Request, error: Any) -> Response:
    first = error.errors()[0]
    place = ".".join(str(part) for part in first["loc"][1:]) or first["loc"][0]
    return error_response(422, f"{quoted(place)}: {first['msg']}")


async def _client_left(request: Request, error: Any) -> Response:
    return Response(status_code=CLIENT_LEFT)  # for the log: no client receives it


async def _failure(request: Request, error: Any) -> Response:
    return error_response(500, "the server failed: its terminal or log says why")


ERROR_HANDLERS: dict[
    int | type[Exception], Callable[[Request, Any], Coroutine[Any, Any, Response]]
] = {
    StarletteHTTPException: _http_error,
    RequestValidationError: _invalid_request,
    ClientDisconnect: _client_left,
    Exception: _failure,
}
