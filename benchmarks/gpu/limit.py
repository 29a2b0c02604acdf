"""The limit of a job: training steps on a batch that is on the device already."""

import math
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from finetune import Classifier

NUM_CHUNKS = 5  # timed one after another, after a warm-up
_MIN_WARM_UP = 3  # steps: cuDNN chooses its kernels in the first, the optimizer makes its state


def measure_limit(batch_size: int, device: str, image_size: int, seconds: float) -> dict[str, Any]:
    """Train ResNet-18 on one batch in bf16 and channels_last, as a job on a GPU does.

    Args:
        batch_size: Images per step.
        device: cuda or cpu.
        image_size: Side of the images in pixels.
        seconds: Least length of a timed chunk.

    Returns:
        Images per second of each chunk, seconds of the first step, peak memory in GB.
    """
    is_cuda = device == "cuda"
    if is_cuda:
        torch.cuda.reset_peak_memory_stats()
    step = training_step(batch_size, device, image_size)
    first = timed(step, 1, device)
    warm_up: list[float] = []
    while len(warm_up) < _MIN_WARM_UP or sum(warm_up) < seconds:
        warm_up.append(timed(step, 1, device))
    num_steps = math.ceil(seconds / min(warm_up)) or 1
    rates = [num_steps * batch_size / timed(step, num_steps, device) for _ in range(NUM_CHUNKS)]
    peak = torch.cuda.max_memory_allocated() / 1e9 if is_cuda else None
    return {"rates": rates, "first_step_seconds": first, "peak_gb": peak}


def training_step(batch_size: int, device: str, image_size: int) -> Callable[[], None]:
    """Return a function that trains on the batch once."""
    names = [f"class {k}" for k in range(10)]
    model = Classifier(names, weights=None, scheduler=None).to(device).train()
    optimizer = model.configure_optimizers()
    shape = (batch_size, 3, image_size, image_size)
    images = torch.randint(0, 256, shape, dtype=torch.uint8, device=device)
    images = images.contiguous(memory_format=torch.channels_last)
    labels = torch.randint(0, 10, (batch_size,), device=device)

    def step() -> None:
        optimizer.zero_grad()
        with torch.autocast(device, torch.bfloat16):
            loss = F.cross_entropy(model(images), labels)
        loss.backward()
        optimizer.step()

    return step


def timed(step: Callable[[], None], num_steps: int, device: str) -> float:
    """Return the seconds of steps that begin on an idle device, until it is idle again."""
    if device == "cuda":
        torch.cuda.synchronize()
    began = time.perf_counter()
    for _ in range(num_steps):
        step()
    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - began
