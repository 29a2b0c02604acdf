"""The images of a request, read into memory. The limits hold while bytes arrive, whatever the headers say."""

from collections.abc import AsyncGenerator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import NamedTuple

from python_multipart.multipart import parse_options_header
from starlette.datastructures import UploadFile
from starlette.formparsers import MultiPartException, MultiPartParser
from starlette.requests import ClientDisconnect, Request

from finetune.serving.refusal import Refused, busy
from finetune.system.messages import shown

_REQUESTS_HELD = 16  # bodies of the largest size that fit into the memory for all requests
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
    """An image file in a request.

    Attributes:
        name: File name in the request; "" if there is none.
        content: Bytes of the file.
    """

    name: str
    content: bytes


class Capacity:
    """Counts the images and bytes of all requests against the limits.

    The images of a request count once all of its body has arrived, so that slow clients do not block others.

    Attributes:
        waiting: Accepted images without a response yet.
        num_bytes: Bytes of all bodies in memory.
        rate: Moving average of the images per second; None before the first batch.
    """

    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        self.waiting = 0
        self.num_bytes = 0
        self.rate: float | None = None

    @property
    def wait_seconds(self) -> float:
        """Estimated time in seconds until the waiting images are classified."""
        return self.waiting / self.rate if self.rate else 1.0

    def check(self, num_images: int = 1) -> None:
        """Check that more images can be accepted.

        Raises:
            Refused: Too many images are waiting.
        """
        if self.waiting + num_images > self.limits.max_waiting:
            raise busy(
                f"{self.waiting} images are waiting, and at most {self.limits.max_waiting} may wait",
                self.wait_seconds,
            )

    @contextmanager
    def waiting_images(self, number: int) -> Iterator[None]:
        """Count images as waiting within the context.

        Raises:
            Refused: Too many images are waiting.
        """
        self.check(number)
        self.waiting += number
        try:
            yield
        finally:
            self.waiting -= number

    def add_bytes(self, number: int) -> None:
        """Count bytes of a body.

        Raises:
            Refused: The bodies in memory are too large.
        """
        if self.num_bytes + number > _REQUESTS_HELD * self.limits.max_bytes:
            raise busy("too many large requests are being sent", self.wait_seconds)
        self.num_bytes += number

    def update_rate(self, number: int, seconds: float) -> None:
        """Update the rate with the time of a batch of `number` images."""
        rate = number / max(seconds, 1e-6)
        self.rate = rate if self.rate is None else 0.9 * self.rate + 0.1 * rate


class _InMemory(MultiPartParser):
    # Never spool to disk: there may be none, and memory is limited by `Capacity`.
    spool_max_size = 0
    is_complete = False

    def on_end(self) -> None:
        super().on_end()
        self.is_complete = True


class Body:
    """The body of a request while it is in memory.

    Args:
        request: The request.
        capacity: Counts the bytes of the body until `release`.

    Attributes:
        num_bytes: Bytes that have arrived.
        has_arrived: Whether all of the body has arrived.
    """

    def __init__(self, request: Request, capacity: Capacity) -> None:
        self.request = request
        self.capacity = capacity
        self.num_bytes = 0
        self.has_arrived = False

    async def uploads(self) -> list[Upload]:
        """Return the images of the request: the files of a multipart form, or the body as one image.

        Raises:
            Refused: There is no image, there are too many, or they are too large.
            ClientDisconnect: The client has disconnected.
        """
        headers = self.request.headers
        limits = self.capacity.limits
        if headers.get("content-encoding", "identity") != "identity":
            raise Refused(
                415,
                f"Content-Encoding {shown(headers['content-encoding'])!r}: send images uncompressed",
            )
        if (length := headers.get("content-length", "")).isdigit() and int(
            length
        ) > limits.max_bytes:
            raise self._too_large()
        if (
            headers.get("content-type", "").partition(";")[0].strip().lower()
            == "multipart/form-data"
        ):
            uploads = await self._form_uploads()
        else:
            uploads = [Upload("", b"".join([chunk async for chunk in self._stream()]))]
        if not uploads or uploads == [Upload("", b"")]:
            raise Refused(
                422,
                "there is no image in the request: send one as its body, or files of a multipart form",
            )
        return uploads

    def release(self) -> None:
        """Stop counting the bytes of the body."""
        self.capacity.num_bytes -= self.num_bytes
        self.num_bytes = 0

    async def _form_uploads(self) -> list[Upload]:
        limits = self.capacity.limits
        charset = parse_options_header(self.request.headers["content-type"])[1].get(
            b"charset", _CHARSETS[0]
        )
        if charset.lower() not in _CHARSETS:
            raise Refused(
                415,
                f"the multipart form is in {shown(charset.decode('latin-1'))[:_LONGEST_NAME]!r}: use UTF-8",
            )

        async def complete_body() -> AsyncGenerator[bytes, None]:
            async for chunk in self._stream():
                yield chunk
            if not parser.is_complete:  # the parser would drop the unfinished last part in silence
                raise MultiPartException("it ends before its last boundary")

        parser = _InMemory(
            self.request.headers, complete_body(), max_files=limits.max_images, max_fields=8
        )
        try:
            form = await parser.parse()
        except MultiPartException as error:
            if error.message.startswith("Too many files"):
                raise Refused(413, f"a request has at most {limits.max_images} images") from error
            raise Refused(400, f"the multipart form is unreadable: {error.message}") from error
        uploads = []
        for field, value in form.multi_items():
            if not isinstance(value, UploadFile):
                raise Refused(
                    422,
                    f"the field {shown(field)[:_LONGEST_NAME]!r} is not a file: curl -F image=@a.jpg sends one",
                )
            uploads.append(Upload(shown(value.filename or "")[:_LONGEST_NAME], await value.read()))
            await value.close()
        return uploads

    async def _stream(self) -> AsyncGenerator[bytes, None]:
        # Stop at the last chunk: a further `receive` would wait until the client disconnects.
        while not self.has_arrived:
            message = await self.request.receive()
            if message["type"] == "http.disconnect":
                raise ClientDisconnect
            self.has_arrived = not message.get("more_body", False)
            chunk = message.get("body", b"")
            self.capacity.add_bytes(len(chunk))
            self.num_bytes += len(chunk)
            if self.num_bytes > self.capacity.limits.max_bytes:
                raise self._too_large()
            yield chunk

    def _too_large(self) -> Refused:
        return Refused(
            413,
            f"a request has at most {self.capacity.limits.max_bytes:,} bytes: send smaller images, or fewer",
        )
