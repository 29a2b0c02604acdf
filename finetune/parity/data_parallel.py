"""Data parallelism by hand: each device has all weights and takes a part of each batch. Gradients are summed.

Form and names are those of d2l.ai, "Training on Multiple GPUs". Everything is a function on tensors, and autograd only
computes the gradients. The arithmetic is the same for any number of devices.

On CUDA the devices compute at the same time, since kernels are launched asynchronously. Replicas on a CPU compute one
after another. They show that the arithmetic is right, but save no time.
"""

import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

# Shapes: B images in a batch, N in a split, 10 classes.


def init_params(seed: int, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    """Return LeNet's weights from N(0, 0.01^2) and zero biases, on the CPU. All dtypes get the same numbers, rounded.

    The standard deviation is the book's. It is so small that the loss stays near log(10) for about 300 batches.
    """
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return (0.01 * torch.randn(shape, generator=generator, dtype=torch.float64)).to(dtype)

    W1 = normal(20, 1, 3, 3)
    W2 = normal(50, 20, 5, 5)
    W3 = normal(800, 128)
    W4 = normal(128, 10)
    b1, b2, b3, b4 = (torch.zeros(num, dtype=dtype) for num in (20, 50, 128, 10))
    return [W1, b1, W2, b2, W3, b3, W4, b4]


def lenet(X: Tensor, params: Sequence[Tensor]) -> Tensor:
    """Return logits (B, 10) of images (B, 1, 28, 28)."""
    W1, b1, W2, b2, W3, b3, W4, b4 = params
    h1 = F.avg_pool2d(F.relu(F.conv2d(X, W1, b1)), 2)  # (B, 20, 13, 13)
    h2 = F.avg_pool2d(F.relu(F.conv2d(h1, W2, b2)), 2)  # (B, 50, 4, 4)
    h3 = F.relu(h2.flatten(1) @ W3 + b3)  # (B, 128)
    return h3 @ W4 + b4


def get_params(params: Sequence[Tensor], device: torch.device) -> list[Tensor]:
    """Return a copy of `params` on `device` that requires gradients."""
    # Without `copy` replicas on the same device would share their tensors.
    return [p.detach().to(device, copy=True).requires_grad_() for p in params]


@torch.no_grad()
def allreduce(data: Sequence[Tensor]) -> None:
    """Replace every tensor by the sum of all, in place. They have the same shape and may be on different devices."""
    for i in range(1, len(data)):
        data[0].add_(data[i].to(data[0].device))
    for i in range(1, len(data)):
        data[i].copy_(data[0])


def split_batch(
    X: Tensor, y: Tensor, devices: Sequence[torch.device]
) -> tuple[list[Tensor], list[Tensor]]:
    """Split the images and labels of a batch into equal parts, one for each device, in order.

    Raises:
        ValueError: The batch size is not divisible by the number of devices.
    """
    assert len(X) == len(y)
    if len(X) % len(devices):
        raise ValueError(
            f"a batch of {len(X)} images cannot be divided evenly among {len(devices)} devices"
        )
    num = len(X) // len(devices)
    return (
        [part.to(device) for part, device in zip(X.split(num), devices, strict=True)],
        [part.to(device) for part, device in zip(y.split(num), devices, strict=True)],
    )


def train_batch(
    X: Tensor,
    y: Tensor,
    device_params: Sequence[Sequence[Tensor]],
    devices: Sequence[torch.device],
    lr: float,
) -> None:
    """Take one step of plain SGD on the mean loss of a batch. All replicas end with the same weights.

    Args:
        X: Images (B, 1, 28, 28).
        y: Class indices (B,).
        device_params: The weights of each replica, changed in place.
        devices: The device of each replica.
        lr: Learning rate for the mean over the batch.
    """
    X_shards, y_shards = split_batch(X, y, devices)
    losses = [
        F.cross_entropy(lenet(X_shard, params), y_shard, reduction="sum")
        for X_shard, y_shard, params in zip(X_shards, y_shards, device_params, strict=True)
    ]
    for loss in losses:
        loss.backward()
    for replicas in zip(*device_params, strict=True):
        allreduce([p.grad for p in replicas])
    for params in device_params:
        sgd(params, lr, len(X))


@torch.no_grad()
def sgd(params: Sequence[Tensor], lr: float, batch_size: int) -> None:
    """Take one SGD step with gradients that are sums over `batch_size` images, and set them to zero."""
    for p in params:
        assert p.grad is not None
        p -= lr * p.grad / batch_size
        p.grad.zero_()


@torch.no_grad()
def predict(
    X: Tensor, device_params: Sequence[Sequence[Tensor]], devices: Sequence[torch.device]
) -> Tensor:
    """Return logits (B, 10) on the first device. The batch is split over the replicas and the outputs are concatenated.

    B need not be divisible by the number of devices. The form is that of Keras's `multi_gpu_model`.
    """
    shards = [
        part.to(device) for part, device in zip(X.tensor_split(len(devices)), devices, strict=True)
    ]
    outputs = [lenet(shard, params) for shard, params in zip(shards, device_params, strict=True)]
    return torch.cat([output.to(devices[0]) for output in outputs])


class Epoch(NamedTuple):
    """The result of an epoch: its number, from 1, the accuracy on the test split, and the seconds of training alone."""

    epoch: int
    accuracy: float
    seconds: float


def train(
    devices: Sequence[torch.device],
    batch_size: int,
    lr: float,
    num_epochs: int,
    *,
    root: Path,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
) -> Iterator[Epoch]:
    """Train LeNet on Fashion-MNIST and yield the result of each epoch. No image is skipped.

    Args:
        devices: One replica is on each. The same device may occur several times.
        batch_size: The global batch size.
        lr: Learning rate for the mean over the batch.
        num_epochs: Passes over the training split.
        root: Folder of the data set; see `datasets.fashion_mnist`.
        dtype: Precision of weights and arithmetic.
        seed: Seed of the initial weights and of the order of images, which is the same for any number of devices.

    Raises:
        ValueError: A batch, or the last, smaller batch of an epoch, is not divisible by the number of devices. Or
            weights are no longer finite after an epoch.
    """
    from finetune.data.datasets.fashion_mnist import read
    from finetune.data.samplers import train_order

    X, y = map(torch.from_numpy, read(root, is_train=True))
    X_test, y_test = map(torch.from_numpy, read(root, is_train=False))
    params = init_params(seed, dtype)
    device_params = [get_params(params, device) for device in devices]
    for epoch in range(1, num_epochs + 1):
        synchronize(devices)
        start = time.perf_counter()
        for indices in torch.from_numpy(train_order(len(X), seed, epoch - 1)).split(batch_size):
            train_batch(scale(X[indices], dtype), y[indices], device_params, devices, lr)
        synchronize(devices)
        seconds = time.perf_counter() - start
        if not all(p.isfinite().all() for p in device_params[0]):
            raise ValueError(
                f"lr {lr} is too high: weights are no longer finite after epoch {epoch}"
            )
        logits = [
            predict(scale(pixels, dtype), device_params, devices).cpu()
            for pixels in X_test.split(batch_size)
        ]
        yield Epoch(epoch, float((torch.cat(logits).argmax(1) == y_test).double().mean()), seconds)


def scale(pixels: Tensor, dtype: torch.dtype) -> Tensor:
    """Return pixels (B, 28, 28) uint8 as (B, 1, 28, 28) in [0, 1]."""
    return pixels.unsqueeze(1).to(dtype) / 255


def synchronize(devices: Sequence[torch.device]) -> None:
    """Wait until every device has finished its work, so that timings are right. A CPU needs no wait."""
    for device in set(devices):
        if device.type != "cpu":
            torch.accelerator.synchronize(device)
