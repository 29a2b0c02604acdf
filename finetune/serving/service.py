"""The handling of a prediction request: read the uploads, decode the images, classify them in batches, respond."""

import asyncio
import logging
import re
import time
from collections.abc import Coroutine, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import numpy as np
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response

from finetune.data.decode import DecodeError, decode
from finetune.inference.class_activation import why_not_shown
from finetune.inference.image_viewer import overlay_heat_map
from finetune.inference.predictor import Predictor
from finetune.runs.prediction_rows import DIGITS
from finetune.serving.batcher import Batcher
from finetune.serving.openapi import IMAGES, PREDICTIONS, Operation, described
from finetune.serving.refusal import Refused, drain, too_late
from finetune.serving.response_types import FailedImage, LabelsPrediction, Prediction
from finetune.serving.service_metrics import ServiceMetrics
from finetune.serving.uploads import Body, Capacity, Limits, Upload
from finetune.system.html_page import thumbnail
from finetune.system.machine import num_cores
from finetune.system.messages import did_you_mean, shown
from finetune.training.calibration import NotFinite

log = logging.getLogger(__name__)
AnyPrediction = Prediction | LabelsPrediction


class RequestOptions(NamedTuple):
    """The options in the query of a request, each with its text in the OpenAPI description."""

    top_k: Annotated[
        int | None, "the number of most probable classes to return", {"minimum": 1}
    ] = None
    looked_at: Annotated[bool, "return a heat map of the predicted class"] = False


