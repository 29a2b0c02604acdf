"""The handling of a prediction request: read the uploads, decode the images, classify them in batches, respond."""

import asyncio
import logging
import time
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
from finetune.runs.prediction_rows import DIGITS
from finetune.serving.batcher import Batcher
from finetune.serving.errors import busy
from finetune.serving.schemas import (
    Error,
    FailedImage,
    LabelsPrediction,
    Prediction,
    PredictOptions,
)
from finetune.serving.service_metrics import ServiceMetrics
from finetune.serving.uploads import Capacity, Limits, Upload, read_uploads
from finetune.system.html_page import thumbnail
from finetune.system.machine import num_cores
from finetune.training.finite import NotFinite

log = logging.getLogger(__name__)
AnyPrediction = Prediction | LabelsPrediction
Answer = dict[str, list[AnyPrediction]]  # as `Predictions`


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
        self.batcher = Batcher(self._classify, max_batch, self.metrics.count_batch)
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
                raise busy(503, message, self.capacity.wait_seconds) from error

    async def _predict_uploads(self, uploads: Sequence[Upload], options: PredictOptions) -> Answer:
        images = await self._decode(uploads)
        probabilities = await self.batcher(images)
        self._check(uploads, probabilities)
        predicted = self._predicted_classes(self.predictor.decide(probabilities))
        names = self.predictor.class_names
        self.metrics.count_predictions([names[k] for classes in predicted for k in classes])
        predictions = [
            self._prediction(upload, row, classes, options.top_k)
            for upload, row, classes in zip(uploads, probabilities, predicted, strict=True)
        ]
        if options.looked_at:
            for prediction, image, classes in zip(predictions, images, predicted, strict=True):
                maps = await self._heat_maps(image, classes)
                prediction.looked_at = maps
        return {"predictions": predictions}

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
        images: list[np.ndarray] = []
        failed: list[FailedImage] = []
        for i, result in enumerate(results):
            if isinstance(result, DecodeError):
                failed.append(FailedImage(index=i, name=uploads[i].name, error=str(result)))
            elif isinstance(result, BaseException):
                raise result
            else:
                images.append(result)
        if failed:
            raise _failure(422, failed)
        return images

    def _predicted_classes(self, decided: np.ndarray) -> list[list[int]]:
        """Return the predicted class of each image in a list, or its predicted labels."""
        if self.predictor.label_kind == "single":
            return [[int(k)] for k in decided]
        return [np.flatnonzero(row).tolist() for row in decided]

    def _check(self, uploads: Sequence[Upload], probabilities: np.ndarray) -> None:
        """Reject a request if some probabilities are not finite: JSON has no NaN.

        Raises:
            HTTPException: Some probabilities are not finite.
        """
        try:
            self.predictor.check(
                probabilities, [_name(upload, i) for i, upload in enumerate(uploads)]
            )
        except NotFinite as error:
            log.error("%s", error)
            name = Path(self.predictor.path).name
            message = f"{name} gives probabilities that are not finite numbers"
            failed = [
                FailedImage(
                    index=i, name=uploads[i].name, error=f"{_name(uploads[i], i)}: {message}"
                )
                for i in np.flatnonzero(~np.isfinite(probabilities).all(axis=1)).tolist()
            ]
            raise _failure(500, failed) from error

    def _prediction(
        self, upload: Upload, probabilities: np.ndarray, predicted: list[int], top_k: int | None
    ) -> AnyPrediction:
        """Return the answer for an image, from the probability of each class (K,) and the predicted ones."""
        order = (-probabilities).argsort(kind="stable")[:top_k]
        names = self.predictor.class_names
        of_classes = {names[k]: round(float(probabilities[k]), DIGITS) for k in order}
        calibration = self.predictor.calibration
        if calibration.label_kind == "several":
            return LabelsPrediction(
                name=upload.name,
                labels=[names[k] for k in predicted],
                probabilities=of_classes,
                thresholds={names[k]: calibration.thresholds[k] for k in order},
            )
        (k,) = predicted
        return Prediction(
            name=upload.name,
            label=names[k],
            probability=round(float(probabilities[k]), DIGITS),
            probabilities=of_classes,
        )

    def _image(self, uploads: Sequence[Upload], index: int) -> np.ndarray:
        """Return an upload as a prepared image.

        Raises:
            DecodeError: The upload is not an image.
        """
        upload = uploads[index]
        return self.predictor.prepare(
            decode(upload.content, _name(upload, index), max_pixels=self.limits.max_pixels)
        )

    def _classify(self, images: np.ndarray) -> np.ndarray:
        """Return the probabilities (N, K) of images (N, h, w, 3), and measure the rate for `Retry-After`."""
        start = time.perf_counter()
        rows = self.predictor.classify(images)
        seconds = time.perf_counter() - start
        self.capacity.update_rate(len(images), seconds)
        return rows

    async def _heat_maps(
        self, image: np.ndarray, predicted: list[int]
    ) -> str | dict[str, str | None] | None:
        """Return the heat map of the predicted class; of several labels one for each predicted label, by name."""
        if self.predictor.label_kind == "single":
            return await self.batcher.run(self._heat_map, image, predicted[0])
        names = self.predictor.class_names
        return {names[k]: await self.batcher.run(self._heat_map, image, k) for k in predicted}

    def _heat_map(self, image: np.ndarray, k: int) -> str | None:
        maps = self.predictor.activation(image[None], [k])
        if maps is None or why_not_shown(maps):
            return None
        return thumbnail(overlay_heat_map(image, maps[0]), max(image.shape))


def _failure(status: int, failed: list[FailedImage]) -> HTTPException:
    """Return the error of a request some of whose images failed."""
    return HTTPException(status, Error(error=failed[0].error, pictures=failed))


def _name(upload: Upload, index: int) -> str:
    return upload.name or f"image {index}"


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
