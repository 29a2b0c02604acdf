"""Batches on their way to a GPU."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


class DeviceCopy:
    """Copies batches on a CUDA stream of its own.

    On the stream that computes, a copy would wait for all that is queued there. Lightning asks for a batch as soon as
    the steps before are queued, so that a copy on another stream runs while they are computed. Pinned memory is what
    lets it.
    """

    def __init__(self) -> None:
        self._streams: dict[torch.device, Any] = {}

    def __call__(
        self, batch: Any, device: torch.device, copy: Callable[[Any, torch.device], Any]
    ) -> Any:
        """Return the batch on a device, ready for what is queued there next.

        Args:
            batch: A dict with tensors.
            device: Where to; what isn't CUDA has no streams.
            copy: Returns the batch on a device.
        """
        if device.type != "cuda":
            return copy(batch, device)
        if device not in self._streams:
            self._streams[device] = torch.cuda.Stream(device)
        stream = self._streams[device]
        with torch.cuda.stream(stream):
            there = copy(batch, device)
        computing = torch.cuda.current_stream(device)
        computing.wait_stream(stream)
        for value in there.values():
            if isinstance(value, Tensor):
                # its memory is not to be taken for the next copy before it was used
                value.record_stream(computing)
        return there
