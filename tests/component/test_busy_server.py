"""A busy service: images are classified in batches, and nobody waits in vain."""

import asyncio
import json
import threading
import time
from typing import NamedTuple

import pytest
from services import LIMITS, client_of, image_bytes

from finetune.inference.predictor import Predictor
from finetune.serving.app import make_app
from finetune.serving.service import Service
from finetune.serving.uploads import Limits


@pytest.fixture(scope="module")
def predictor(fitted_runs):
    return Predictor(fitted_runs.single / "checkpoints/best.ckpt")


class Held:
    """Lets the network of a service wait, and records its batches."""

    def __init__(self, scores) -> None:
        self.may_go = threading.Event()
        self.sizes = []
        self.scores = scores

    def __call__(self, images):
        assert self.may_go.wait(20)
        self.sizes.append(len(images))
        return self.scores(images)


@pytest.fixture
def held(predictor, monkeypatch):
    held = Held(predictor.scores)
    monkeypatch.setattr(predictor, "scores", held)
    return held


class Answer(NamedTuple):
    status: int
    headers: dict[bytes, bytes]
    body: bytes


def asked(service: Service, scenario):
    """Return the result of a scenario, which gets the application of a service."""

    async def run():
        async with asyncio.timeout(20):
            return await scenario(make_app(service, None, "127.0.0.1"))

    try:
        return asyncio.run(run())
    finally:
        assert service.capacity.waiting == 0
        service.close()


async def ask(app, receive) -> Answer:
    """Send a request to /predict, whose messages `receive` returns."""
    scope = {"type": "http", "method": "POST", "path": "/predict", "query_string": b""}
    messages = []

    async def send(message):
        messages.append(message)

    await app({**scope, "headers": [(b"host", b"localhost")]}, receive, send)
    start, *parts = messages
    body = b"".join(part["body"] for part in parts)
    return Answer(start["status"], dict(start["headers"]), body)


def request(*parts: bytes, then: asyncio.Event | None = None, is_whole: bool = True):
    """The messages of a request with a body in parts, whose sender goes away at an event, or never."""
    messages = [
        {"type": "http.request", "body": part, "more_body": not is_whole or i + 1 < len(parts)}
        for i, part in enumerate(parts)
    ]

    async def receive():
        if messages:
            return messages.pop(0)
        await (then or asyncio.Event()).wait()
        return {"type": "http.disconnect"}

    return receive


async def until(condition) -> None:
    while not condition():
        await asyncio.sleep(0.01)


def probability(answer: Answer) -> float:
    assert answer.status == 200
    (prediction,) = json.loads(answer.body)["predictions"]
    return prediction["probability"]


def test_when_it_is_full_others_are_sent_away_and_those_that_wait_get_their_own(predictor, held):
    service = Service(predictor, LIMITS, max_batch=4)
    number = LIMITS.max_waiting

    async def scenario(app):
        requests = [request(image_bytes(k)) for k in range(number)]
        tasks = [asyncio.create_task(ask(app, each)) for each in requests]
        await until(lambda: service.capacity.waiting == number)
        await asyncio.sleep(0.3)  # decoded
        refused = await ask(app, request(image_bytes()))
        held.may_go.set()
        together = await asyncio.gather(*tasks)
        alone = [await ask(app, request(image_bytes(k))) for k in range(number)]
        return refused, together, alone

    refused, together, alone = asked(service, scenario)
    assert refused.status == 429 and int(refused.headers[b"retry-after"]) >= 1
    # the first at once, then at most four together while the network is busy
    assert held.sizes == [1, 4, 3] + [1] * number
    expected = [probability(response) for response in alone]
    assert len(set(expected)) == number
    found = [probability(response) for response in together]
    assert found == pytest.approx(expected, rel=0, abs=2e-6)  # seven digits, other neighbours


def test_a_client_that_goes_away_is_not_computed_for(predictor, held):
    service = Service(predictor, LIMITS, max_batch=4)

    async def scenario(app):
        first = asyncio.create_task(ask(app, request(image_bytes())))
        await until(lambda: service.batcher.is_busy)
        gone = asyncio.Event()
        second = asyncio.create_task(ask(app, request(image_bytes(), then=gone)))
        await until(lambda: service.capacity.waiting == 2)
        await asyncio.sleep(0.2)
        gone.set()
        status = (await second).status
        held.may_go.set()
        return status, (await first).status

    assert asked(service, scenario) == (499, 200)
    assert held.sizes == [1]


def test_a_request_has_its_time_to_arrive_and_to_be_answered(predictor, held):
    service = Service(predictor, Limits(200_000, 4, 10_000, 8, seconds=0.3), 4)

    async def scenario(app):
        late = await ask(app, request(image_bytes()))
        slow = await ask(app, request(image_bytes()[:100], is_whole=False))
        held.may_go.set()
        return late, slow

    late, slow = asked(service, scenario)
    assert late.status == 503 and b"0.3 s" in late.body and late.headers[b"retry-after"]
    assert slow.status == 408 and b"arrive" in slow.body


def test_the_sender_of_a_large_body_can_read_why(predictor):
    """The body is read completely and discarded. Otherwise the connection would close while the client sends."""
    service = Service(predictor, LIMITS, max_batch=4)
    gone = asyncio.Event()
    gone.set()
    sent = request(*[bytes(150_000)] * 4, then=gone)
    assert asked(service, lambda app: ask(app, sent)).status == 413
    assert asyncio.run(sent())["type"] == "http.disconnect"


def test_a_body_without_end_is_discarded_for_so_long_alone(predictor):
    service = Service(predictor, Limits(1000, 4, 10_000, 8, seconds=0.3), 4)

    async def receive():
        await asyncio.sleep(0.01)
        return {"type": "http.request", "body": bytes(100), "more_body": True}

    began = time.monotonic()
    assert asked(service, lambda app: ask(app, receive)).status == 413
    assert time.monotonic() - began < 5


def test_too_many_images_of_all_requests_are_refused_for_a_while(predictor):
    service = Service(predictor, LIMITS, max_batch=4)
    with client_of(service) as client:
        with service.capacity.waiting_images(8):
            answer = client.post("/predict", content=image_bytes())
        assert (answer.status_code, answer.headers["retry-after"]) == (429, "1")
        assert client.post("/predict", content=image_bytes()).status_code == 200


def test_too_many_bytes_of_all_requests_are_refused_until_their_senders_have_left(predictor):
    service = Service(predictor, LIMITS, max_batch=4)

    async def scenario(app):
        gone = asyncio.Event()
        large = [request(bytes(LIMITS.max_bytes), then=gone, is_whole=False) for _ in range(16)]
        tasks = [asyncio.create_task(ask(app, each)) for each in large]
        await asyncio.sleep(0.2)
        refused = await ask(app, request(image_bytes()))
        gone.set()
        statuses = {answer.status for answer in await asyncio.gather(*tasks)}
        return refused, statuses, await ask(app, request(image_bytes()))

    refused, statuses, later = asked(service, scenario)
    assert refused.status == 429 and b"large requests" in refused.body
    assert refused.headers[b"retry-after"] and statuses == {499} and later.status == 200
