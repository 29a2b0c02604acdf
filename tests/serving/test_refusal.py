"""A refused request gets the reason, as JSON."""

import asyncio
import json

from finetune.serving.refusal import Refused, busy, drain, too_late


def test_a_refusal_says_what_is_wrong_and_with_which_images():
    response = Refused(
        422, "a.jpg: empty", [{"index": 0, "name": "a.jpg", "error": "empty"}]
    ).response()
    assert response.status_code == 422
    assert json.loads(response.body) == {
        "error": "a.jpg: empty",
        "pictures": [{"index": 0, "name": "a.jpg", "error": "empty"}],
    }
    assert json.loads(Refused(400, "no").response().body) == {"error": "no"}


def test_a_refusal_that_allows_a_retry_states_when():
    for refused, status in ((busy("full", 7.4), 429), (too_late("late", 0.2), 503)):
        response = refused.response()
        assert response.status_code == status
        assert response.headers["retry-after"] == ("7" if status == 429 else "1")


def test_a_body_is_taken_to_its_end_or_until_its_sender_goes():
    def left(messages):
        async def receive():
            return messages.pop(0)

        asyncio.run(drain(receive, seconds=10))
        return len(messages)

    part, end = (
        {"type": "http.request", "body": b"x", "more_body": more} for more in (True, False)
    )
    assert left([part, part, end, part]) == 1
    assert left([part, {"type": "http.disconnect"}, part]) == 1
    huge = {"type": "http.request", "body": bytes(2**25), "more_body": True}
    assert left([huge, huge, huge]) == 1  # not for ever


def test_a_body_that_does_not_end_is_waited_for_so_long_alone():
    async def receive():
        await asyncio.sleep(0.01)
        return {"type": "http.request", "body": b"x", "more_body": True}

    async def drained():
        async with asyncio.timeout(5):
            await drain(receive, seconds=0.1)

    asyncio.run(drained())
