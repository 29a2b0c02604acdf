"""Writes a network of timm as a folder in timm's own layout, which `timm.create_model` and the Hugging Face hub read.

The head contains the calibration, so softmax or sigmoid of its logits gives the probabilities of `predict`.
"""

import copy
import math
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from finetune.data.transforms import CROP_SHARE, resized_side
from finetune.inference.export_check import PredictionFunction
from finetune.inference.predictor import Predictor
from finetune.models.stages import head
from finetune.models.timm_backbones import is_timm
from finetune.system.messages import WrongUsage
from finetune.training.multilabel_calibration import MultilabelCalibration

# Shapes: N images of h x w pixels, K classes or labels.

TIMM_FILES = ("model.safetensors", "config.json")
DESCRIPTION = "finetune.json"
README = "README.md"
# `data.resize` and the crop_mode of timm
_CROP_MODES = {"shorter_side": "center", "squash": "squash", "whole": "squash"}


def check_supported(predictor: Predictor) -> None:
    """Check that timm supports the network and the preparation of images of a checkpoint.

    Raises:
        WrongUsage: It does not.
    """
    if not is_timm(predictor.backbone):
        reason = f"{predictor.backbone} is not a network of timm"
    elif predictor.num_members > 1:
        reason = f"the checkpoint is an ensemble of {predictor.num_members} networks"
    elif predictor.head_stages > 1:
        reason = f"its head takes the features of {predictor.head_stages} stages (--model.head_stages 1 takes one)"
    elif predictor.preparation["resize"] not in _CROP_MODES:
        reason = f"timm has no resize like --data.resize {predictor.preparation['resize']}"
    else:
        return
    raise WrongUsage(f"--format timm does not support this checkpoint: {reason}")


def write_timm_folder(predictor: Predictor, folder: Path) -> None:
    """Write model.safetensors and config.json.

    Args:
        predictor: The checkpoint, on the CPU; see `check_supported`.
        folder: An existing folder.
    """
    from timm.models import save_for_hf

    network = copy.deepcopy(predictor.model.network).to(memory_format=torch.contiguous_format)
    _put_calibration_into_head(network, predictor)
    config = {
        "label_names": predictor.class_names,
        "num_classes": len(predictor.class_names),
        "pretrained_cfg": _preparation(predictor),
    }
    save_for_hf(network, str(folder), model_config=config, safe_serialization=True)


@torch.no_grad()
def _put_calibration_into_head(network: nn.Module, predictor: Predictor) -> None:
    calibration = predictor.calibration
    linear = head(network)
    if isinstance(calibration, MultilabelCalibration):
        scale = torch.tensor(calibration.scale, dtype=torch.float64)
        shift = torch.tensor(calibration.bias, dtype=torch.float64)
    else:
        scale = torch.full((len(predictor.class_names),), 1 / calibration.temperature).double()
        shift = torch.zeros_like(scale)
    linear.weight.copy_(linear.weight.double() * scale[:, None])
    linear.bias.copy_(linear.bias.double() * scale + shift)


def _preparation(predictor: Predictor) -> dict[str, Any]:
    """Return the preparation of images as timm describes it."""
    size = predictor.image_size
    how = predictor.preparation
    resized = (
        size if how["resize"] == "whole" else resized_side(size, how.get("crop_share", CROP_SHARE))
    )
    share = size / resized
    if math.floor(size / share) != resized:  # how timm computes the resized side
        share = size / (resized + 0.5)
    return {
        "input_size": [3, size, size],
        "interpolation": how.get("interpolation", "bilinear"),
        "crop_pct": share,
        "crop_mode": _CROP_MODES[how["resize"]],
        "mean": (predictor.model.mean.flatten() / 255).tolist(),
        "std": (predictor.model.std.flatten() / 255).tolist(),
    }


def load_timm_folder(folder: Path, label_kind: str) -> PredictionFunction:
    """Return the function that timm's network of a folder computes, from prepared images to probabilities (N, K)."""
    import timm

    network = timm.create_model(f"local-dir:{folder}", pretrained=True).eval()
    config = network.pretrained_cfg
    mean = torch.tensor(config["mean"]).view(3, 1, 1)
    std = torch.tensor(config["std"]).view(3, 1, 1)

    @torch.inference_mode()
    def probabilities(images: np.ndarray) -> np.ndarray:
        pixels = torch.from_numpy(images).permute(0, 3, 1, 2) / 255
        logits = network((pixels - mean) / std)
        if label_kind == "several":
            return logits.sigmoid().numpy()
        return logits.softmax(dim=1).numpy()

    return probabilities


def readme(predictor: Predictor, card: str) -> str:
    """Return the text of README.md: the hub's header, how to load the network, and the model card.

    Args:
        predictor: The checkpoint.
        card: The model card in Markdown; "" if there is none.
    """
    function = "sigmoid()" if predictor.label_kind == "several" else "softmax(dim=1)"
    what = "labels" if predictor.label_kind == "several" else "classes"
    return f"""---
library_name: timm
pipeline_tag: image-classification
tags:
- image-classification
- timm
---
{card or f"# An image classifier of {len(predictor.class_names)} {what}"}
## Use

```python
import timm
from PIL import Image

model = timm.create_model("hf-hub:OWNER/NAME", pretrained=True).eval()  # or "local-dir:FOLDER"
transform = timm.data.create_transform(**timm.data.resolve_model_data_config(model))
image = Image.open("image.jpg").convert("RGB")
probabilities = model(transform(image)[None]).{function}
labels = model.pretrained_cfg["label_names"]
```

The probabilities are calibrated. finetune.json describes the network.
"""
