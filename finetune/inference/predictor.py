"""A checkpoint as a function from images to probabilities."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import albumentations as A
import numpy as np
import torch
from torch import Tensor

from finetune.data.transforms import eval_transform, preparation
from finetune.features.familiarity import logits_and_familiarity, read_familiarity
from finetune.inference.class_activation import mean_activation
from finetune.inference.onnx_network import ExportedNetwork, put_exported
from finetune.models.ensemble import member_label
from finetune.models.image_classifier import build_image_classifier, check_first_pass
from finetune.runs.checkpoint_io import read_checkpoint
from finetune.settings.schema import LabelKind
from finetune.system.messages import WrongUsage
from finetune.training.calibration import read_calibration
from finetune.training.finite import check_finite_rows
from finetune.training.precision import automatic_precision
from finetune.training.prediction import DecisionRule, Scores

_TRUE = {
    "32-true": torch.float32,
    "64-true": torch.float64,
    "bf16-true": torch.bfloat16,
    "16-true": torch.float16,
}
_MIXED = {"bf16-mixed": torch.bfloat16, "16-mixed": torch.float16}


class Predictor:
    """A classifier from a checkpoint. It prepares images exactly as training did for validation.

    Args:
        ckpt_path: A checkpoint of `finetune fit`, or a file of `finetune export`.
        device: The device to compute on.
        precision: As `trainer.precision` of `finetune predict`; None for its default on this device.
        checkpoint: The content of the checkpoint, if `read_checkpoint` has read it already.
        coverage: That of prediction sets; None for no sets.

    Attributes:
        path: The checkpoint or exported file.
        model: The image classifier, in eval mode.
        device: The device of the model.
        precision: The precision of the computation.
        image_size: Side of the network's input in pixels.
        preparation: Arguments of `eval_transform`, which prepares an image for the network.
        batch_size: Default batch size of `finetune predict`. The last bits of the results depend on the batch size.
        calibration: Turns logits into probabilities and probabilities into classes.
        familiarity: Tells how much images are like the training images; None if the checkpoint does not know.
        class_names: Names of the columns of the probabilities.
        backbone: The name of the network.
        label_kind: `single` if each image has exactly one class, `several` if it has several labels or none.
        num_members: Number of networks in the ensemble; 1 for a single network.
        head_stages: Number of the network's last stages whose pooled features the head takes.
        network_name: The backbone, for an ensemble with the number of its members.
        versions: Versions of finetune and torch that wrote the checkpoint.

    Raises:
        FileNotFoundError: The file does not exist.
        ValueError: The file is not a checkpoint of finetune, or its network does not support its image size.
        WrongUsage: The precision is not supported.
    """

    def __init__(
        self,
        ckpt_path: str | Path,
        device: str | torch.device = "cpu",
        precision: str | None = "32-true",
        checkpoint: dict[str, Any] | None = None,
        coverage: float | None = None,
    ) -> None:
        checkpoint = read_checkpoint(ckpt_path) if checkpoint is None else checkpoint
        self.path = Path(ckpt_path)
        data = checkpoint["datamodule_hyper_parameters"]
        self.preparation = preparation(data)
        self.image_size: int = self.preparation["image_size"]
        self.batch_size: int = data.get("batch_size", 64)
        self._transforms: dict[int, A.Compose] = {}
        self.device = torch.device(device)
        self.precision = _resolved_precision(precision, self.device, checkpoint)
        settings = checkpoint["hyper_parameters"]
        self.class_names: list[str] = settings["class_names"]
        self.backbone: str = settings["backbone"]
        self.num_members: int = settings.get("members", 1)
        self.label_kind: LabelKind = settings.get("label_kind", "single")
        self.head_stages: int = settings.get("head_stages", 1)
        self.network_name = member_label(self.backbone, self.num_members)
        self.model = build_image_classifier(
            self.backbone,
            len(self.class_names),
            settings.get("network_size"),
            members=self.num_members,
            label_kind=self.label_kind,
            head_stages=self.head_stages,
        ).eval()
        # Programs may copy this network and train it further: it keeps its frozen stages.
        self.model.freeze(settings.get("freeze"))
        # Before the weights are loaded: otherwise float64 weights would be rounded to float32.
        self.model.to(_TRUE.get(self.precision))
        put_exported(self.model, checkpoint)
        if isinstance(self.model.network, ExportedNetwork):
            if precision not in (None, "32-true"):
                raise WrongUsage(
                    f"precision {precision!r}: an exported network computes as it was exported: omit it"
                )
            self.precision = "32-true" if self.precision in _MIXED else self.precision
        try:
            self.model.load_checkpoint_state(checkpoint["state_dict"])
        except RuntimeError as error:  # torch's message lists all missing and unexpected names
            raise ValueError(
                f"{str(ckpt_path)!r} does not hold the weights of {self.backbone}"
            ) from error
        check_first_pass(self.model, self.backbone, self.image_size)
        self.model.to(self.device)
        self.calibration = read_calibration(checkpoint)
        self.familiarity = read_familiarity(checkpoint, self.model.network)
        self.coverage = coverage
        self.versions = {
            "finetune": checkpoint["finetune"]["version"],
            "torch": checkpoint["finetune"]["torch"],
        }

    def prepare(self, image: np.ndarray, side: int | None = None) -> np.ndarray:
        """Crop and resize an image (H, W, 3) uint8 RGB as for the network.

        Args:
            image: The image.
            side: Side of the result in pixels, `image_size` by default.

        Returns:
            (side, side, 3) uint8.
        """
        size = side or self.image_size
        if size not in self._transforms:  # building a transform takes longer than applying it
            self._transforms[size] = eval_transform(**{**self.preparation, "image_size": size})
        return self._transforms[size](image=image)["image"]

    def classify(self, images: np.ndarray) -> np.ndarray:
        """Return the probability of each class, (N, K) float64, for prepared images (N, h, w, 3) uint8 RGB.

        The probabilities may be NaN or infinite. `check` raises an error then.
        """
        return self.scores(images).probabilities.numpy()

    def scores(self, images: np.ndarray, rule: DecisionRule | None = None) -> Scores:
        """Return what the network computes of prepared images (N, h, w, 3) uint8 RGB.

        Args:
            images: The images.
            rule: How they are predicted; None for `rule`.
        """
        dtype = _MIXED.get(self.precision)
        with (
            torch.no_grad(),
            torch.autocast(self.device.type, dtype, enabled=dtype is not None),
        ):
            logits, familiar = logits_and_familiarity(
                self.model, self.pixels(images), self.model.network, self.familiarity
            )
        probabilities = self.calibration.probabilities(logits).cpu()
        return Scores(rule or self.rule, probabilities, familiar)

    @property
    def rule(self) -> DecisionRule:
        """How scores become predictions."""
        return DecisionRule(self.class_names, self.calibration, self.familiarity, self.coverage)

    def check(self, probabilities: np.ndarray, names: Sequence[object] | None = None) -> None:
        """Check that probabilities are finite.

        Args:
            probabilities: Of N images, (N, K).
            names: Names of the images for the error message.

        Raises:
            NotFinite: Some probabilities are not finite.
        """

        def name_of(row: int) -> object:
            return f"image {row}" if names is None else names[row]

        check_finite_rows(torch.from_numpy(probabilities), name_of, self.path, self.precision)

    def activation(self, images: np.ndarray, classes: Sequence[int]) -> np.ndarray | None:
        """Return class activation maps of prepared images (N, h, w, 3), or None; see `mean_activation`."""
        if isinstance(self.model.network, ExportedNetwork):
            return None  # its feature maps are not accessible
        with torch.no_grad():
            x = self.model.normalized(self.pixels(images))
        return mean_activation(self.model.members, x, classes)

    def pixels(self, images: np.ndarray) -> Tensor:
        """Return prepared images (N, h, w, 3) as the input of the model, (N, 3, h, w) on its device."""
        return torch.from_numpy(images).to(self.device).permute(0, 3, 1, 2)


def _resolved_precision(
    precision: str | None, device: torch.device, checkpoint: dict[str, Any]
) -> str:
    """Return the precision to compute in; see `Predictor`.

    Raises:
        WrongUsage: It is not supported.
    """
    kind = "cuda" if device.type == "cuda" else "cpu"
    resolved = precision or automatic_precision(kind, checkpoint, is_resumed=False)
    # as a Trainer does on a CPU
    if kind == "cpu" and resolved == "16-mixed":
        return "bf16-mixed"
    if resolved not in (*_TRUE, *_MIXED):
        valid = ", ".join((*_TRUE, *_MIXED))
        raise WrongUsage(f"precision {resolved!r} is not supported; valid are {valid}")
    return resolved


def device_named(name: str) -> torch.device:
    """Return the device for a name: `auto`, `cpu`, `cuda` or `cuda:1`.

    Raises:
        WrongUsage: This machine has no such device.
    """
    has_gpu = torch.cuda.is_available()
    if name == "auto":
        return torch.device("cuda" if has_gpu else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise WrongUsage(f"device {name!r} is unknown: pass auto, cpu, cuda or cuda:1") from error
    if device.type != "cpu" and not (device.type == "cuda" and has_gpu):
        raise WrongUsage(
            f"device {name!r}: there is no such device on this machine; auto takes an available one"
        )
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise WrongUsage(
            f"device {name!r}: there are {torch.cuda.device_count()} GPUs on this machine"
        )
    return device
