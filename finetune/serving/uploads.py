"""The images of a request, read into memory, and the limits of requests."""

from collections.abc import AsyncGenerator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import NamedTuple

from fastapi import HTTPException, Request
from python_multipart.multipart import parse_options_header
from starlette.datastructures import UploadFile
from starlette.formparsers import MultiPartException, MultiPartParser

from finetune.serving.errors import busy, quoted
from finetune.system.messages import shown

_LONGEST_NAME = 200
# Charsets of the names in a form. Some of Python's other codecs take seconds for a small input.
_CHARSETS = (b"utf-8", b"utf8", b"us-ascii")


@dataclass(frozen=True)
class Limits:
    """The limits of requests.

    Attributes:
        max_bytes: Bytes of a request's body.
        max_images: Images in a request.
        max_pixels: Width times height of an image.
        max_waiting: Accepted images without a response yet, of all requests.
        seconds: Time for a request, from its headers to its response.
    """

    max_bytes: int = 32_000_000
    max_images: int = 32
    max_pixels: int = 64_000_000
    max_waiting: int = 256
    seconds: float = 30.0


class Upload(NamedTuple):
    """An image file in a request: its name, "" if the request has none, and its bytes."""

    name: str
    content: bytes


class Capacity:
    """Counts the images of all requests against the limit.

    The images of a request count once all of its body has arrived, so that slow clients do not block others.

    Attributes:
        waiting: Accepted images without a response yet.
    """

    def __init__(self, max_waiting: int) -> None:
        self.max_waiting = max_waiting
        self.waiting = 0

    def check(self, num_images: int = 1) -> None:
        """Refuse a request with status 429 if too many images are waiting."""
        if self.waiting + num_images > self.max_waiting:
            message = f"{self.waiting} images are waiting, and at most {self.max_waiting} may wait"
            raise busy(429, message)

    @contextmanager
    def waiting_images(self, num_images: int) -> Iterator[None]:
        """Count images as waiting within the context, after `check`."""
        self.check(num_images)
        self.waiting += num_images
        try:
            yield
        finally:
            self.waiting -= num_images


class _InMemory(MultiPartParser):
    # Never spool to disk: there may be none, and the guard limits the memory.
    spool_max_size = 0
    is_complete = False

    def on_end(self) -> None:
        super().on_end()
        self.is_complete = True


async def read_uploads(request: Request, max_images: int) -> list[Upload]:
    """Return the images of a request: the files of a multipart form, or the body as one image.

    Raises:
        HTTPException: There is no image, or there are too many, or the form is damaged.
        ClientDisconnect: The client has disconnected.
    """
    kind, options = parse_options_header(request.headers.get("content-type"))
    if kind == b"multipart/form-data":
        if options.get(b"charset", b"utf-8").lower() not in _CHARSETS:
            raise HTTPException(415, "the names of a multipart form are in UTF-8")
        uploads = await _form_uploads(request, max_images)
    else:
        uploads = [Upload("", await request.body())]
    if not uploads or uploads == [Upload("", b"")]:
        raise HTTPException(
            422,
            "there is no image in the request: send one as its body, or files of a multipart form",
        )
    return uploads


async def _form_uploads(request: Request, max_images: int) -> list[Upload]:
    async def complete_body() -> AsyncGenerator[bytes, None]:
        async for chunk in request.stream():
            yield chunk
        if not parser.is_complete:  # the parser would drop the unfinished last part in silence
            raise MultiPartException("it ends before its last boundary")

    parser = _InMemory(request.headers, complete_body(), max_files=max_images, max_fields=8)
    try:
        form = await parser.parse()
    except MultiPartException as error:
        if error.message.startswith("Too many files"):
            raise HTTPException(413, f"a request has at most {max_images} images") from error
        raise HTTPException(400, f"the multipart form is unreadable: {error.message}") from error
    uploads = []
    for field, value in form.multi_items():
        if not isinstance(value, UploadFile):
            raise HTTPException(
                422, f"the field {quoted(field)} is not a file: curl -F image=@a.jpg sends one"
            )
        uploads.append(Upload(shown(value.filename or "")[:_LONGEST_NAME], await value.read()))
        await value.close()
    return uploads
