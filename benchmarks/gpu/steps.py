"""The limit: training steps and predictions whose pictures lie on the device already."""

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from finetune import Classifier
from finetune.models.image_classifier import normalize
from finetune.training.precision import allow_tf32

NUM_CHUNKS = 5  # timed one after another, after a warm-up
_MIN_WARM_UP = 3  # steps: cuDNN chooses its kernels in the first, the optimizer makes its state

Step = Callable[[], Any]


@dataclass(frozen=True)
class Setup:
    """What all measurements of a run share.

    Attributes:
        device: cuda or cpu.
        root: Folder with train/CLASS/*.
        num_pictures: Pictures in it.
        folder: For what the measurements write, caches of decoded pictures above all.
        weights: State dict that jobs start from, None for random weights.
        image_size: Side of the pictures in pixels.
        epochs: Epochs of a job; the first is not counted.
        seconds: Least length of a timed chunk.
    """

    device: str
    root: Path
    num_pictures: int
    folder: Path
    weights: str | None
    image_size: int
    epochs: int
    seconds: float


@dataclass(frozen=True)
class Limit:
    """Steps of ResNet-18 on one batch that lies on the device."""

    mode: str  # train or predict
    precision: str  # fp32, tf32 or bf16
    channels_last: bool
    batch_size: int

    kind: ClassVar[str] = "limit"
    seconds: ClassVar[float] = 8  # that it may take, by estimate

    def measure(self, setup: Setup) -> dict[str, Any]:
        """Return pictures per second of each chunk, seconds of the first step, peak memory in GB."""
        set_float32(self.precision)
        if setup.device == "cuda":
            torch.cuda.reset_peak_memory_stats()
        first, rates = chunks(self.step(setup), self.batch_size, setup)
        peak = torch.cuda.max_memory_allocated() / 1e9 if setup.device == "cuda" else None
        return {"rates": rates, "first_step_seconds": first, "peak_gb": peak}

    def step(self, setup: Setup) -> Step:
        """Return what trains on the batch once, or predicts it."""
        network = Classifier if self.channels_last else ContiguousClassifier
        names = [f"class {k}" for k in range(10)]
        model = network(names, weights=None, scheduler=None).to(setup.device)
        optimizer = model.configure_optimizers()
        shape = (self.batch_size, 3, setup.image_size, setup.image_size)
        layout = torch.channels_last if self.channels_last else torch.contiguous_format
        images = torch.randint(0, 256, shape, dtype=torch.uint8, device=setup.device).contiguous(
            memory_format=layout
        )
        labels = torch.randint(0, 10, (self.batch_size,), device=setup.device)
        is_bf16 = self.precision == "bf16"

        def train() -> None:
            optimizer.zero_grad()
            with torch.autocast(setup.device, torch.bfloat16, enabled=is_bf16):
                loss = F.cross_entropy(model(images), labels)
            loss.backward()
            optimizer.step()

        @torch.no_grad()
        def predict() -> None:
            with torch.autocast(setup.device, torch.bfloat16, enabled=is_bf16):
                model(images)

        model.train(self.mode == "train")
        return train if self.mode == "train" else predict


class ContiguousClassifier(Classifier):
    """The same network with pictures, weights and activations in torch's own order, (B, C, h, w)."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.network.to(memory_format=torch.contiguous_format)

    def forward(self, images: Tensor) -> Tensor:
        model = self.image_classifier
        inputs = normalize(images, model.mean, model.std).contiguous()
        return model.network(inputs).to(model.mean.dtype)


def set_float32(precision: str) -> None:
    """Let convolutions and products in float32 take TF32, as our commands do, or not."""
    torch.backends.cudnn.allow_tf32 = precision != "fp32"
    torch.set_float32_matmul_precision("highest")
    if precision != "fp32":
        allow_tf32()


def chunks(step: Step, batch_size: int, setup: Setup) -> tuple[float, list[float]]:
    """Return the seconds of the first step, and pictures per second of each chunk, all of the same number of steps."""
    first = timed(step, 1, setup.device)
    warm_up = []
    while len(warm_up) < _MIN_WARM_UP or sum(warm_up) < setup.seconds:
        warm_up.append(timed(step, 1, setup.device))
    num_steps = math.ceil(setup.seconds / min(warm_up)) or 1
    return first, [
        num_steps * batch_size / timed(step, num_steps, setup.device) for _ in range(NUM_CHUNKS)
    ]


def timed(step: Step, num_steps: int, device: str) -> float:
    """Return the seconds of steps that begin on an idle device, until it is idle again."""
    if device == "cuda":
        torch.cuda.synchronize()
    began = time.perf_counter()
    for _ in range(num_steps):
        step()
    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - began
