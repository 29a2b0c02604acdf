"""A checkpoint in a Python program: `load` it, then `predict`, `embed`, `test` or `export`."""

import os
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import torch

from finetune.api.image_inputs import ImageInput, iterate_images, pixels
from finetune.api.program_process import check_not_forked
from finetune.data.decode import DecodeError
from finetune.inference.onnx_network import ExportedNetwork
from finetune.inference.predictor import Predictor, device_named
from finetune.models.image_classifier import ImageClassifier
from finetune.models.stages import head, without_head
from finetune.runs.run_checkpoint import checkpoint_of
from finetune.system.machine import num_cores
from finetune.system.messages import shown
from finetune.training.prediction import Prediction

# Shapes: N images, B images per batch, H and W pixels, D features, K classes.

_NUM_SHOWN = 8  # classes


class _Input(NamedTuple):
    """An image that a program has passed.

    Attributes:
        position: Its position among the images that were passed.
        name: Its name in error messages.
        source: The image as it was passed; each file of a folder or glob as its path.
    """

    position: int
    name: str
    source: ImageInput


class LoadedModel(Predictor):
    """A classifier that predicts; several threads may use it at the same time.

    Args:
        path: A checkpoint, a run's folder (its best checkpoint), a file of `finetune export`, or hf://OWNER/NAME.
        device: The device to compute on: auto, cpu, cuda or cuda:1.

    Attributes:
        path: The checkpoint, or the file.
        class_names: The classes, in the order of the network's outputs.
        image_size: Side in pixels of the network's input.
    """

    def __init__(self, path: str | os.PathLike[str], device: str = "auto") -> None:
        checkpoint_path, _ = checkpoint_of(os.path.expanduser(os.fspath(path)))
        super().__init__(checkpoint_path, device_named(device), None)
        self._pid = os.getpid()

    def predict(
        self,
        images: ImageInput | Iterable[ImageInput],
        *,
        on_bad_image: Literal["error", "skip"] = "error",
        abstain_below: float = 0.0,
        coverage: float | None = None,
        none_below: float = 0.0,
    ) -> list[Prediction]:
        """Predict the class or the labels of each image, as `finetune predict` does.

        On a GPU the command multiplies float32 in TF32. This does so only after the program has called
        `torch.set_float32_matmul_precision("high")`.

        Args:
            images: One or several of: the path of an image, a folder, a glob or a .txt file with a path on each
                line; the bytes of an image file; a PIL image; an RGB array (H, W, 3) or a grey one (H, W), uint8.
            on_bad_image: `error` raises at an image that cannot be decoded; `skip` skips it, and `index` gives the
                positions of the others.
            abstain_below: Predict `unsure` where the class has a lower probability than this, from 0 to 1.
            coverage: Also predict a `set` of classes, which has the true one for this share of images, in (0, 1).
            none_below: Predict `none` where the image is less familiar than this share of the validation images.

        Returns:
            A list with a prediction for each image, in order, also for a single image.

        Raises:
            FileNotFoundError: An image does not exist, or a folder has none.
            TypeError: An item is not an image.
            ValueError: An image cannot be decoded, an array is not an image, or a probability is not a finite number.
            RuntimeError: The process was forked from the one that loaded the model, where torch would wait forever.
        """
        rule = replace(
            self.rule, coverage=coverage, abstain_below=abstain_below, none_below=none_below
        )
        predictions: list[Prediction] = []
        for inputs, prepared in self._batches(images, on_bad_image):
            scores = self.scores(prepared, rule)
            self.check(scores.probabilities.numpy(), [one.name for one in inputs])
            for one, prediction in zip(inputs, scores, strict=True):
                path = one.source if isinstance(one.source, str) else None
                predictions.append(replace(prediction, path=path, index=one.position))
        return predictions

    def embed(
        self,
        images: ImageInput | Iterable[ImageInput],
        *,
        on_bad_image: Literal["error", "skip"] = "error",
    ) -> np.ndarray:
        """Compute the features of each image: the input of the network's last linear layer, in float32.

        Args:
            images: As for `predict`.
            on_bad_image: `error` raises at an image that cannot be decoded; `skip` omits its row.

        Returns:
            Features (N, D) float32, in the order of the images; those of an ensemble's members are concatenated.

        Raises:
            ValueError: The model is an .onnx file, which has no features; or as for `predict`.
        """
        parts = self._without_heads
        rows = [
            np.empty((0, sum(head(one).in_features for one in self.network.members)), np.float32)
        ]
        for _, prepared in self._batches(images, on_bad_image):
            x = self.pixels(prepared)
            with torch.no_grad():
                features = torch.cat([part(x).flatten(1) for part in parts], dim=1)
            rows.append(features.float().cpu().numpy())
        return np.concatenate(rows)

    @cached_property
    def _without_heads(self) -> list[ImageClassifier]:
        """The members of the network without their heads, from images to features. They share its weights."""
        model = self.network
        return [
            ImageClassifier(without_head(member), model.mean, model.std).eval()
            for member in model.members
        ]

    @cached_property
    def network(self) -> ImageClassifier:
        """The network as a plain module in eval mode: images (B, 3, H, W) uint8 RGB to logits (B, K).

        Normalization is inside; resizing and cropping to `image_size` are not. The weights are those that `predict`
        uses, on the same device: train a `copy.deepcopy` of it. Logits are not calibrated.

        Raises:
            ValueError: The model is an .onnx file, which torch cannot run.
        """
        model = self.model
        if isinstance(model.network, ExportedNetwork):
            raise ValueError(
                f"{self.path} has no torch network: load the checkpoint that it was exported from"
            )
        return ImageClassifier(model.network, model.mean, model.std).eval()

    def test(
        self,
        folder: str | os.PathLike[str] | None = None,
        *,
        batch: int | None = None,
        workers: int | str | None = None,
        out: str | os.PathLike[str] | None = None,
        coverage: float | None = None,
    ) -> dict[str, Any]:
        """Measure the model on labelled images: `finetune test` in Python, on the device of this model.

        Like the command, it writes a new folder `test/version_N` beneath `out`, and excludes or refuses images that
        the model was trained on.

        Args:
            folder: Its `test/`, or all its class folders; None for the data that the model was trained on.
            batch: Images per batch; None for the batch size of training.
            workers: Processes that read images, or `auto`.
            out: Folder of runs; None for `runs`.
            coverage: Also measure prediction sets for this share of images: `sets` in the result.

        Returns:
            The content of test.json: `test/accuracy`, `confusion_matrix` and so on, and the same of groups in `groups`.

        Raises:
            ValueError: The error message of the command, in one line.
            FileNotFoundError: The same, if the folder does not exist.
        """
        # imports Lightning's command line, which predicting does not need
        from finetune.api.python_fit import run_test

        return run_test(
            self.path,
            folder,
            self.device,
            {"batch": batch, "workers": workers, "out": out, "coverage": coverage},
        )

    def export(
        self,
        target: str | os.PathLike[str] = "onnx",
        *,
        verify_on: str | os.PathLike[str] | None = None,
        quantize: str | os.PathLike[str] | None = None,
    ) -> Path:
        """Write the model as a file for other programs, and return its path: `finetune export` in Python.

        Args:
            target: A format, `onnx`, `safetensors` or `timm`, for a file or folder next to the checkpoint; or a path
                with the suffix .onnx, .safetensors or .timm.
            verify_on: An image, folder, glob or text file of paths to compare the file with the network on.
            quantize: An image folder to calibrate an .onnx in int8 on.

        Raises:
            ValueError: The format is unknown, or the outputs of the file differ from those of the network.
        """
        from finetune.commands.export import export
        from finetune.inference.exporters import format_of
        from finetune.settings.all_commands import ExportSettings

        name = os.path.expanduser(os.fspath(target))
        format = format_of(name)
        output = None if name == format else name
        settings = ExportSettings(
            ckpt_path=str(self.path),
            format=format,  # type: ignore[arg-type]
            output=output,
            verify_on=None if verify_on is None else os.fspath(verify_on),
            quantize=None if quantize is None else os.fspath(quantize),
        )
        return export(settings)

    def _batches(
        self, images: ImageInput | Iterable[ImageInput], on_bad_image: str
    ) -> Iterator[tuple[list[_Input], np.ndarray]]:
        """Yield the images in batches, prepared (B, h, w, 3). With `skip`, those that cannot be decoded are omitted."""
        check_not_forked(self._pid)
        if on_bad_image not in ("error", "skip"):
            raise ValueError(f"on_bad_image must be 'error' or 'skip', not {on_bad_image!r}")

        def prepared(one: _Input) -> np.ndarray | None:
            try:
                return self.prepare(pixels(one.source, one.name))
            except DecodeError:
                if on_bad_image == "error":
                    raise
                return None

        inputs = [_Input(i, *one) for i, one in enumerate(iterate_images(images))]
        with ThreadPoolExecutor(num_cores()) as threads:
            for start in range(0, len(inputs), self.batch_size):
                batch = inputs[start : start + self.batch_size]
                both = zip(batch, threads.map(prepared, batch), strict=True)
                good = [(one, image) for one, image in both if image is not None]
                if good:
                    yield [one for one, _ in good], np.stack([image for _, image in good])

    def __repr__(self) -> str:
        names = [shown(name) for name in self.class_names[:_NUM_SHOWN]]
        names += ["…"] if len(self.class_names) > _NUM_SHOWN else []
        network = f"{self.network_name} at {self.image_size} pixels"
        calibration = "; ".join(self.calibration.describe(self.class_names))
        return f"<{self.path}: {network}, {len(self.class_names)} classes ({', '.join(names)}); {calibration}>"


def load(path: str | os.PathLike[str], device: str = "auto") -> LoadedModel:
    """Load a classifier to predict with.

    Args:
        path: A checkpoint, a run or its folder (its best checkpoint), an .onnx or .safetensors file of
            `finetune export`, or a model on the Hugging Face hub: hf://OWNER/NAME or hf://OWNER/NAME@REVISION.
        device: The device to compute on: a GPU if there is one (`auto`), or `cpu`, `cuda`, `cuda:1`.

    Raises:
        FileNotFoundError: The file does not exist.
        OSError: The model on the hub cannot be downloaded.
        ValueError: The file is not a checkpoint of finetune, or the folder has none.
        WrongUsage: The device does not exist.
    """
    return LoadedModel(path, device)
