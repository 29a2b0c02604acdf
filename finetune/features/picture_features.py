"""What a network with weights, but without a head, makes of picture files; outside of any training."""

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor, nn

from finetune.data.decode import decode
from finetune.data.transforms import CROP_SHARE, Interpolation, ResizeMode, eval_transform
from finetune.models.fx import fuse_batch_norm
from finetune.models.image_classifier import ImageClassifier, build_image_classifier
from finetune.models.stages import head_name
from finetune.models.weights import load_pretrained
from finetune.system.machine import num_cores

# Shapes: B pictures at once, D features.

_NUM_AT_ONCE = 64
_Item = TypeVar("_Item")


class Features(nn.Module):
    """A network up to its head: (B, 3, H, W) uint8 to (B, D), in eval mode.

    Args:
        backbone: The network.
        weights: What it starts from, as `--model.weights` takes it.
        image_size: Side of the pictures in pixels, where the network holds a position of each patch.
    """

    def __init__(self, backbone: str, weights: str, image_size: int | None = None) -> None:
        super().__init__()
        model = build_image_classifier(backbone, 2, image_size)
        load_pretrained(model, weights, backbone, image_size)
        network = model.network
        network.set_submodule(head_name(network), nn.Identity())
        fused = fuse_batch_norm(network.eval()).to(memory_format=torch.channels_last)
        self.model = ImageClassifier(fused, model.mean, model.std)
        self.eval()

    @torch.inference_mode()
    def forward(self, images: Tensor) -> Tensor:
        return self.model(images).flatten(1)


def picture_features(
    network: Features,
    paths: Sequence[str],
    image_size: int,
    resize: ResizeMode = "shorter_side",
    interpolation: Interpolation = "bilinear",
    crop_share: float = CROP_SHARE,
) -> Iterator[np.ndarray]:
    """Yield the features of each picture, (D,) float32, prepared as in evaluation; the next are read meanwhile.

    Args:
        network: On a GPU if there is one.
        paths: Pictures that can be read.
        image_size: Side in pixels of what the network sees.
        resize: How a picture is brought to it, as in `eval_transform`; the next two, too.
        interpolation: How it is resized.
        crop_share: Share of the resized side that is seen.
    """
    transform = eval_transform(image_size, resize, interpolation, crop_share)

    def prepared(path: str) -> np.ndarray:
        # Twice the size is what a JPEG is decoded at anyway, where it is that large.
        return transform(image=decode(path, shorter_side=2 * image_size))["image"]

    yield from features_of(network, paths, prepared, image_size)


def features_of(
    network: Features,
    items: Sequence[_Item],
    prepared: Callable[[_Item], np.ndarray],
    image_size: int,
) -> Iterator[np.ndarray]:
    """Yield the features of each image, (D,) float32; the next images are read meanwhile.

    Args:
        network: On a GPU if there is one.
        items: What stands for the images, such as paths.
        prepared: Reads one of them, (h, w, 3) uint8, of `image_size`; several threads call it.
        image_size: Side in pixels.
    """
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    network.to(device)
    with ThreadPoolExecutor(min(num_cores(), 16)) as threads:
        # larger ones take as much memory
        num = max(1, min(_NUM_AT_ONCE, _NUM_AT_ONCE * 224**2 // image_size**2))
        parts = [items[first : first + num] for first in range(0, len(items), num)]
        waiting = [threads.submit(prepared, item) for item in parts[0]] if parts else []
        for following in [*parts[1:], []][: len(parts)]:
            images = np.stack([future.result() for future in waiting])
            waiting = [threads.submit(prepared, item) for item in following]
            batch = torch.from_numpy(images).permute(0, 3, 1, 2).to(device)
            yield from network(batch).float().cpu().numpy()
