"""What happens to a request that sends pictures: each is decoded, all wait their turn, and the answer names each."""

import asyncio
import logging
import re
import time
from collections.abc import Coroutine, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response

from finetune.data.decode import DecodeError, decode
from finetune.inference.class_activation import why_not_shown
from finetune.inference.lens import overlaid
from finetune.inference.predictor import Predictor
from finetune.serving.batcher import Batcher
from finetune.serving.refusal import Refused, drain, too_late
from finetune.serving.service_metrics import ServiceMetrics
from finetune.serving.uploads import Body, Limits, Room, Upload
from finetune.system.html_page import thumbnail
from finetune.system.machine import num_cores
from finetune.system.messages import did_you_mean, shown
from finetune.training.calibration import NotFinite

log = logging.getLogger(__name__)
_DIGITS = 7  # of a probability, as `finetune predict` writes it


class Wish(NamedTuple):
    """What the query of a request asks for.

    Attributes:
        top_k: How many classes the probabilities are said of, most probable first; None for all.
        looked_at: Whether to show where in a picture the network saw what it says.
    """

    top_k: int | None
    looked_at: bool


class Service:
    """Answers requests about one checkpoint.

    Args:
        predictor: The checkpoint.
        limits: Of requests.
        max_batch: Pictures that the network sees at a time, at most.
    """

    def __init__(self, predictor: Predictor, limits: Limits, max_batch: int) -> None:
        self.predictor, self.limits = predictor, limits
        self.room = Room(limits)
        self.metrics = ServiceMetrics(predictor.class_names, lambda: self.room.waiting)
        self.batcher = Batcher(self._classify, max_batch, self.metrics.batch)
        self.decoders = ThreadPoolExecutor(num_cores(), thread_name_prefix="decoder")
        self.is_stopping = False

    def stop(self) -> None:
        """Say to who asks that no new requests are wanted."""
        self.is_stopping = True

    def close(self) -> None:
        """End the threads."""
        self.decoders.shutdown(cancel_futures=True)
        self.batcher.close()

    async def predict(self, request: Request) -> Response:
        """Answer a request with pictures."""
        start = time.perf_counter()
        status = 500
        try:
            response = await self._answer(request)
            status = response.status_code
        finally:
            self.metrics.answered(status, time.perf_counter() - start)
        return response

    async def _answer(self, request: Request) -> Response:
        body = Body(request, self.room)
        try:
            async with asyncio.timeout(self.limits.seconds):
                self.room.check()
                wish = self._wish(request)
                uploads = await body.uploads()
                with self.room.pictures(len(uploads)):
                    return JSONResponse(
                        {"predictions": await _unless_gone(request, self._said(uploads, wish))}
                    )
        except TimeoutError:
            seconds = f"{self.limits.seconds:g} s"
            if not body.has_arrived:
                return Refused(408, f"the request took longer than {seconds} to arrive").response()
            return too_late(f"there was no answer within {seconds}", self.room.seconds).response()
        except Refused as refused:
            if not body.has_arrived:
                await drain(request.receive, self.limits.seconds)
            return refused.response()
        except ClientDisconnect:
            return Response(status_code=499)  # which nobody reads, but the metrics count
        finally:
            body.leave()

    def _wish(self, request: Request) -> Wish:
        query, names = request.query_params, self.predictor.class_names
        for name in query:
            if name not in Wish._fields:
                raise Refused(
                    400,
                    f"there is no option {shown(name)[:80]!r}{did_you_mean(name, Wish._fields)}",
                )
        top_k, looked_at = query.get("top_k"), query.get("looked_at", "false").lower()
        if top_k is not None and not (
            re.fullmatch(r"[0-9]{1,9}", top_k) and 1 <= int(top_k) <= len(names)
        ):
            raise Refused(400, f"top_k must be from 1 to {len(names)}, the number of classes")
        if looked_at not in ("true", "1", "false", "0"):
            raise Refused(400, "looked_at is true or false")
        return Wish(None if top_k is None else int(top_k), looked_at in ("true", "1"))

    async def _said(self, uploads: Sequence[Upload], wish: Wish) -> list[dict[str, Any]]:
        loop = asyncio.get_running_loop()
        held = list(uploads)
        tasks = [
            loop.run_in_executor(self.decoders, self._image, held, i) for i in range(len(held))
        ]
        try:
            found = await asyncio.gather(*tasks, return_exceptions=True)
        finally:  # a thread's queue keeps what is cancelled until it comes to it
            held.clear()
        bad = [
            {"index": i, "name": uploads[i].name, "error": str(e)}
            for i, e in enumerate(found)
            if _is_bad(e)
        ]
        if bad:
            raise Refused(422, str(bad[0]["error"]), bad)
        images = [image for image in found if isinstance(image, np.ndarray)]
        probabilities = await self.batcher(images)
        self._check(uploads, probabilities)
        classes = self.predictor.decide(probabilities)
        names = self.predictor.class_names
        self.metrics.said([names[k] for k in classes])
        said = [self._one(*of, wish) for of in zip(uploads, probabilities, classes, strict=True)]
        if wish.looked_at:
            for i, (image, k) in enumerate(zip(images, classes, strict=True)):
                said[i]["looked_at"] = await self.batcher.run(self._looked_at, image, int(k))
        return said

    def _check(self, uploads: Sequence[Upload], probabilities: np.ndarray) -> None:
        """Refuse a request with a picture whose probabilities are not finite numbers, which JSON does not have."""
        try:
            self.predictor.check(
                probabilities, [_name(upload, i) for i, upload in enumerate(uploads)]
            )
        except NotFinite as error:
            log.error("%s", error)
            told = (
                f"{Path(self.predictor.path).name} gives probabilities that are not finite numbers"
            )
            lost = np.flatnonzero(~np.isfinite(probabilities).all(axis=1)).tolist()
            bad = [
                {"index": i, "name": uploads[i].name, "error": f"{_name(uploads[i], i)}: {told}"}
                for i in lost
            ]
            raise Refused(500, str(bad[0]["error"]), bad) from error

    def _one(
        self, upload: Upload, probabilities: np.ndarray, said: int, wish: Wish
    ) -> dict[str, Any]:
        order = (-probabilities).argsort(kind="stable")[: wish.top_k]
        names = self.predictor.class_names
        known = {names[k]: round(float(probabilities[k]), _DIGITS) for k in order}
        label = {"label": names[said], "probability": round(float(probabilities[said]), _DIGITS)}
        return {"name": upload.name, **label, "probabilities": known}

    def _image(self, uploads: Sequence[Upload], index: int) -> np.ndarray:
        """Return what the network sees of a picture; what is no picture is a DecodeError."""
        upload = uploads[index]
        return self.predictor.prepare(
            decode(upload.content, _name(upload, index), max_pixels=self.limits.max_pixels)
        )

    def _classify(self, images: np.ndarray) -> np.ndarray:
        start = time.perf_counter()
        rows = self.predictor.classify(images)
        self.room.answered(len(images), time.perf_counter() - start)
        return rows

    def _looked_at(self, image: np.ndarray, said: int) -> str | None:
        maps = self.predictor.activation(image[None], [said])
        if maps is None or why_not_shown(maps):
            return None
        return thumbnail(overlaid(image, maps[0]), max(image.shape))


def _name(upload: Upload, index: int) -> str:
    return upload.name or f"picture {index}"


def _is_bad(found: Any) -> bool:
    """Whether a picture could not be read; what failed otherwise is raised."""
    if isinstance(found, BaseException) and not isinstance(found, DecodeError):
        raise found
    return isinstance(found, DecodeError)


async def _unless_gone(
    request: Request, work: Coroutine[Any, Any, list[dict[str, Any]]]
) -> list[dict[str, Any]]:
    """Return what the work returns, and end it if the client goes away before.

    Raises:
        ClientDisconnect: It has gone.
    """
    answer = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(_until_gone(request))
    try:
        await asyncio.wait((answer, gone), return_when=asyncio.FIRST_COMPLETED)
        if not answer.done():
            raise ClientDisconnect
        return answer.result()
    finally:
        answer.cancel()
        gone.cancel()


async def _until_gone(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass
