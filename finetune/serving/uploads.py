"""The pictures of a request, in memory, within limits that hold while they arrive, whatever it says of itself."""

import re
from base64 import b64decode
from collections.abc import AsyncGenerator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import NamedTuple

from python_multipart.multipart import parse_options_header
from starlette.datastructures import UploadFile
from starlette.formparsers import MultiPartException, MultiPartParser
from starlette.requests import ClientDisconnect, Request

from finetune.data.decode import READERS
from finetune.serving.refusal import Refused, busy
from finetune.system.messages import shown

_REQUESTS_HELD = 16  # of the largest size, whose bytes may be here at once
_LONGEST_NAME = 200
# Of the names in a form. Some that Python knows take seconds for what is sent in a moment.
_CHARSETS = (b"utf-8", b"utf8", b"us-ascii")
_HEAD = 64  # bytes from which it is seen that text was sent instead of an image
_BASE64 = re.compile(rb"[A-Za-z0-9+/]{16}")


@dataclass(frozen=True)
class Limits:
    """What requests may take.

    Attributes:
        max_bytes: Of a request's body.
        max_pictures: In a request.
        max_pixels: Of a picture, width times height.
        max_waiting: Pictures that were accepted and have no answer yet, of all requests.
        seconds: For a request, from its headers to its answer.
    """

    max_bytes: int
    max_pictures: int
    max_pixels: int
    max_waiting: int
    seconds: float


class Upload(NamedTuple):
    """A picture as it came.

    Attributes:
        name: What its sender calls it; "" where it has none.
        content: Of its file.
    """

    name: str
    content: bytes


class Room:
    """How much is here at once: pictures without an answer, and bytes of bodies.

    A request takes room for its pictures when it is here whole, so that slow senders keep nobody waiting.

    Attributes:
        waiting: Pictures without an answer.
        rate: Pictures a second that were answered of late, or None before the first.
    """

    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        self.waiting = 0
        self.num_bytes = 0
        self.rate: float | None = None

    @property
    def seconds(self) -> float:
        """How long what is waiting now will take."""
        return self.waiting / self.rate if self.rate else 1.0

    def check(self, num_pictures: int = 1) -> None:
        """Make sure that there is room for more pictures.

        Raises:
            Refused: There is none.
        """
        if self.waiting + num_pictures > self.limits.max_waiting:
            raise busy(
                f"{self.waiting} pictures are waiting, and {self.limits.max_waiting} may",
                self.seconds,
            )

    @contextmanager
    def pictures(self, number: int) -> Iterator[None]:
        """Take room for pictures until they are answered."""
        self.check(number)
        self.waiting += number
        try:
            yield
        finally:
            self.waiting -= number

    def add_bytes(self, number: int) -> None:
        """Take room for a part of a body.

        Raises:
            Refused: There is none.
        """
        if self.num_bytes + number > _REQUESTS_HELD * self.limits.max_bytes:
            raise busy("too many large requests are being sent", self.seconds)
        self.num_bytes += number

    def answered(self, number: int, seconds: float) -> None:
        """Note how fast a batch was."""
        rate = number / max(seconds, 1e-6)
        self.rate = rate if self.rate is None else 0.9 * self.rate + 0.1 * rate


def text_format(content: bytes, content_type: str) -> str:
    """Return which text was sent where an image is expected; "" if it looks like none.

    Args:
        content: Of a body or of a file in a form.
        content_type: Of the request. It is only a hint: curl's --data-binary calls everything a form.
    """
    head, kind = content[:_HEAD].lstrip(), content_type.partition(";")[0].strip().lower()
    if content.startswith(tuple(READERS)):
        return ""
    if head.startswith((b"{", b"[", b'"')) or kind.endswith(("/json", "+json")):
        return "JSON"
    if head[:5].lower() == b"data:":
        return "a data: address"
    letters = head.replace(b"-", b"+").replace(b"_", b"/")  # of the variant for addresses
    if (base64 := _BASE64.match(letters)) and b64decode(base64[0]).startswith(tuple(READERS)):
        return "base64"
    if kind == "application/x-www-form-urlencoded" and re.match(rb"[\w.%\[\]-]+=", head):
        return "a form field"
    return ""


