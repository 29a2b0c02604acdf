"""A checkpoint as a function: pictures in, probabilities out."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import albumentations as A
import numpy as np
import torch
from torch import Tensor

from finetune.data.transforms import eval_transform, preparation
from finetune.inference.class_activation import mean_activation
from finetune.inference.onnx_network import OnnxNetwork, put_exported
from finetune.models.ensemble import member_label
from finetune.models.image_classifier import build_image_classifier
from finetune.models.size_check import check_first_pass
from finetune.runs.checkpoint_io import read_checkpoint
from finetune.system.messages import WrongUsage
from finetune.training.calibration import check_finite_rows, read_calibration
from finetune.training.checkpoint_settings import model_settings
from finetune.training.compile import in_bf16
from finetune.training.precision import automatic_precision

_TRUE = {
    "32-true": torch.float32,
    "64-true": torch.float64,
    "bf16-true": torch.bfloat16,
    "16-true": torch.float16,
}
_MIXED = {"bf16-mixed": torch.bfloat16, "16-mixed": torch.float16}


class Predictor:
    """A classifier out of a checkpoint, which prepares pictures as its training has evaluated them.

    Args:
        ckpt_path: A checkpoint of `finetune fit`, or a file that `finetune export` made of one.
        device: Where it computes.
        precision: As `trainer.precision` of `finetune predict`; null for what that would take on such a device.
        checkpoint: What `read_checkpoint` has read of it, where that was done already.

    Attributes:
        path: The checkpoint, or the file.
        model: The image classifier, in eval mode.
        device: Where it is.
        precision: What it computes in.
        image_size: Side in pixels of what the network sees.
        preparation: How a picture is brought to that: arguments of `eval_transform`.
        batch_size: How many pictures `finetune predict` answers at once unless it is told another number: their number
            decides about the last bits.
        calibration: How its logits are read.
        class_names: What each column of the probabilities is called.
        backbone: The name of its network.
        num_members: Number of networks.
        network_name: The backbone, of an ensemble with how many there are.
        versions: Of what made the checkpoint, by name.

    Raises:
        FileNotFoundError: There is no such file.
        ValueError: It is no checkpoint of ours, or its network can't take pictures of its size.
        WrongUsage: There is no such precision.
    """

    def __init__(
        self,
        ckpt_path: str | Path,
        device: str | torch.device = "cpu",
        precision: str | None = "32-true",
        checkpoint: dict[str, Any] | None = None,
    ) -> None:
        checkpoint = read_checkpoint(ckpt_path) if checkpoint is None else checkpoint
        self.path, data = str(ckpt_path), checkpoint["datamodule_hyper_parameters"]
        self.preparation = preparation(data)
        self.image_size: int = self.preparation["image_size"]
        self.batch_size: int = data.get("batch_size", 64)
        self._transforms: dict[int, A.Compose] = {}
        self.device = torch.device(device)
        kind = "cuda" if self.device.type == "cuda" else "cpu"
        self.precision = precision or automatic_precision(kind, checkpoint, is_resumed=False)
        # which a Trainer, too, takes for this on a CPU
        if kind == "cpu" and self.precision == "16-mixed":
            self.precision = "bf16-mixed"
        if self.precision not in (*_TRUE, *_MIXED):
            raise WrongUsage(
                f"precision {self.precision!r}: valid are {', '.join((*_TRUE, *_MIXED))}"
            )
        settings = model_settings(checkpoint)
        self.class_names: list[str] = settings["class_names"]
        self.backbone: str = settings["backbone"]
        self.num_members: int = settings.get("members", 1)
        self.network_name = member_label(self.backbone, self.num_members)
        self.model = build_image_classifier(
            self.backbone,
            len(self.class_names),
            settings.get("network_size"),
            members=self.num_members,
        ).eval()
        # A copy of the network that a program trains further has the same frozen stages.
        self.model.freeze(settings.get("freeze"))
        # before there are weights: float64 would be rounded to float32
        self.model.to(_TRUE.get(self.precision))
        put_exported(self.model, checkpoint)
        if isinstance(self.model.network, OnnxNetwork):
            if precision not in (None, "32-true"):
                raise WrongUsage(
                    f"precision {precision!r}: an .onnx computes as it was exported: leave it out"
                )
            self.precision = "32-true" if self.precision in _MIXED else self.precision
        try:
            self.model.load_checkpoint_state(checkpoint["state_dict"])
        except RuntimeError as error:  # with all names that are too many or too few
            raise ValueError(
                f"{str(ckpt_path)!r} does not hold the weights of {self.backbone}"
            ) from error
        check_first_pass(self.model, self.backbone, self.image_size)
        self.model.to(self.device)
        if self.precision == "bf16-mixed":
            self.model.eval_forward = in_bf16(self.model.network).forward
        self.calibration = read_calibration(checkpoint)
        self.versions = {
            "finetune": checkpoint["finetune"]["version"],
            "torch": checkpoint["finetune"]["torch"],
        }

    def prepare(self, picture: np.ndarray, side: int | None = None) -> np.ndarray:
        """Bring a picture (H, W, 3) uint8 RGB to the part and size that the network sees, or to another size.

        Returns:
            (side, side, 3) uint8.
        """
        size = side or self.image_size
        if size not in self._transforms:  # making one takes longer than most pictures do
            self._transforms[size] = eval_transform(**{**self.preparation, "image_size": size})
        return self._transforms[size](image=picture)["image"]

    def __call__(self, pictures: Sequence[np.ndarray]) -> np.ndarray:
        """Return the probability of each class, (N, K) float64, for N pictures (H, W, 3) uint8 RGB of any sizes.

        Raises:
            NotFinite: Some are not finite numbers.
        """
        probabilities = self.classify(np.stack([self.prepare(picture) for picture in pictures]))
        self.check(probabilities)
        return probabilities

    def classify(self, images: np.ndarray) -> np.ndarray:
        """Return the probability of each class, (N, K) float64, for prepared pictures (N, h, w, 3) uint8 RGB.

        They are as the network computes them, finite or not: `decide` checks them.
        """
        dtype = _MIXED.get(self.precision)
        with torch.no_grad(), torch.autocast(self.device.type, dtype, enabled=dtype is not None):
            logits = self.model(self._pixels(images))
        return self.calibration.probabilities(logits).cpu().numpy()

    def check(self, probabilities: np.ndarray, names: Sequence[object] | None = None) -> None:
        """Make sure that probabilities (N, K) are finite numbers.

        Args:
            probabilities: Of N pictures.
            names: What an error calls each.

        Raises:
            NotFinite: Some are not.
        """

        def name_of(row: int) -> object:
            return f"picture {row}" if names is None else names[row]

        check_finite_rows(torch.from_numpy(probabilities), name_of, self.path, self.precision)

    def decide(
        self, probabilities: np.ndarray, names: Sequence[object] | None = None
    ) -> np.ndarray:
        """Return the index of the predicted class (N,), by the checkpoint's threshold if it has one.

        Args:
            probabilities: Of N pictures, (N, K).
            names: What an error calls each.

        Raises:
            NotFinite: Some probabilities are not finite numbers.
        """
        self.check(probabilities, names)
        return self.calibration.decide(torch.from_numpy(probabilities)).numpy()

    def activation(self, images: np.ndarray, classes: Sequence[int]) -> np.ndarray | None:
        """Return where the network saw a class in each prepared picture (N, h, w, 3); see `mean_activation`."""
        if isinstance(self.model.network, OnnxNetwork):
            return None  # only its answer can be had
        with torch.no_grad():
            x = self.model.normalized(self._pixels(images))
        return mean_activation(self.model.members, x, classes)

    def _pixels(self, images: np.ndarray) -> Tensor:
        return torch.from_numpy(images).to(self.device).permute(0, 3, 1, 2)


def device_named(name: str) -> torch.device:
    """Return the device that `auto`, `cpu`, `cuda` or `cuda:1` means here.

    Raises:
        WrongUsage: There is no such.
    """
    has_gpu = torch.cuda.is_available()
    if name == "auto":
        return torch.device("cuda" if has_gpu else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise WrongUsage(f"device {name!r}: auto, cpu, cuda or cuda:1") from error
    if device.type != "cpu" and not (device.type == "cuda" and has_gpu):
        raise WrongUsage(f"device {name!r}: there is no such device here; auto takes what there is")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise WrongUsage(f"device {name!r}: there are {torch.cuda.device_count()} GPUs here")
    return device
