"""A checkpoint in a program of one's own: `load` it, then `predict` pictures, from files or from memory."""

import os
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, TypeAlias

import numpy as np
import torch
from PIL import Image

from finetune.data.decode import DecodeError, decode, quiet, rgb_pixels
from finetune.data.readers import files_to_predict
from finetune.inference.predictor import Predictor, device_named
from finetune.runs.predictions import UNSURE
from finetune.runs.run_checkpoint import checkpoint_of
from finetune.system.machine import num_cores
from finetune.system.messages import shown

# A path (also of a folder, a glob, or a .txt file with paths), the content of a picture's file, or pixels.
Picture: TypeAlias = str | os.PathLike[str] | bytes | Image.Image | np.ndarray

_NUM_SHOWN = 8  # classes


@dataclass(frozen=True)
class Prediction:
    """What is said of one picture.

    Attributes:
        label: The class that is said; `unsure` where it is less probable than `abstain_below`.
        probability: Of that class; where it is unsure, of the one that would have been said.
        probabilities: Of each class, by name, in the order of `class_names`.
        path: The picture's file, where it came from one.
        index: The picture's place among those that were asked for, a folder's or glob's files counted each.
    """

    label: str
    probability: float
    probabilities: dict[str, float] = field(hash=False)
    path: str | None = None
    index: int = 0

    @property
    def unsure(self) -> bool:
        """Whether no class is said."""
        return self.label not in self.probabilities


class LoadedModel:
    """A classifier ready to be asked; several threads may ask it at once.

    Args:
        path: A checkpoint, a run's folder (its best one), or a file of `finetune export`.
        device: Where it computes: auto, cpu, cuda or cuda:1.

    Attributes:
        path: The checkpoint, or the file.
        class_names: The classes, in the order of the network's answers.
        image_size: Side in pixels of what the network sees.
        predictor: What computes: the network, how pictures are prepared and how its logits are read.
    """

    def __init__(self, path: str | os.PathLike[str], device: str = "auto") -> None:
        found, _ = checkpoint_of(os.path.expanduser(os.fspath(path)))
        self.path, self.predictor = Path(found), Predictor(found, device_named(device), None)
        self._pid = os.getpid()
        self.class_names, self.image_size = list(self.predictor.class_names), self.predictor.image_size

    def predict(
        self,
        pictures: Picture | Iterable[Picture],
        *,
        on_bad_image: Literal["error", "skip"] = "error",
        abstain_below: float = 0.0,
    ) -> list[Prediction]:
        """Say what is in each picture, as `finetune predict` does.

        On a GPU the command multiplies float32 in TF32; this does so where the program has called
        `torch.set_float32_matmul_precision("high")`, and else in full.

        Args:
            pictures: One or several of: the path of a picture, a folder, a glob or a .txt file with a path on each
                line; the bytes of a picture's file; a PIL image; an array (H, W, 3) or, in grey, (H, W) uint8, RGB.
            on_bad_image: `error` raises at one that can't be decoded; `skip` leaves it out: the `index` of the others
                says which they are.
            abstain_below: Say `unsure` where the class is less probable than that, from 0 to 1.

        Returns:
            One for each picture, in order; of one picture a list, too.

        Raises:
            FileNotFoundError: There is no such picture, or none in a folder.
            TypeError: Something is no picture.
            ValueError: A picture can't be decoded, an array is none, or a probability is not a finite number.
            RuntimeError: The process was forked from the one that has loaded it, and would wait for ever.
        """
        check_not_forked(self._pid)
        if on_bad_image not in ("error", "skip"):
            raise ValueError(f"on_bad_image must be 'error' or 'skip', not {on_bad_image!r}")
        if not 0 <= abstain_below <= 1:
            raise ValueError(f"abstain_below must be from 0 to 1, not {abstain_below}")
        if abstain_below and UNSURE in self.class_names:
            raise ValueError(f"abstain_below would say {UNSURE}, which is one of the classes: leave it out")
        given, said, at_once = list(_each(pictures)), list[Prediction](), self.predictor.batch_size
        with ThreadPoolExecutor(num_cores()) as threads:
            for start in range(0, len(given), at_once):
                some = given[start : start + at_once]
                images = threads.map(lambda one: self._prepared(one[0], one[1], on_bad_image), some)
                places = range(start, start + len(some))
                good = [
                    (i, name, picture, image)
                    for i, (name, picture), image in zip(places, some, images, strict=True)
                    if image is not None
                ]
                if good:
                    said += self._said(good, abstain_below)
        return said

    def _prepared(self, name: str, picture: Picture, on_bad_image: str) -> np.ndarray | None:
        try:
            return self.predictor.prepare(_pixels(picture, name))
        except DecodeError:
            if on_bad_image == "error":
                raise
            return None

    def _said(self, good: list[tuple[int, str, Picture, np.ndarray]], abstain_below: float) -> Iterator[Prediction]:
        answers = self.predictor.classify(np.stack([image for *_, image in good]))
        chosen = self.predictor.decide(answers, [name for _, name, *_ in good])
        for (i, _, picture, _), values, k in zip(good, answers.tolist(), chosen.tolist(), strict=True):
            label = self.class_names[k] if values[k] >= abstain_below else UNSURE
            path = picture if isinstance(picture, str) else None
            yield Prediction(label, values[k], dict(zip(self.class_names, values, strict=True)), path, i)

    def __repr__(self) -> str:
        names = [shown(name) for name in self.class_names[:_NUM_SHOWN]]
        names += ["…"] if len(self.class_names) > _NUM_SHOWN else []
        network = f"{self.predictor.network_name} at {self.image_size} pixels"
        told = "; ".join(self.predictor.calibration.told(self.class_names))
        return f"<{self.path}: {network}, {len(self.class_names)} classes ({', '.join(names)}); {told}>"


