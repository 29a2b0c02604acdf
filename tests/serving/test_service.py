"""Each request gets the predictions of its own images."""

import asyncio
import io
import struct
import threading
import time
import zlib
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from PIL import Image
from starlette.requests import Request

from finetune.data.decode import decode
from finetune.serving.service import Service
from finetune.serving.uploads import Limits


def files(*contents: bytes) -> list[tuple[str, tuple[str, bytes]]]:
    return [("picture", (f"{i}.png", content)) for i, content in enumerate(contents)]


def bomb(width: int, height: int) -> bytes:
    """A small PNG whose header states this many pixels."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return (
            struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
        )

    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", b"") + chunk(b"IEND", b"")


def test_answers_are_those_of_the_predictor(client, predictor, png_image):
    contents = [
        png_image(k, size, kind)
        for k, size, kind in ((0, (40, 60), "PNG"), (1, (90, 33), "JPEG"), (2, (8, 8), "WEBP"))
    ]
    response = client.post("/predict", files=files(*contents))
    expected = predictor([decode(content) for content in contents])
    predictions = response.json()["predictions"]
    assert [one["name"] for one in predictions] == ["0.png", "1.png", "2.png"]
    for one, probabilities in zip(predictions, expected, strict=True):
        assert list(one["probabilities"].values()) == sorted(
            one["probabilities"].values(), reverse=True
        )
        found = [one["probabilities"][name] for name in predictor.class_names]
        # seven digits, other neighbours
        np.testing.assert_allclose(found, probabilities, rtol=0, atol=2e-6)
        assert one["label"] == predictor.class_names[probabilities.argmax()]
        assert one["probability"] == one["probabilities"][one["label"]]
    alone = client.post("/predict", content=contents[1]).json()["predictions"]
    assert (
        alone[0]["name"] == ""
        and abs(alone[0]["probability"] - predictions[1]["probability"]) < 2e-6
    )


def test_a_threshold_decides_what_is_predicted(client, service, png_image, monkeypatch):
    monkeypatch.setattr(service.predictor, "decide", lambda p: np.full(len(p), 2))
    one = client.post("/predict", content=png_image()).json()["predictions"][0]
    assert one["label"] == "red" and one["probability"] == one["probabilities"]["red"]


def test_the_best_classes_alone(client, png_image):
    every = client.post("/predict", content=png_image()).json()["predictions"][0]["probabilities"]
    best = client.post("/predict?top_k=2", content=png_image()).json()["predictions"][0][
        "probabilities"
    ]
    assert list(best.items()) == list(every.items())[:2]


def test_what_the_network_looked_at_is_an_image(client, png_image, service, monkeypatch):
    shown = {}
    for cells in (
        5,
        4,
        None,
    ):  # fewer than 5 x 5 are too coarse to show; None is of a network without maps
        maps = None if cells is None else np.full((1, cells, cells), 0.5)
        monkeypatch.setattr(service.predictor, "activation", lambda *_, maps=maps: maps)
        answer = client.post("/predict?looked_at=1", content=png_image()).json()
        shown[cells] = answer["predictions"][0]["looked_at"]
    assert shown[5].startswith("data:image/webp;base64,") and shown[4] is shown[None] is None
    assert "looked_at" not in client.post("/predict", content=png_image()).json()["predictions"][0]


LARGE = [f"top_k={zeros}{'9' * 5000}" for zeros in ("", "000000001")]


@pytest.mark.parametrize(
    "query", ["top_k=0", "top_k=4", "top_k=x", "top_k=²", *LARGE, "looked_at=maybe", "topk=2"]
)
def test_options_that_are_wrong(client, png_image, query):
    response = client.post("/predict?" + query, content=png_image())
    assert response.status_code == 400 and len(response.json()["error"]) < 200


def test_a_bad_image_is_named_and_fails_its_own_request(client, png_image):
    contents = png_image(), b"", png_image()[:200], bomb(30_000, 30_000)
    response = client.post("/predict", files=files(*contents))
    assert response.status_code == 422
    bad = response.json()["pictures"]
    assert [one["index"] for one in bad] == [1, 2, 3] and [one["name"] for one in bad] == [
        "1.png",
        "2.png",
        "3.png",
    ]
    assert "empty" in bad[0]["error"] and "30000 x 30000 pixels" in bad[2]["error"]
    assert response.json()["error"] == bad[0]["error"]
    # more than the service's, less than the decoder's
    within_decode = client.post("/predict", content=bomb(200, 100))
    assert "the limit of 10,000" in within_decode.json()["error"]


def test_probabilities_that_are_not_numbers_fail_their_own_request(
    client, service, png_image, monkeypatch, caplog
):
    classify = service.predictor.classify

    def black_is_lost(images):
        probabilities = classify(images)
        probabilities[(images == 0).all(axis=(1, 2, 3))] = np.nan
        return probabilities

    monkeypatch.setattr(service.predictor, "classify", black_is_lost)
    black = io.BytesIO()
    Image.new("RGB", (40, 40)).save(black, "PNG")
    response = client.post("/predict", files=files(png_image(), black.getvalue()))
    assert response.status_code == 500
    (bad,) = response.json()["pictures"]
    assert (bad["index"], bad["name"]) == (1, "1.png")
    assert (
        response.json()["error"]
        == bad["error"]
        == "1.png: some.ckpt gives probabilities that are not finite numbers"
    )
    assert f"cannot classify 1.png: {service.predictor.path} gives" in caplog.text
    assert client.post("/predict", content=png_image()).status_code == 200

    async def scenario():
        busy = asyncio.create_task(service.predict(request(png_image(1))))
        others = [
            asyncio.create_task(service.predict(request(c)))
            for c in (png_image(2), black.getvalue(), png_image(3))
        ]
        return [(await task).status_code for task in (busy, *others)]

    assert asked(service, scenario) == [200, 200, 500, 200]


def asked(service: Service, scenario):
    async def run():
        async with asyncio.timeout(20):
            return await scenario()

    try:
        return asyncio.run(run())
    finally:
        service.close()


def request(
    content: bytes, gone: asyncio.Event | None = None, more: asyncio.Event | None = None
) -> Request:
    """A request whose body is there, whose sender may go away, or never send the rest."""
    parts = [{"type": "http.request", "body": content, "more_body": more is not None}]

    async def receive():
        if parts:
            return parts.pop()
        await (gone or more or asyncio.Event()).wait()
        return {"type": "http.disconnect"}

    scope = {
        "type": "http",
        "method": "POST",
        "path": "/predict",
        "query_string": b"",
        "headers": [],
    }
    return Request(scope, receive)


class Held:
    """Lets the network of a service wait."""

    def __init__(self, service: Service) -> None:
        self.may_go, self.sizes = threading.Event(), []
        classify = service.predictor.classify

        def waiting(images):
            assert self.may_go.wait(20)
            self.sizes.append(len(images))
            return classify(images)

        service.predictor.classify = waiting


@pytest.fixture
def held(service, monkeypatch):
    # put back afterwards
    monkeypatch.setattr(service.predictor, "classify", service.predictor.classify)
    return Held(service)


def test_requests_are_classified_together_while_the_network_is_busy(service, held, png_image):
    async def scenario():
        tasks = [asyncio.create_task(service.predict(request(png_image(k)))) for k in range(5)]
        while service.capacity.waiting < 5:
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.3)  # decoded
        held.may_go.set()
        return await asyncio.gather(*tasks)

    responses = asked(service, scenario)
    assert [response.status_code for response in responses] == [200] * 5 and held.sizes == [1, 4]


def test_when_it_is_full_others_are_sent_away_and_those_that_wait_are_not(service, held, png_image):
    async def scenario():
        tasks = [asyncio.create_task(service.predict(request(png_image(k)))) for k in range(8)]
        while service.capacity.waiting < 8:
            await asyncio.sleep(0.01)
        refused = await service.predict(request(png_image()))
        held.may_go.set()
        return refused, await asyncio.gather(*tasks)

    refused, responses = asked(service, scenario)
    assert refused.status_code == 429 and int(refused.headers["retry-after"]) >= 1
    assert [response.status_code for response in responses] == [
        200
    ] * 8 and service.capacity.waiting == 0


def test_who_goes_away_is_not_computed_for(service, held, png_image):
    async def scenario():
        first = asyncio.create_task(service.predict(request(png_image())))
        while not service.batcher.is_busy:
            await asyncio.sleep(0.01)
        gone = asyncio.Event()
        second = asyncio.create_task(service.predict(request(png_image(), gone)))
        while service.capacity.waiting < 2:
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.2)
        gone.set()
        status = (await second).status_code
        held.may_go.set()
        return status, (await first).status_code

    assert asked(service, scenario) == (499, 200)
    assert held.sizes == [1] and service.capacity.waiting == 0


def test_nothing_is_kept_of_a_request_that_nobody_waits_for(service, png_image):
    """The threads that would decode it are busy with images of another request."""
    may_go, submitted = threading.Event(), []

    class Recorded(ThreadPoolExecutor):
        def submit(self, fn, *args):
            submitted.append(args)
            return super().submit(fn, *args)

    service.decoders = Recorded(1)
    service.decoders.submit(may_go.wait)

    async def scenario():
        gone = asyncio.Event()
        task = asyncio.create_task(service.predict(request(png_image(), gone)))
        while len(submitted) < 2:
            await asyncio.sleep(0.01)
        num_held = len(submitted[1][0])
        gone.set()
        status = (await task).status_code
        await asyncio.sleep(0.1)  # what is cancelled ends
        found = num_held, status, len(submitted[1][0])
        may_go.set()
        return found

    assert asked(service, scenario) == (1, 499, 0)


def test_a_request_has_its_time(predictor, png_image, monkeypatch):
    monkeypatch.setattr(predictor, "classify", predictor.classify)
    service = Service(predictor, Limits(200_000, 4, 10_000, 8, seconds=0.3), 4)
    held = Held(service)

    async def scenario():
        late = await service.predict(request(png_image()))
        slow = await service.predict(request(png_image()[:100], more=asyncio.Event()))
        held.may_go.set()
        return late, slow

    late, slow = asked(service, scenario)
    assert late.status_code == 503 and "0.3 s" in late.body.decode() and late.headers["retry-after"]
    assert slow.status_code == 408 and "arrive" in slow.body.decode()
    assert service.capacity.waiting == 0 and service.capacity.num_bytes == 0


def test_the_sender_of_a_body_that_is_too_large_can_read_why(service):
    """The body is read completely and discarded. Otherwise the connection would close while the client sends."""
    sent = [{"type": "http.request", "body": bytes(150_000), "more_body": i < 3} for i in range(4)]

    async def receive():
        return sent.pop(0)

    scope = {
        "type": "http",
        "method": "POST",
        "path": "/predict",
        "query_string": b"",
        "headers": [],
    }
    response = asked(service, lambda: service.predict(Request(scope, receive)))
    assert response.status_code == 413 and not sent


@pytest.mark.parametrize(
    ("status", "content"),
    [
        (422, b""),
        (400, b"no edge at all"),
        (
            413,
            b"--edge\r\nContent-Disposition: form-data; name=a; filename=b\r\n\r\nc\r\n" * 5
            + b"--edge--\r\n",
        ),
    ],
)
def test_a_body_that_is_here_is_refused_at_once(service, status, content):
    began, asking = time.monotonic(), request(content)
    if content:
        asking.scope["headers"] = [(b"content-type", b"multipart/form-data; boundary=edge")]
    assert asked(service, lambda: service.predict(asking)).status_code == status
    assert time.monotonic() - began < 5  # and not when the time of a request is over


def test_what_fails_is_counted(client, service, png_image, monkeypatch):
    monkeypatch.setattr(service.predictor, "classify", lambda images: 1 / 0)
    assert client.post("/predict", content=png_image()).status_code == 500
    assert b'finetune_requests_total{status="500"} 1.0' in service.metrics.text()


def test_decoding_uses_its_own_threads(service, png_image, monkeypatch):
    seen = []
    image = service._image
    monkeypatch.setattr(
        service,
        "_image",
        lambda *args: (seen.append(threading.current_thread().name), image(*args))[1],
    )
    began = time.monotonic()
    asked(service, lambda: service.predict(request(png_image())))
    assert seen[0].startswith("decoder") and time.monotonic() - began < 20
