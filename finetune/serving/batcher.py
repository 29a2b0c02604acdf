"""Dynamic batching: images that arrive while the network is busy make the next batch.

If the network is idle, an image is computed at once. So a single client never waits for others, and
batches grow with the load.
"""

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np


class Batcher:
    """Collects images of concurrent requests into batches.

    Args:
        classify: Maps images (N, h, w, 3) uint8, all of one size, to N results. It runs in a separate thread.
        max_batch: Largest number of images in a batch.
        on_batch: Called with the number of images of each batch.

    Attributes:
        is_busy: Whether a batch is being computed.
    """

    def __init__(
        self,
        classify: Callable[[np.ndarray], Sequence[Any]],
        max_batch: int,
        on_batch: Callable[[int], None],
    ) -> None:
        self._classify = classify
        self._max_batch = max_batch
        self._on_batch = on_batch
        self._waiting: deque[tuple[np.ndarray, asyncio.Future[Any]]] = deque()
        self.is_busy = False
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="network")

    async def __call__(self, images: Sequence[np.ndarray]) -> list[Any]:
        """Return the results of N images. If the caller is cancelled, its waiting images are not computed."""
        loop = asyncio.get_running_loop()
        results = [loop.create_future() for _ in images]
        self._waiting.extend(zip(images, results, strict=True))
        self._start_batch()
        return await asyncio.gather(*results)

    async def run(self, function: Callable[..., Any], *args: Any) -> Any:
        """Call a function in the network's thread, between two batches."""
        return await asyncio.get_running_loop().run_in_executor(self._thread, function, *args)

    def close(self) -> None:
        """End the thread after the current batch."""
        self._thread.shutdown(cancel_futures=True)

    def _start_batch(self) -> None:
        """Compute the next batch of waiting images, unless one is being computed."""
        if self.is_busy:
            return
        batch: list[tuple[np.ndarray, asyncio.Future[Any]]] = []
        while self._waiting and len(batch) < self._max_batch:
            image, result = self._waiting.popleft()
            if not result.done():  # one that is done was cancelled: its client has disconnected
                batch.append((image, result))
        if batch:
            self.is_busy = True
            self._on_batch(len(batch))
            task = self.run(self._classify, np.stack([image for image, _ in batch]))
            asyncio.ensure_future(task).add_done_callback(
                lambda done: self._answer([result for _, result in batch], done)
            )

    def _answer(self, results: Sequence[asyncio.Future[Any]], done: asyncio.Future[Any]) -> None:
        """Pass the results of a finished batch, or its error, to the callers, and start the next batch."""
        self.is_busy = False
        error = asyncio.CancelledError() if done.cancelled() else done.exception()
        for i, result in enumerate(results):
            if result.done():
                continue
            if error:
                result.set_exception(error)
            else:
                result.set_result(done.result()[i])
        self._start_batch()
