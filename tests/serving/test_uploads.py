"""The images of a request are read within its limits."""

import asyncio

import pytest
from starlette.requests import Request

from finetune.serving.refusal import Refused
from finetune.serving.uploads import Body, Capacity, Limits, Upload

KIND = "multipart/form-data; boundary=edge"
LIMITS = Limits(max_bytes=1000, max_images=2, max_pixels=10_000, max_waiting=3, seconds=5)


def form(*files: tuple[str, bytes]) -> tuple[dict[str, str], bytes]:
    parts = [
        b'--edge\r\nContent-Disposition: form-data; name="picture"; filename="%s"\r\n\r\n%s\r\n'
        % (name.encode(), content)
        for name, content in files
    ]
    return {"content-type": KIND}, b"".join(parts) + b"--edge--\r\n"


def taken(
    headers: dict[str, str], content: bytes, capacity: Capacity | None = None, step: int = 100
) -> list[Upload]:
    """Return what is in a request whose body comes in steps, without a length of its own."""
    chunks = [content[i : i + step] for i in range(0, len(content), step)] or [b""]
    messages = iter(
        {"type": "http.request", "body": chunk, "more_body": i + 1 < len(chunks)}
        for i, chunk in enumerate(chunks)
    )

    async def receive():
        return next(messages)

    raw = [(key.encode(), value.encode()) for key, value in headers.items()]
    scope = {
        "type": "http",
        "method": "POST",
        "path": "/predict",
        "query_string": b"",
        "headers": raw,
    }
    capacity = capacity or Capacity(LIMITS)

    held = capacity.num_bytes

    async def read():
        body = Body(Request(scope, receive), capacity)
        try:
            return await body.uploads()
        finally:
            body.release()

    try:
        return asyncio.run(read())
    finally:
        assert capacity.num_bytes == held


@pytest.mark.parametrize(
    "kind", ["image/jpeg", "application/octet-stream", "application/x-www-form-urlencoded", None]
)
def test_a_body_is_one_image(kind):
    headers = {"content-type": kind} if kind else {}
    assert taken(headers, b"abc" * 100) == [Upload("", b"abc" * 100)]


def test_the_files_of_a_form_are_images_with_names():
    files = [("ä b.jpg", b"\xff\xd8" * 90), ("evil\u202e.png", b"")]
    assert taken(*form(*files), step=7) == [
        Upload("ä b.jpg", b"\xff\xd8" * 90),
        Upload("evil\\u202e.png", b""),
    ]


@pytest.mark.parametrize(
    ("status", "message", "request_of"),
    [
        (413, "at most 1,000 bytes", lambda: ({}, b"x" * 1001)),
        (413, "at most 1,000 bytes", lambda: ({"content-length": "1001"}, b"")),
        (413, "at most 1,000 bytes", lambda: form(("a", b"x" * 950))),
        (413, "at most 2 images", lambda: form(("a", b"1"), ("b", b"2"), ("c", b"3"))),
        (415, "gzip", lambda: ({"content-encoding": "gzip"}, b"x")),
        (422, "no image", lambda: ({}, b"")),
        (422, "no image", lambda: form()),
        (400, "form is unreadable", lambda: ({"content-type": "multipart/form-data"}, b"x")),
        (400, "form is unreadable", lambda: (form()[0], b"no edge at all")),
        (
            400,
            "last boundary",
            lambda: (form()[0], form(("a", b"1"), ("b", b"2" * 50))[1][:-20]),
        ),
        (
            415,
            "use UTF-8",
            lambda: ({"content-type": KIND + "; charset=undefined"}, form(("a", b"1"))[1]),
        ),
        # Quadratic in Python: a megabyte would take minutes, in which nothing else is answered.
        (
            415,
            "use UTF-8",
            lambda: ({"content-type": KIND + '; charset="punycode"'}, form(("a", b"1"))[1]),
        ),
        (
            422,
            "top_k",
            lambda: (
                form()[0],
                b'--edge\r\nContent-Disposition: form-data; name="top_k"\r\n\r\n3\r\n--edge--\r\n',
            ),
        ),
    ],
)
def test_uploads_that_are_refused(status, message, request_of):
    with pytest.raises(Refused, match=message) as refused:
        taken(*request_of())
    assert refused.value.status == status


@pytest.mark.parametrize(
    "kind", ["application/json", "application/x-www-form-urlencoded", "text/plain"]
)
def test_an_image_is_one_whatever_the_request_calls_it(kind):
    assert taken({"content-type": kind}, b"image") == [Upload("", b"image")]


def test_bodies_together_have_a_limit_too():
    capacity = Capacity(LIMITS)
    capacity.num_bytes = 15_500  # of 16,000
    with pytest.raises(Refused, match="too many large requests") as refused:
        taken({}, b"x" * 600, capacity)
    assert refused.value.status == 429 and refused.value.headers["Retry-After"] == "1"


def test_images_take_room_until_they_are_answered():
    capacity = Capacity(LIMITS)
    with capacity.waiting_images(2):
        capacity.update_rate(10, 2.0)
        capacity.check()
        with (
            pytest.raises(Refused, match="at most 3"),
            capacity.waiting_images(2),
        ):
            pass
        assert capacity.waiting == 2
        with capacity.waiting_images(1), pytest.raises(Refused) as refused:
            capacity.check()
        assert refused.value.status == 429
    assert capacity.waiting == 0


def test_a_refusal_states_when_to_retry():
    capacity = Capacity(LIMITS)
    capacity.update_rate(1, 4.0)  # an image takes four seconds
    with capacity.waiting_images(3), pytest.raises(Refused) as refused:
        capacity.check()
    assert refused.value.headers == {"Retry-After": "12"}
