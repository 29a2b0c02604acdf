"""The images on which an export is compared with its checkpoint, and the result in words."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np

from finetune.data.decode import decode
from finetune.data.prediction_paths import files_to_predict
from finetune.data.samplers import SHEET, draw_indices
from finetune.inference.export_check import Agreement, drawn_image
from finetune.inference.predictor import Predictor

_MAX_VERIFIED = 64


@dataclass(frozen=True)
class VerificationImages:
    """Images on which a file is compared with its checkpoint.

    Attributes:
        readers: A function for each image that reads it, (H, W, 3) uint8 RGB.
        description: The images in a message, after their number.
    """

    readers: Sequence[Callable[[], np.ndarray]]
    description: str

    def prepared(self, predictor: Predictor) -> np.ndarray:
        """Return the images as the network takes them, (N, h, w, 3) uint8."""
        return np.stack([predictor.prepare(read()) for read in self.readers])


def images_to_verify(verify_on: str | None, num: int = _MAX_VERIFIED) -> VerificationImages:
    """Return at most `num` images.

    Args:
        verify_on: An image, a folder, a glob or a text file of paths; None for synthetic images.
        num: The number of images.
    """
    if verify_on is None:
        readers = [partial(drawn_image, seed) for seed in range(num)]
        return VerificationImages(readers, "synthetic images")
    paths = files_to_predict(verify_on)
    chosen = np.sort(draw_indices(len(paths), num, SHEET))
    word = "image" if len(paths) == 1 else "images"
    readers = [partial(decode, paths[int(i)]) for i in chosen]
    return VerificationImages(readers, f"{word} of {verify_on}")


def check_agreement(agreement: Agreement, kind: str, images: str) -> None:
    """Discard an export that does not predict as its checkpoint.

    Args:
        agreement: The result of the comparison.
        kind: What was exported, for the message.
        images: The description of the images, for the message.

    Raises:
        ValueError: The probabilities or the classes differ.
    """
    if not agreement.is_good:
        differs = f"a probability differs by {agreement.largest:.1e}, {agreement.num_other} have other classes"
        where = f"on {agreement.num_images} {images}"
        raise ValueError(
            f"the {kind} was discarded, since it does not predict as the checkpoint: {where} {differs}"
        )


def describe_agreement(agreement: Agreement, images: str, label_kind: str) -> str:
    """Return the result of a comparison that was good, and the times of both."""
    same = "same labels" if label_kind == "several" else "same classes"
    return f"verified against the checkpoint on {agreement.num_images} {images}: {same}, {_differences(agreement)}"


def describe_int8(agreement: Agreement, images: str, label_kind: str) -> str:
    """Return how far the predictions of an int8 file are from the checkpoint's, and the times of both."""
    other = "other labels" if label_kind == "several" else "another class"
    return (
        f"int8, compared with the checkpoint on {agreement.num_images} {images}: {other} for {agreement.num_other}, "
        f"{_differences(agreement)}"
    )


def _differences(agreement: Agreement) -> str:
    checkpoint, file = agreement.milliseconds
    return (
        f"largest difference of a probability {agreement.largest:.1e}; one image takes {checkpoint:.1f} ms with the "
        f"checkpoint, {file:.1f} ms with the file"
    )