def load(path: str | os.PathLike[str], device: str = "auto") -> LoadedModel:
    """Load a classifier to predict with.

    Args:
        path: A checkpoint, a run or its folder (its best checkpoint), or an .onnx or .safetensors file of
            `finetune export`.
        device: Where it computes: a GPU if there is one (`auto`), or `cpu`, `cuda`, `cuda:1`.

    Raises:
        FileNotFoundError: There is no such file.
        ValueError: It is no checkpoint of ours, or a folder without one.
        WrongUsage: There is no such device.
    """
    return LoadedModel(path, device)


def check_not_forked(pid: int) -> None:
    """Make sure that torch can compute here: the threads of the process that was forked are not in its children.

    Args:
        pid: The process that has computed.

    Raises:
        RuntimeError: This is another one, and torch would wait for threads.
    """
    if os.getpid() != pid and torch.get_num_threads() > 1:
        raise RuntimeError(
            "this process was forked, and torch would wait for ever for threads that are not in it: call "
            "torch.set_num_threads(1) before, or start processes by spawn"
        )


def _each(pictures: object) -> Iterator[tuple[str, Picture]]:
    """Yield what errors call each picture, and the picture, its file's path as text."""
    is_one = isinstance(pictures, (str, os.PathLike, bytes, bytearray, memoryview, Image.Image, np.ndarray))
    several: Iterable[object] = [pictures] if is_one or not isinstance(pictures, Iterable) else pictures
    for i, picture in enumerate(several):
        name = "the picture" if is_one else f"pictures[{i}]"
        if isinstance(picture, (str, os.PathLike)):
            for path in files_to_predict(os.fsdecode(picture)):
                yield path, path
        elif isinstance(picture, (bytes, bytearray, memoryview)):
            yield name, bytes(picture)
        elif isinstance(picture, Image.Image):
            yield name, picture
        elif isinstance(picture, np.ndarray):
            yield name, _checked(picture, name)
        else:
            raise TypeError(_no_picture(name, picture))


def _no_picture(name: str, given: object) -> str:
    kind = f"{type(given).__module__}.{type(given).__qualname__}".removeprefix("builtins.")
    return f"{name} is of type {kind}: give a path, a file's bytes, a PIL image, or an array (H, W, 3) uint8 RGB"


def _checked(array: np.ndarray, name: str) -> np.ndarray:
    is_picture = array.ndim == 2 or (array.ndim == 3 and array.shape[2] == 3)
    if array.dtype != np.uint8 or not is_picture or not array.size:
        hint = "; of several give a list" if array.ndim == 4 else ""
        raise ValueError(
            f"{name} is an array of {array.dtype} and shape {array.shape}: a picture is uint8 of shape (height, width, "
            f"3) in RGB, or (height, width) in grey{hint}"
        )
    return array


def _pixels(picture: Picture, name: str) -> np.ndarray:
    """Return a picture's pixels (H, W, 3) as `decode` would read them of its file."""
    if isinstance(picture, np.ndarray):
        return np.ascontiguousarray(picture if picture.ndim == 3 else np.repeat(picture[:, :, None], 3, axis=2))
    if isinstance(picture, Image.Image):
        quiet()
        try:
            if not picture.width * picture.height:
                raise ValueError("it has no pixels")
            return rgb_pixels(picture, is_ours=False)
        except Exception as error:  # of a file that is opened, but not read yet: any, as in `decode`
            raise DecodeError(f"{name}: can't be decoded: {' '.join(str(error).split())}") from error
    return decode(picture, name)
