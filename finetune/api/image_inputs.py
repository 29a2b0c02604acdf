"""The kinds of images that a program may pass: a path, the bytes of a file, a PIL image or an array."""

import os
from collections.abc import Iterable, Iterator
from typing import TypeAlias

import numpy as np
from PIL import Image

from finetune.data.decode import decode, decoding, rgb_pixels
from finetune.data.prediction_paths import files_to_predict

# A path (of an image, a folder, a glob, or a .txt file with paths), the bytes of an image file, or pixels.
ImageInput: TypeAlias = str | os.PathLike[str] | bytes | Image.Image | np.ndarray


def iterate_images(images: object) -> Iterator[tuple[str, ImageInput]]:
    """Yield the name of each image for error messages, and the image; a path as text."""
    is_one = isinstance(
        images, (str, os.PathLike, bytes, bytearray, memoryview, Image.Image, np.ndarray)
    )
    items: Iterable[object] = [images] if is_one or not isinstance(images, Iterable) else images
    for i, image in enumerate(items):
        name = "the image" if is_one else f"images[{i}]"
        if isinstance(image, (str, os.PathLike)):
            for path in files_to_predict(os.fsdecode(image)):
                yield path, path
        elif isinstance(image, (bytes, bytearray, memoryview)):
            yield name, bytes(image)
        elif isinstance(image, Image.Image):
            yield name, image
        elif isinstance(image, np.ndarray):
            yield name, _checked(image, name)
        else:
            raise TypeError(_unsupported_type_message(name, image))


def _unsupported_type_message(name: str, value: object) -> str:
    kind = f"{type(value).__module__}.{type(value).__qualname__}".removeprefix("builtins.")
    return f"{name} is of type {kind}: pass a path, a file's bytes, a PIL image, or an array (H, W, 3) uint8 RGB"


def _checked(array: np.ndarray, name: str) -> np.ndarray:
    is_image = array.ndim == 2 or (array.ndim == 3 and array.shape[2] == 3)
    if array.dtype != np.uint8 or not is_image or not array.size:
        hint = "; pass several as a list" if array.ndim == 4 else ""
        raise ValueError(
            f"{name} is an array of {array.dtype} and shape {array.shape}: an image is uint8 of shape (height, width, "
            f"3) in RGB, or (height, width) in grey{hint}"
        )
    return array


def pixels(image: ImageInput, name: str) -> np.ndarray:
    """Return the pixels of an image (H, W, 3) uint8, as `decode` returns them for its file."""
    if isinstance(image, np.ndarray):
        return np.ascontiguousarray(
            image if image.ndim == 3 else np.repeat(image[:, :, None], 3, axis=2)
        )
    if isinstance(image, Image.Image):
        with decoding(name):  # PIL reads the file only now
            if not image.width * image.height:
                raise ValueError("it has no pixels")
            return rgb_pixels(image)
    return decode(image, name)