_DESCRIPTION = Operation(
    summary="Classify images",
    description="One image as the body, or several as files of a multipart form: "
    "JPEG, PNG, WebP, BMP, TIFF or GIF of at most {limits.max_pixels:,} pixels.",
    options=RequestOptions,
    body=IMAGES,
    answer=PREDICTIONS,
    text="one for each image, in the order of the request",
    errors={
        400: "an unreadable option or form",
        408: "the request took longer than {limits.seconds:g} s to arrive",
        413: "more than {limits.max_images} images or {limits.max_bytes:,} bytes",
        415: "a compressed body, or JSON, base64 or another text where the bytes of an image are expected",
        422: "no image, or an unreadable one: `pictures` lists which, and why",
        429: "more than {limits.max_waiting} images or too many large requests: retry after Retry-After seconds",
        500: "a failure of the service, or probabilities that are not finite numbers: `pictures` lists the images",
        503: "no answer within {limits.seconds:g} s, or too many connections",
    },
)


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
        self.capacity = Capacity(limits)
        self.metrics = ServiceMetrics(predictor.class_names, lambda: self.capacity.waiting)
        self.batcher = Batcher(self._classify, max_batch, self.metrics.count_batch)
        self.decoders = ThreadPoolExecutor(num_cores(), thread_name_prefix="decoder")
        self.is_stopping = False

    def stop(self) -> None:
        """Report `not ready` from now on. Requests are still answered."""
        self.is_stopping = True

    def close(self) -> None:
        """End the threads."""
        self.decoders.shutdown(cancel_futures=True)
        self.batcher.close()

    @described(_DESCRIPTION)
    async def predict(self, request: Request) -> Response:
        """Return the response to a prediction request."""
        start = time.perf_counter()
        status = 500
        try:
            response = await self._answer(request)
            status = response.status_code
        finally:
            seconds = time.perf_counter() - start
            self.metrics.count_request(status, seconds)
        return response

    async def _answer(self, request: Request) -> Response:
        """Return the response to a prediction request, also if it is refused, late or abandoned."""
        body = Body(request, self.capacity)
        try:
            async with asyncio.timeout(self.limits.seconds):
                self.capacity.check()
                options = self._options(request)
                uploads = await body.uploads()
                with self.capacity.waiting_images(len(uploads)):
                    work = self._predict_uploads(uploads, options)
                    predictions = await _cancel_on_disconnect(request, work)
                    return JSONResponse({"predictions": predictions})
        except TimeoutError:
            seconds = f"{self.limits.seconds:g} s"
            if not body.has_arrived:
                return Refused(408, f"the request took longer than {seconds} to arrive").response()
            message = f"there was no answer within {seconds}"
            return too_late(message, self.capacity.wait_seconds).response()
        except Refused as refused:
            if not body.has_arrived:
                await drain(request.receive, self.limits.seconds)
            return refused.response()
        except ClientDisconnect:
            # The client does not receive this response, but the metrics count its status.
            return Response(status_code=499)
        finally:
            body.release()

    def _options(self, request: Request) -> RequestOptions:
        """Return the options in the query of a request.

        Raises:
            Refused: An option does not exist or has an invalid value.
        """
        query = request.query_params
        names = self.predictor.class_names
        for name in query:
            if name not in RequestOptions._fields:
                hint = did_you_mean(name, RequestOptions._fields)
                raise Refused(400, f"there is no option {shown(name)[:80]!r}{hint}")
        top_k = query.get("top_k")
        looked_at = query.get("looked_at", "false").lower()
        if top_k is not None and not (
            re.fullmatch(r"[0-9]{1,9}", top_k) and 1 <= int(top_k) <= len(names)
        ):
            raise Refused(400, f"top_k must be from 1 to {len(names)}, the number of classes")
        if looked_at not in ("true", "1", "false", "0"):
            raise Refused(400, "looked_at is true or false")
        return RequestOptions(None if top_k is None else int(top_k), looked_at in ("true", "1"))

    async def _predict_uploads(
        self, uploads: Sequence[Upload], options: RequestOptions
    ) -> list[AnyPrediction]:
        images = await self._decode(uploads)
        probabilities = await self.batcher(images)
        self._check(uploads, probabilities)
        predicted = self._predicted_classes(self.predictor.decide(probabilities))
        names = self.predictor.class_names
        self.metrics.count_predictions([names[k] for classes in predicted for k in classes])
        predictions = [
            self._prediction(upload, row, classes, options)
            for upload, row, classes in zip(uploads, probabilities, predicted, strict=True)
        ]
        if options.looked_at:
            for prediction, image, classes in zip(predictions, images, predicted, strict=True):
                maps = await self._heat_maps(image, classes)
                prediction["looked_at"] = maps  # type: ignore[arg-type] # its kind has it so
        return predictions

    async def _decode(self, uploads: Sequence[Upload]) -> list[np.ndarray]:
        """Return uploads as prepared images, (h, w, 3) uint8 each.

        Raises:
            Refused: Some uploads are not images.
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
                failed.append({"index": i, "name": uploads[i].name, "error": str(result)})
            elif isinstance(result, BaseException):
                raise result
            else:
                images.append(result)
        if failed:
            raise Refused(422, str(failed[0]["error"]), failed)
        return images

    def _predicted_classes(self, decided: np.ndarray) -> list[list[int]]:
        """Return the predicted class of each image in a list, or its predicted labels."""
        if self.predictor.label_kind == "single":
            return [[int(k)] for k in decided]
        return [np.flatnonzero(row).tolist() for row in decided]

    def _check(self, uploads: Sequence[Upload], probabilities: np.ndarray) -> None:
        """Reject a request if some probabilities are not finite: JSON has no NaN.

        Raises:
            Refused: Some probabilities are not finite.
        """
        try:
            self.predictor.check(
                probabilities, [_name(upload, i) for i, upload in enumerate(uploads)]
            )
        except NotFinite as error:
            log.error("%s", error)
            message = (
                f"{Path(self.predictor.path).name} gives probabilities that are not finite numbers"
            )
            rows = np.flatnonzero(~np.isfinite(probabilities).all(axis=1)).tolist()
            failed: list[FailedImage] = [
                {"index": i, "name": uploads[i].name, "error": f"{_name(uploads[i], i)}: {message}"}
                for i in rows
            ]
            raise Refused(500, str(failed[0]["error"]), failed) from error

    def _prediction(
        self,
        upload: Upload,
        probabilities: np.ndarray,
        predicted: list[int],
        options: RequestOptions,
    ) -> AnyPrediction:
        """Return the answer for an image, from the probability of each class (K,) and the predicted ones."""
        order = (-probabilities).argsort(kind="stable")[: options.top_k]
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


def _name(upload: Upload, index: int) -> str:
    return upload.name or f"image {index}"


async def _cancel_on_disconnect(
    request: Request, work: Coroutine[Any, Any, list[AnyPrediction]]
) -> list[AnyPrediction]:
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