class _InMemory(MultiPartParser):
    # never to a disk, of which there may be none: what is held is limited already
    spool_max_size = 0
    is_whole = False

    def on_end(self) -> None:
        super().on_end()
        self.is_whole = True


class Body:
    """The body of a request, while its bytes are here.

    Args:
        request: Whose.
        room: In which its bytes count until `leave`.

    Attributes:
        has_arrived: Whether all of it was read.
    """

    def __init__(self, request: Request, room: Room) -> None:
        self.request = request
        self.room = room
        self.num_bytes = 0
        self.has_arrived = False

    async def uploads(self) -> list[Upload]:
        """Return the pictures of the request: the files of a multipart form, else the body as one picture.

        Raises:
            Refused: There is none, there are too many, they are too large, or one is text.
            ClientDisconnect: The sender has gone.
        """
        headers, limits = self.request.headers, self.room.limits
        if headers.get("content-encoding", "identity") != "identity":
            raise Refused(
                415,
                f"Content-Encoding {shown(headers['content-encoding'])!r}: send pictures as they are",
            )
        if (length := headers.get("content-length", "")).isdigit() and int(
            length
        ) > limits.max_bytes:
            raise self._too_large()
        if (
            headers.get("content-type", "").partition(";")[0].strip().lower()
            == "multipart/form-data"
        ):
            uploads = await self._of_form()
        else:
            uploads = [Upload("", b"".join([chunk async for chunk in self._stream()]))]
        if not uploads or uploads == [Upload("", b"")]:
            raise Refused(
                422,
                "there is no picture in the request: send one as its body, or files of a multipart form",
            )
        for upload in uploads:
            if text := text_format(upload.content, headers.get("content-type", "")):
                raise Refused(
                    415,
                    f"{upload.name or 'the body'} is {text}, not an image: send the bytes of the file, such as by "
                    "curl --data-binary @a.jpg ADDRESS/predict, or several by curl -F picture=@a.jpg",
                )
        return uploads

    def leave(self) -> None:
        """Give back the room of the body's bytes."""
        self.room.num_bytes -= self.num_bytes
        self.num_bytes = 0

    async def _of_form(self) -> list[Upload]:
        limits = self.room.limits
        charset = parse_options_header(self.request.headers["content-type"])[1].get(
            b"charset", _CHARSETS[0]
        )
        if charset.lower() not in _CHARSETS:
            raise Refused(
                415,
                f"the multipart form is in {shown(charset.decode('latin-1'))[:_LONGEST_NAME]!r}: use UTF-8",
            )

        async def whole() -> AsyncGenerator[bytes, None]:
            async for chunk in self._stream():
                yield chunk
            if not parser.is_whole:  # what came of its last part would be missing
                raise MultiPartException("it ends before its last boundary")

        parser = _InMemory(
            self.request.headers, whole(), max_files=limits.max_pictures, max_fields=8
        )
        try:
            form = await parser.parse()
        except MultiPartException as error:
            if error.message.startswith("Too many files"):
                raise Refused(
                    413, f"a request has at most {limits.max_pictures} pictures"
                ) from error
            raise Refused(400, f"the multipart form can't be read: {error.message}") from error
        found = []
        for field, value in form.multi_items():
            if not isinstance(value, UploadFile):
                raise Refused(
                    422,
                    f"the field {shown(field)[:_LONGEST_NAME]!r} is no file: curl -F picture=@a.jpg sends one",
                )
            found.append(Upload(shown(value.filename or "")[:_LONGEST_NAME], await value.read()))
            await value.close()
        return found

    async def _stream(self) -> AsyncGenerator[bytes, None]:
        # known with the last bytes: whoever reads on would wait for the client to leave
        while not self.has_arrived:
            message = await self.request.receive()
            if message["type"] == "http.disconnect":
                raise ClientDisconnect
            self.has_arrived = not message.get("more_body", False)
            chunk = message.get("body", b"")
            self.room.add_bytes(len(chunk))
            self.num_bytes += len(chunk)
            if self.num_bytes > self.room.limits.max_bytes:
                raise self._too_large()
            yield chunk

    def _too_large(self) -> Refused:
        return Refused(
            413,
            f"a request has at most {self.room.limits.max_bytes:,} bytes: send smaller pictures, or fewer",
        )
