"""The routes of the service."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import HTMLResponse, JSONResponse, Response
from starlette.routing import Route

from finetune.inference.predictor import Predictor
from finetune.serving.access_log import AccessLog
from finetune.serving.guard import Guard, service_check
from finetune.serving.openapi import Operation, described, description
from finetune.serving.refusal import Refused
from finetune.serving.response_types import Status
from finetune.serving.service import Service
from finetune.system.html_page import render
from finetune.system.messages import shown


class Pages:
    """The handlers of GET requests.

    Args:
        service: The service that they describe.
        has_token: Whether requests need a token. The page asks for it then.
    """

    def __init__(self, service: Service, has_token: bool) -> None:
        self.service = service
        self.limits = service.limits
        self._page = render("serving/page.html", has_token=has_token, limits=self.limits)

    async def page(self, request: Request) -> Response:
        return HTMLResponse(self._page)

    async def openapi(self, request: Request) -> Response:
        kind = self.service.predictor.label_kind
        return JSONResponse(description(request.app.routes, self.limits, kind))

    @described(Operation("Whether the process lives", Status))
    async def healthz(self, request: Request) -> Response:
        return JSONResponse({"status": "ok"})

    @described(
        Operation(
            "Whether it takes requests",
            Status,
            errors={503: "it stops, or is full"},
            error_type=Status,
        )
    )
    async def readyz(self, request: Request) -> Response:
        is_ready = (
            not self.service.is_stopping and self.service.capacity.waiting < self.limits.max_waiting
        )
        return JSONResponse({"status": "ready" if is_ready else "busy"}, 200 if is_ready else 503)

    @described(Operation("Classes, network and threshold", {"type": "object"}))
    async def about(self, request: Request) -> Response:
        p = self.service.predictor
        return JSONResponse(
            {
                "class_names": p.class_names,
                "backbone": p.backbone,
                "image_size": p.image_size,
                "precision": p.precision,
                **_thresholds(p),
                "versions": p.versions,
            }
        )

    @described(Operation("Counts for Prometheus", None, text="text"))
    async def prometheus(self, request: Request) -> Response:
        return Response(self.service.metrics.text(), media_type=self.service.metrics.content_type)


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


def make_app(
    service: Service, token: str | None, host: str, logged_model: str | None = None
) -> Starlette:
    """Return the ASGI application.

    Args:
        service: The service that answers prediction requests.
        token: The token that requests must send; None for no token.
        host: The host name or address that the server listens on.
        logged_model: Fingerprint of the checkpoint, to log requests with; None for no log.
    """
    pages = Pages(service, token is not None)

    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        yield
        service.close()

    routes = [
        Route("/", pages.page),
        Route("/openapi.json", pages.openapi),
        Route("/predict", service.predict, methods=["POST"]),
        Route("/model", pages.about),
        Route("/healthz", pages.healthz),
        Route("/readyz", pages.readyz),
        Route("/metrics", pages.prometheus),
    ]

    def http_error(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        paths = " ".join(route.path for route in routes)
        messages = {
            404: f"there is no route {shown(request.url.path)[:80]!r}; the routes are {paths}",
            405: f"{request.url.path} does not take {request.method}: /predict takes POST, the others GET",
        }
        message = messages.get(error.status_code, error.detail)
        return Refused(error.status_code, message, headers=dict(error.headers or {})).response()

    def internal_error(request: Request, error: Exception) -> Response:
        return Refused(500, "the service failed: see its log").response()

    check = service_check(token, host)
    middleware = [Middleware(Guard, check=check, seconds=service.limits.seconds)]
    if logged_model is not None:
        middleware.insert(0, Middleware(AccessLog, model=logged_model))
    return Starlette(
        routes=routes,
        middleware=middleware,
        exception_handlers={HTTPException: http_error, Exception: internal_error},
        lifespan=lifespan,
    )
