"""The features of image files: the output of a pretrained network without its head, outside of training."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from finetune.data.image_files import file_stats
from finetune.data.mirror import Ahead
from finetune.data.samples import PathList, Samples
from finetune.data.targets import ClassIndex
from finetune.data.transforms import eval_transform
from finetune.models.image_classifier import (
    ImageClassifier,
    build_image_classifier,
    check_first_pass,
)
from finetune.models.stages import head_name
from finetune.models.weights import load_pretrained
from finetune.system.machine import num_cores

# Shapes: B images per batch, D features.

_BATCH_SIZE = 64  # of images of 224 x 224 pixels


class Features(nn.Module):
    """A network without its head, in eval mode: (B, 3, H, W) uint8 to (B, D).

    Args:
        backbone: Name of the network.
        weights: Its weights, as in `--model.weights`.
        image_size: Side of the images in pixels; None for that of the weights, which is not checked.

    Raises:
        ValueError: The network does not take images of this size, or there are no such weights.
    """

    def __init__(self, backbone: str, weights: str, image_size: int | None = None) -> None:
        super().__init__()
        model = build_image_classifier(backbone, 2, image_size)
        load_pretrained(model, weights, backbone, image_size)
        if image_size is not None:
            check_first_pass(model, backbone, image_size)
        network = model.network
        network.set_submodule(head_name(network), nn.Identity())
        fused = fuse_batch_norm(network.eval()).to(memory_format=torch.channels_last)
        self.model = ImageClassifier(fused, model.mean, model.std)
        self.eval()

    @torch.inference_mode()
    def forward(self, images: Tensor) -> Tensor:
        return self.model(images).flatten(1)


def fuse_batch_norm(part: nn.Module) -> nn.Module:
    """Return a copy with batch norm folded into the convolutions before it. It computes the same up to rounding.

    A module that torch.fx can't trace is returned itself.

    Args:
        part: A module in eval mode.
    """
    from torch.fx.experimental.optimization import fuse  # needed here only

    try:
        return fuse(part)
    except Exception:  # networks of timm raise errors of many types when they are traced
        return part


class FeatureNetwork(NamedTuple):
    """A network for features outside of training.

    Attributes:
        name: The network in words.
        features: The network.
        preparation: How images are prepared, as `image_features` takes it.
    """

    name: str
    features: Features
    preparation: Mapping[str, Any]


def image_features(
    network: Features, paths: Sequence[str], preparation: Mapping[str, Any]
) -> Iterator[np.ndarray]:
    """Yield the features of each image, (D,) float32. Images are prepared as in evaluation.

    Args:
        network: The network. It is moved to a GPU if there is one.
        paths: Paths of readable images.
        preparation: Arguments of `eval_transform`.
    """
    transform = eval_transform(**preparation)
    image_size = preparation["image_size"]
    unlabelled = ClassIndex(np.full(len(paths), -1, np.int64), num_classes=0)
    # A large JPEG is decoded at about twice the size anyway.
    samples = Samples(
        PathList(paths), unlabelled, shorter_side=2 * image_size, stats=file_stats(paths)
    )

    def load(index: int) -> np.ndarray:
        return transform(image=samples.read(index))["image"]

    yield from features_of(network, samples, range(len(paths)), load, image_size)


def features_of(
    network: Features,
    samples: Samples,
    indices: Sequence[int],
    load: Callable[[int], np.ndarray],
    image_size: int,
) -> Iterator[np.ndarray]:
    """Yield the features of images, (D,) float32. The next batch of images is read during the computation.

    Files in object storage are copied ahead.

    Args:
        network: The network. It is moved to a GPU if there is one.
        samples: The images.
        indices: Those to use, in this order.
        load: Loads an image as (image_size, image_size, 3) uint8, by its index. Several threads call it.
        image_size: Side of the images in pixels.

    Raises:
        StorageError: Object storage cannot be reached, or a file was replaced.
    """
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    network.to(device)
    # Fewer images per batch if they are large, so that a batch takes about the same memory.
    num = max(1, min(_BATCH_SIZE, _BATCH_SIZE * 224**2 // image_size**2))
    batches = [indices[first : first + num] for first in range(0, len(indices), num)]
    ahead = iter(Ahead(batches, samples.files_to_read))
    with ThreadPoolExecutor(min(num_cores(), 16)) as threads:

        def submit() -> list[Future[np.ndarray]]:
            return [threads.submit(load, index) for index in next(ahead, [])]

        waiting = submit()
        while waiting:
            images = np.stack([future.result() for future in waiting])
            waiting = submit()
            batch = torch.from_numpy(images).permute(0, 3, 1, 2).to(device)
            yield from network(batch).float().cpu().numpy()
