"""The routes of the service."""

import hmac
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Annotated, Any

from fastapi import APIRouter, Depends, FastAPI, HTTPException, Response
from fastapi.middleware import Middleware
from fastapi.responses import HTMLResponse, PlainTextResponse
from fastapi.security import HTTPAuthorizationCredentials, HTTPBearer
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest

import finetune
from finetune.data.decode import IMAGE_KINDS
from finetune.features.familiarity import BELOW
from finetune.inference.predictor import Predictor
from finetune.serving.access_log import AccessLog
from finetune.serving.errors import ERROR_HANDLERS
from finetune.serving.guard import Guard, is_loopback
from finetune.serving.schemas import Error, Status, answer_model
from finetune.serving.service import Service
from finetune.serving.uploads import Limits
from finetune.system.html_page import render

_FILE = {"type": "string", "format": "binary"}
_IMAGES = {
    "multipart/form-data": {
        "type": "object",
        "additionalProperties": {"type": "array", "items": _FILE},
    },
    "application/octet-stream": _FILE,
    "image/*": _FILE,
}
_REQUEST_BODY = {
    "required": True,
    "content": {kind: {"schema": schema} for kind, schema in _IMAGES.items()},
}
_Credentials = Annotated[
    HTTPAuthorizationCredentials | None, Depends(HTTPBearer(scheme_name="token", auto_error=False))
]


def make_app(
    service: Service, token: str | None, host: str, logged_model: str | None = None
) -> FastAPI:
    """Return the ASGI application.

    Args:
        service: The service that answers prediction requests.
        token: The token that requests must send; None for no token.
        host: The host name or address that the server listens on.
        logged_model: Fingerprint of the checkpoint, to log requests with; None for no log.
    """

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        yield
        service.close()

    limits = service.limits
    guard = Middleware(
        Guard,
        max_bytes=limits.max_bytes,
        seconds=limits.seconds,
        is_local=token is None and is_loopback(host),
    )
    app = FastAPI(
        title="finetune",
        version=finetune.__version__,
        description="An image classifier.",
        docs_url=None,
        redoc_url=None,
        responses=_described({403: "the service answers to localhost alone"}),
        middleware=[Middleware(AccessLog, metrics=service.metrics, model=logged_model), guard],
        exception_handlers=ERROR_HANDLERS,
        lifespan=lifespan,
    )
    app.include_router(_open_routes(service, has_token=token is not None))
    app.include_router(
        _model_routes(service),
        dependencies=[] if token is None else [Depends(_token_check(token))],
        responses={} if token is None else _described({401: "a token is needed"}),
    )
    return app


def _open_routes(service: Service, has_token: bool) -> APIRouter:
    """Return the routes that need no token: they reveal nothing about the model."""
    router = APIRouter()
    limits = service.limits
    page = render("serving/page.html", has_token=has_token, limits=limits, unfamiliar=BELOW)

    @router.get("/", include_in_schema=False)
    async def show_page() -> HTMLResponse:
        return HTMLResponse(page)

    @router.get("/healthz", summary="Whether the process lives")
    async def healthz() -> Status:
        return Status(status="ok")

    @router.get(
        "/readyz",
        summary="Whether it takes requests",
        responses={503: {"model": Status, "description": "it stops, or is full"}},
    )
    async def readyz(response: Response) -> Status:
        if service.is_ready:
            return Status(status="ready")
        response.status_code = 503
        return Status(status="busy")

    return router


def _model_routes(service: Service) -> APIRouter:
    """Return the routes that use the model, or describe it."""
    router = APIRouter()
    limits = service.limits
    router.add_api_route(
        "/predict",
        service.predict,
        methods=["POST"],
        summary="Classify images",
        description="One image as the body, or several as files of a multipart form: "
        f"{IMAGE_KINDS} of at most {limits.max_pixels:,} pixels.",
        response_model=answer_model(service.predictor.rule),
        response_model_exclude_unset=True,
        response_description="one for each image, in the order of the request",
        responses=_described(_errors_of_predict(limits)),
        openapi_extra={"requestBody": _REQUEST_BODY},
    )

    @router.get("/model", summary="Classes, network and threshold")
    async def about() -> dict[str, Any]:
        p = service.predictor
        return {
            "class_names": p.class_names,
            "backbone": p.backbone,
            "image_size": p.image_size,
            "precision": p.precision,
            "coverage": p.coverage,
            **_thresholds(p),
            "versions": p.versions,
        }

    @router.get("/metrics", summary="Counts for Prometheus", response_class=PlainTextResponse)
    async def prometheus() -> Response:
        return Response(generate_latest(service.metrics.registry), media_type=CONTENT_TYPE_LATEST)

    return router


def _described(texts: dict[int, str]) -> dict[int | str, dict[str, Any]]:
    """Return the description of error responses from a text for each status."""
    return {status: {"model": Error, "description": text} for status, text in texts.items()}


def _errors_of_predict(limits: Limits) -> dict[int, str]:
    return {
        400: "an unreadable form",
        408: f"the request took longer than {limits.seconds:g} s to arrive",
        413: f"more than {limits.max_images} images or {limits.max_bytes:,} bytes",
        415: "a form that is not in UTF-8",
        422: "an invalid option, no image, or unreadable ones: `images` lists them with the reasons",
        429: f"more than {limits.max_waiting} images or too many large requests: retry after Retry-After seconds",
        500: "a failure of the service, or probabilities that are not finite numbers: `images` lists the failed ones",
        503: f"no answer within {limits.seconds:g} s",
    }


def _token_check(token: str) -> Callable[[HTTPAuthorizationCredentials | None], None]:
    """Return the dependency of routes that need a token."""

    def check(sent: _Credentials) -> None:
        word = "" if sent is None else sent.credentials.strip()
        if not hmac.compare_digest(word.encode(), token.encode()):
            raise HTTPException(
                401,
                "a token is needed: send the header Authorization: Bearer TOKEN",
                {"WWW-Authenticate": "Bearer"},
            )

    return check


def _thresholds(p: Predictor) -> dict[str, Any]:
    """Return the threshold of a checkpoint for two classes; for several labels the threshold of each."""
    calibration = p.calibration
    if calibration.label_kind == "several":
        thresholds = dict(zip(p.class_names, calibration.thresholds, strict=True))
        return {"label_kind": p.label_kind, "thresholds": thresholds}
    if calibration.aim is None or calibration.aim.positive is None or not calibration.thresholds:
        return {"threshold": None}
    label = p.class_names[calibration.aim.positive]
    return {"threshold": {"label": label, "at_least": calibration.thresholds[0]}}
