"""The routes of a review. Requests name images and classes by their numbers, never by a path."""

import hmac
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import lru_cache
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Depends, FastAPI, HTTPException, Path, Request, Response
from fastapi.middleware import Middleware
from fastapi.responses import HTMLResponse
from pydantic import BaseModel, ConfigDict

from finetune.data.checking.image_facts import small_copy
from finetune.review.ranking_job import RankingJob
from finetune.review.review_session import Action, Conflict, ReviewSession
from finetune.serving.errors import ERROR_HANDLERS
from finetune.serving.guard import Guard
from finetune.system.html_page import render, webp
from finetune.system.machine import num_cores
from finetune.system.messages import reason

_MAX_BODY = 2**16  # bytes
_SECONDS_TO_DRAIN = 5.0
_MOST_DECODERS = 4  # since decoding a malicious image may take 2.9 GB
_MOST_CACHED = 256  # previews in memory, of about 100 KB each
_SIDES = {"large": 1024, "small": 224}  # pixels
_NOT_CACHED = {"Cache-Control": "no-store"}
_CACHED = {"Cache-Control": "private, max-age=3600"}


class DecisionBody(BaseModel):
    """The body of a request to /decide: the arguments of `ReviewSession.decide`."""

    model_config = ConfigDict(extra="forbid", strict=True)

    index: int
    action: Action
    labels: list[int] | None
    line: int


def make_review_app(session: ReviewSession, job: RankingJob, token: str, title: str) -> FastAPI:
    """Return the ASGI application.

    Args:
        session: The state of the review.
        job: The job that looks for doubtful labels.
        token: The first part of all paths, which only the terminal shows.
        title: The title of the page.
    """
    guard = Middleware(Guard, max_bytes=_MAX_BODY, seconds=_SECONDS_TO_DRAIN, is_local=True)
    app = FastAPI(openapi_url=None, middleware=[guard], exception_handlers=ERROR_HANDLERS)
    app.include_router(
        _routes(session, job, title),
        prefix="/{token}",
        dependencies=[Depends(_token_check(token)), Depends(_forbid_caching)],
    )
    return app


def _routes(session: ReviewSession, job: RankingJob, title: str) -> APIRouter:
    """Return the routes. FastAPI calls a handler that is not `async` in a thread."""
    router = APIRouter()
    page = render("review/review_page.html", title=title)
    decoders = threading.Semaphore(min(num_cores(), _MOST_DECODERS))

    @lru_cache(maxsize=_MOST_CACHED)
    def preview(index: int, side: int) -> bytes:
        with decoders:
            return _preview(session.images.paths[index], side)

    @router.get("/")
    async def show_page() -> HTMLResponse:
        return HTMLResponse(page, headers=_NOT_CACHED)

    @router.get("/state")
    def state() -> dict[str, Any]:
        progress = {
            "is_ready": session.version > 0,
            "done": job.done,
            "total": job.total,
            "error": job.error,
            "has_network": job.network is not None,
        }
        with _as_error_response(503, "cannot read the decisions"):
            return {**session.state(), "ranking": progress}

    @router.get("/item/{index}")
    def item(index: int) -> dict[str, Any]:
        with _as_error_response(503, "cannot read the decisions"):
            return session.item(index)

    @router.get("/image/{index}/{size}")
    def image(index: int, size: Literal["large", "small"]) -> Response:
        if not 0 <= index < len(session.images):
            raise HTTPException(404, "there is no such image")
        with _as_error_response(410, "the image cannot be read"):
            content = preview(index, _SIDES[size])
        return Response(content, media_type="image/webp", headers=_CACHED)

    @router.post("/decide", dependencies=[Depends(_check_origin)])
    def decide(decision: DecisionBody) -> dict[str, Any]:
        with _as_error_response(507, "not saved"):
            return session.decide(**decision.model_dump())

    return router


def _preview(path: str, side: int) -> bytes:
    """Return an image as a WebP file with at most `side` pixels a side.

    Raises:
        ValueError: The image cannot be read.
    """
    pixels = small_copy(path, side)
    if pixels is None:
        raise ValueError("it is damaged, or no longer exists")
    return webp(pixels, side, quality=80)


def _token_check(token: str) -> Callable[[str], None]:
    """Return the dependency of all routes."""

    def check(sent: Annotated[str, Path(alias="token")]) -> None:
        if not hmac.compare_digest(sent.encode(), token.encode()):
            raise HTTPException(
                403, "the token is wrong: open the address that finetune review printed"
            )

    return check


def _forbid_caching(response: Response) -> None:
    response.headers.update(_NOT_CACHED)


def _check_origin(request: Request) -> None:
    """Refuse a change that another page asks for. FastAPI takes no body but JSON, which such a page cannot send."""
    if request.headers.get("origin") != f"http://{request.headers['host']}":
        raise HTTPException(403, "the request does not come from the page of the review")


@contextmanager
def _as_error_response(status: int, what: str) -> Iterator[None]:
    """Turn errors of the session into error responses, with this status if a file cannot be read or written."""
    try:
        yield
    except IndexError as error:
        raise HTTPException(404, "there is no such image or label") from error
    except Conflict as error:
        message = "someone else has decided about this image: look at it again"
        raise HTTPException(409, message) from error
    except (OSError, ValueError) as error:
        raise HTTPException(status, f"{what}: {reason(error)}") from error
