"""The handling of a prediction request: read the uploads, decode the images, classify them in batches, respond."""

import asyncio
import logging
from collections.abc import Coroutine, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Annotated, Any

import numpy as np
from fastapi import HTTPException, Query, Request
from starlette.requests import ClientDisconnect

from finetune.data.decode import DecodeError, decode
from finetune.inference.class_activation import why_not_shown
from finetune.inference.image_viewer import overlay_heat_map
from finetune.inference.predictor import Predictor
from finetune.serving.access_log import ServiceMetrics
from finetune.serving.batcher import Batcher
from finetune.serving.errors import busy
from finetune.serving.schemas import Error, FailedImage, PredictOptions, answer_of
from finetune.serving.uploads import Capacity, Limits, Upload, read_uploads
from finetune.system.html_page import thumbnail
from finetune.system.machine import num_cores
from finetune.training.prediction import Prediction

log = logging.getLogger(__name__)
Answer = dict[str, list[dict[str, Any]]]  # as `schemas.answer_model`

# Shapes: N images, K classes, h and w pixels.


class Service:
    """Handles prediction requests with one checkpoint.

    Args:
        predictor: The checkpoint.
        limits: Limits of requests.
        max_batch: Largest batch of the network.
    """

    def __init__(self, predictor: Predictor, limits: Limits, max_batch: int) -> None:
        self.predictor = predictor
        self.limits = limits
        self.capacity = Capacity(limits.max_waiting)
        self.metrics = ServiceMetrics(predictor.class_names, lambda: self.capacity.waiting)
        self.batcher = Batcher(self._classify, max_batch, self.metrics.batches.observe)
        self.decoders = ThreadPoolExecutor(num_cores(), thread_name_prefix="decoder")
        self.is_stopping = False

    @property
    def is_ready(self) -> bool:
        """Whether it takes requests."""
        return not self.is_stopping and self.capacity.waiting < self.limits.max_waiting

    def stop(self) -> None:
        """Report `not ready` from now on. Requests are still answered."""
        self.is_stopping = True

    def close(self) -> None:
        """End the threads."""
        self.decoders.shutdown(cancel_futures=True)
        self.batcher.close()

    async def predict(
        self, request: Request, options: Annotated[PredictOptions, Query()]
    ) -> Answer:
        """Return the predictions for the images of a request.

        Raises:
            HTTPException: The request is refused, or late.
            ClientDisconnect: The client has disconnected.
        """
        deadline = asyncio.get_running_loop().time() + self.limits.seconds
        self.capacity.check()
        try:
            async with asyncio.timeout_at(deadline):
                uploads = await read_uploads(request, self.limits.max_images)
        except TimeoutError as error:
            message = f"the request took longer than {self.limits.seconds:g} s to arrive"
            raise HTTPException(408, message) from error
        with self.capacity.waiting_images(len(uploads)):
            try:
                async with asyncio.timeout_at(deadline):
                    work = self._predict_uploads(uploads, options)
                    return await _cancel_on_disconnect(request, work)
            except TimeoutError as error:
                message = f"there was no answer within {self.limits.seconds:g} s"
                raise busy(503, message) from error

    async def _predict_uploads(self, uploads: Sequence[Upload], options: PredictOptions) -> Answer:
        images = await self._decode(uploads)
        predictions = await self.batcher(images)
        self._check(uploads, predictions)
        answers = []
        for upload, image, one in zip(uploads, images, predictions, strict=True):
            answer = answer_of(one, upload.name, self.predictor.rule, options.top_k)
            for label in one.labels:
                self.metrics.predicted.labels(label).inc()
            if options.heatmap:
                maps = {label: await self._heat_map(image, label) for label in one.labels}
                is_single = self.predictor.rule.is_single
                answer["heatmap"] = maps[one.label] if is_single else maps
            answers.append(answer)
        return {"predictions": answers}

    async def _decode(self, uploads: Sequence[Upload]) -> list[np.ndarray]:
        """Return uploads as prepared images, (h, w, 3) uint8 each.

        Raises:
            HTTPException: Some uploads are not images.
        """
        loop = asyncio.get_running_loop()
        pending = list(uploads)
        tasks = [
            loop.run_in_executor(self.decoders, self._image, pending, i)
            for i in range(len(pending))
        ]
        try:
            results = await asyncio.gather(*tasks, return_exceptions=True)
        finally:
            # The executor's queue holds cancelled calls until a thread is free: they must not hold the bytes.
            pending.clear()
        failed = {
            i: str(error) for i, error in enumerate(results) if isinstance(error, DecodeError)
        }
        if failed:
            raise _failure(422, uploads, failed)
        images: list[np.ndarray] = []
        for result in results:
            if isinstance(result, BaseException):
                raise result
            images.append(result)
        return images

    def _image(self, uploads: Sequence[Upload], i: int) -> np.ndarray:
        """Return an upload as a prepared image.

        Raises:
            DecodeError: The upload is not an image.
        """
        upload = uploads[i]
        return self.predictor.prepare(
            decode(upload.content, _name(upload, i), max_pixels=self.limits.max_pixels)
        )

    def _check(self, uploads: Sequence[Upload], predictions: Sequence[Prediction]) -> None:
        """Refuse a request if some probabilities are not finite: JSON has no NaN."""
        finite = [np.isfinite([*one.probabilities.values()]).all() for one in predictions]
        wrong = [i for i, is_finite in enumerate(finite) if not is_finite]
        if wrong:
            what = "gives probabilities that are not finite numbers"
            log.error("%s %s", self.predictor.path, what)
            name = Path(self.predictor.path).name
            raise _failure(
                500, uploads, {i: f"{_name(uploads[i], i)}: {name} {what}" for i in wrong}
            )

    def _classify(self, images: np.ndarray) -> list[Prediction]:
        """Return the predictions for prepared images (N, h, w, 3)."""
        return list(self.predictor.scores(images))

    async def _heat_map(self, image: np.ndarray, label: str) -> str | None:
        """Return the heat map of a class as a data URL; None if the network has none that is fine enough."""
        k = self.predictor.class_names.index(label)
        maps = await self.batcher.run(self.predictor.activation, image[None], [k])
        if maps is None or why_not_shown(maps):
            return None
        return thumbnail(overlay_heat_map(image, maps[0]), max(image.shape))


def _failure(status: int, uploads: Sequence[Upload], errors: dict[int, str]) -> HTTPException:
    """Return the error of a request some of whose images failed."""
    failed = [FailedImage(index=i, name=uploads[i].name, error=text) for i, text in errors.items()]
    return HTTPException(status, Error(error=failed[0].error, images=failed))


def _name(upload: Upload, i: int) -> str:
    return upload.name or f"image {i}"


async def _cancel_on_disconnect(request: Request, work: Coroutine[Any, Any, Answer]) -> Answer:
    """Return the result of a coroutine, which is cancelled if the client disconnects first.

    Raises:
        ClientDisconnect: The client has disconnected.
    """
    result = asyncio.ensure_future(work)
    disconnect = asyncio.ensure_future(_wait_for_disconnect(request))
    try:
        await asyncio.wait((result, disconnect), return_when=asyncio.FIRST_COMPLETED)
        if not result.done():
            raise ClientDisconnect
        return result.result()
    finally:
        result.cancel()
        disconnect.cancel()


async def _wait_for_disconnect(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass
