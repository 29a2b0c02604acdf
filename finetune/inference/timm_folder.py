"""Writes a network as a folder in timm's own layout, which `timm.create_model` and the Hugging Face hub read.

The head contains the calibration, so softmax or sigmoid of its logits gives the probabilities of `predict`. The
metadata of the weights has what our own commands need, so that they read the file as an exported one.
"""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file

from finetune.data.transforms import resized_side
from finetune.inference.export_check import PredictionFunction
from finetune.inference.joined_checkpoint import calibrated_network
from finetune.inference.predictor import Predictor
from finetune.models.hub import CONFIG_FILE, WEIGHTS_FILE
from finetune.models.network_names import PREFIX, is_timm
from finetune.models.timm_networks import create
from finetune.models.weight_files import EXPORTED
from finetune.runs.exported_files import licence_of, packed
from finetune.settings.schema import CROP_SHARE
from finetune.system.messages import WrongUsage

# Shapes: N images of h x w pixels, K classes or labels.

TIMM_FILES = (WEIGHTS_FILE, CONFIG_FILE)
DESCRIPTION = "finetune.json"
README = "README.md"
# Networks of torchvision that timm has with the same names and the same names of parameters.
OF_TORCHVISION = (
    *("densenet121", "densenet161", "densenet169", "densenet201"),
    *("resnet18", "resnet34", "resnet50", "resnet101", "resnet152"),
    *("resnext50_32x4d", "resnext101_32x8d", "resnext101_64x4d"),
    *("wide_resnet50_2", "wide_resnet101_2"),
)
# `data.resize` and the crop_mode of timm
_CROP_MODES = {"shorter_side": "center", "squash": "squash", "whole": "squash"}


def check_supported(predictor: Predictor) -> None:
    """Check that timm supports the network and the preparation of images of a checkpoint.

    Raises:
        WrongUsage: It does not.
    """
    if not is_timm(predictor.backbone) and predictor.backbone not in OF_TORCHVISION:
        reason = f"timm has no network with the weights of {predictor.backbone}"
    elif predictor.num_members > 1:
        reason = f"the checkpoint is an ensemble of {predictor.num_members} networks"
    elif predictor.head_stages > 1:
        reason = f"its head takes the features of {predictor.head_stages} stages (--model.head_stages 1 takes one)"
    elif predictor.preparation["resize"] not in _CROP_MODES:
        reason = f"timm has no resize like --data.resize {predictor.preparation['resize']}"
    else:
        return
    raise WrongUsage(f"timm's format does not support this checkpoint: {reason}")


def write_timm_folder(predictor: Predictor, checkpoint: Mapping[str, Any], folder: Path) -> None:
    """Write model.safetensors and config.json. They have no hashes of training images: they may be published.

    Args:
        predictor: The checkpoint, on the CPU; see `check_supported`.
        checkpoint: Its content.
        folder: An existing folder.

    Raises:
        WrongUsage: timm is not installed.
    """
    # timm's tag of the published weights is part of the name, since config.json states it
    backbone = predictor.backbone
    if not is_timm(backbone):
        backbone = f"{PREFIX}{backbone}.tv_in1k"
    network = create(backbone, len(predictor.class_names), predictor.image_size)
    network.load_state_dict(calibrated_network(checkpoint, predictor.calibration))
    from timm.models import save_for_hf

    config = {
        "label_names": predictor.class_names,
        "num_classes": len(predictor.class_names),
        "pretrained_cfg": _preparation(predictor),
    }
    save_for_hf(network, str(folder), model_config=config, safe_serialization=True)
    calibration = predictor.calibration.without_scaling().as_plain()
    origin = {
        "calibration": calibration,
        "licence_of_the_weights": licence_of(checkpoint),
        "seen": None,
    }
    changed = {
        "hyper_parameters": checkpoint["hyper_parameters"] | {"backbone": backbone},
        "finetune": checkpoint["finetune"] | origin,
    }
    metadata = {"format": "pt", EXPORTED: packed({**checkpoint, **changed})}
    save_file(network.state_dict(), folder / WEIGHTS_FILE, metadata)


def _preparation(predictor: Predictor) -> dict[str, Any]:
    """Return the preparation of images as timm describes it."""
    size = predictor.image_size
    settings = predictor.preparation
    resized = size
    if settings["resize"] != "whole":
        resized = resized_side(size, settings.get("crop_share", CROP_SHARE))
    share = size / resized
    if math.floor(size / share) != resized:  # how timm computes the resized side
        share = size / (resized + 0.5)
    return {
        "input_size": [3, size, size],
        "interpolation": settings.get("interpolation", "bilinear"),
        "crop_pct": share,
        "crop_mode": _CROP_MODES[settings["resize"]],
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
