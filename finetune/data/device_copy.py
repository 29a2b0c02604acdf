"""The copy of batches to a GPU."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


class DeviceCopy:
    """Copies batches on a separate CUDA stream.

    On the compute stream, a copy would wait for all kernels in its queue. Lightning requests a batch as soon as the
    previous steps are queued, so a copy on another stream overlaps with them. This needs pinned memory.
    """

    def __init__(self) -> None:
        self._streams: dict[torch.device, Any] = {}

    def __call__(
        self, batch: Any, device: torch.device, copy: Callable[[Any, torch.device], Any]
    ) -> Any:
        """Return the batch on a device, ready for the kernels that are queued next.

        Args:
            batch: A dict with tensors.
            device: Target device. Other devices than CUDA have no streams.
            copy: Copies the batch to a device.
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
                # the memory must not be reused by the next copy before the compute stream has read it
                value.record_stream(computing)
        return there
