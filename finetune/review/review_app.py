"""The routes of a review. Requests name images and classes by their numbers, never by a path."""

import json
from functools import partial
from typing import Any

import anyio
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import HTMLResponse, JSONResponse, Response
from starlette.routing import Mount, Route

from finetune.review.image_previews import SIDES, TYPE, ImagePreviews
from finetune.review.ranking_job import RankingJob
from finetune.review.review_guard import review_check
from finetune.review.review_session import Conflict, ReviewSession
from finetune.serving.guard import Guard
from finetune.serving.refusal import Refused
from finetune.system.html_page import render
from finetune.system.machine import num_cores
from finetune.system.messages import reason

_MAX_BODY = 2**16  # bytes
_MAX_DRAINED = 2**26  # bytes of a larger body that are read before it is refused
_SECONDS_TO_DRAIN = 5.0
_MOST_DECODERS = 4  # since decoding a malicious image may take 2.9 GB
_NOT_CACHED = {"Cache-Control": "no-store"}
_CACHED = {"Cache-Control": "private, max-age=3600"}
_ACTIONS = ("change", "exclude", "right", "none")


class Routes:
    """The handlers of requests.

    Args:
        session: The state of the review.
        job: The job that looks for doubtful labels.
        title: The title of the page.
    """

    def __init__(self, session: ReviewSession, job: RankingJob, title: str) -> None:
        self.session = session
        self.job = job
        self.previews = ImagePreviews(session.images.paths)
        self._page = render("review/review_page.html", title=title)
        self._decoders: anyio.CapacityLimiter | None = None

    async def page(self, request: Request) -> Response:
        return HTMLResponse(self._page, headers=_NOT_CACHED)

    async def state(self, request: Request) -> Response:
        try:
            state = await run_in_threadpool(self.session.state)
        except (OSError, ValueError) as error:
            return _unreadable(error)
        progress = {
            "is_ready": self.session.version > 0,
            "done": self.job.done,
            "total": self.job.total,
            "error": self.job.error,
            "has_network": self.job.network is not None,
        }
        return JSONResponse({**state, "ranking": progress}, headers=_NOT_CACHED)

    async def item(self, request: Request) -> Response:
        try:
            item = await run_in_threadpool(self.session.item, request.path_params["index"])
        except IndexError:
            return Refused(404, "there is no such image").response()
        except (OSError, ValueError) as error:
            return _unreadable(error)
        return JSONResponse(item, headers=_NOT_CACHED)

    async def image(self, request: Request) -> Response:
        index = request.path_params["index"]
        size = request.path_params["size"]
        if size not in SIDES or not 0 <= index < len(self.session.images):
            return Refused(404, "there is no such image").response()
        if self._decoders is None:  # it can only be made inside the event loop
            self._decoders = anyio.CapacityLimiter(min(num_cores(), _MOST_DECODERS))
        content = await anyio.to_thread.run_sync(
            partial(self.previews.get, index, size), limiter=self._decoders
        )
        if content is None:
            return Refused(
                410, "the image cannot be read: it is damaged, or no longer exists"
            ).response()
        return Response(content, media_type=TYPE, headers=_CACHED)

    async def decide(self, request: Request) -> Response:
        try:
            decision = _parsed(await _body(request))
        except Refused as refused:
            return refused.response()
        try:
            answer = await run_in_threadpool(self.session.decide, **decision)
        except IndexError:
            return Refused(404, "there is no such image or label").response()
        except Conflict:
            message = "someone else has decided about this image: look at it again"
            return Refused(409, message).response()
        except (OSError, ValueError) as error:
            return Refused(507, f"not saved: {reason(error)}").response()
        return JSONResponse(answer, headers=_NOT_CACHED)


def _unreadable(error: Exception) -> Response:
    """Return the answer if the file of corrections cannot be read, for example after an edit by hand."""
    return Refused(503, f"cannot read the decisions: {reason(error)}").response()


async def _body(request: Request) -> bytes:
    """Return the body of a request.

    Raises:
        Refused: It is too large. The rest of it was read, because a browser shows no answer before it has sent all.
    """
    body = b""
    num_bytes = 0
    async for part in request.stream():
        num_bytes += len(part)
        if num_bytes <= _MAX_BODY:
            body += part
        if num_bytes > _MAX_DRAINED:
            break
    if num_bytes > _MAX_BODY:
        raise Refused(413, f"a decision has at most {_MAX_BODY} bytes")
    return body


def _parsed(body: bytes) -> dict[str, Any]:
    """Return the arguments of `ReviewSession.decide` that the JSON body of a request has.

    Raises:
        Refused: The body is not a decision.
    """
    try:
        content = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise Refused(400, "the body is not JSON") from error
    names = {"index", "action", "labels", "line"}
    if not isinstance(content, dict) or content.keys() != names:
        raise Refused(400, f"a decision has {', '.join(sorted(names))}")
    labels = content["labels"]
    are_numbers = all(type(content[name]) is int for name in ("index", "line"))
    if labels is not None:
        are_numbers &= isinstance(labels, list) and all(type(k) is int for k in labels)
    if not are_numbers or content["action"] not in _ACTIONS:
        message = (
            f"action is one of {', '.join(_ACTIONS)}, labels is null or a list of whole numbers, "
        )
        raise Refused(400, message + "all others are whole numbers")
    return {name: content[name] for name in names}


def make_review_app(session: ReviewSession, job: RankingJob, token: str, title: str) -> Starlette:
    """Return the ASGI application.

    Args:
        session: The state of the review.
        job: The job that looks for doubtful labels.
        token: The first part of all paths.
        title: The title of the page.
    """
    routes = Routes(session, job, title)

    def http_error(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        return Refused(error.status_code, error.detail).response()

    def internal_error(request: Request, error: Exception) -> Response:
        return Refused(500, "the review failed, and the terminal says why").response()

    paths = [
        Route("/", routes.page),
        Route("/state", routes.state),
        Route("/item/{index:int}", routes.item),
        Route("/image/{index:int}/{size}", routes.image),
        Route("/decide", routes.decide, methods=["POST"]),
    ]
    return Starlette(
        routes=[Mount(f"/{token}", routes=paths)],
        middleware=[Middleware(Guard, check=review_check(token), seconds=_SECONDS_TO_DRAIN)],
        exception_handlers={HTTPException: http_error, Exception: internal_error},
    )
