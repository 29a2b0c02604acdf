"""Turns a folder of labelled images into a trained and measured image classifier."""

import importlib
import os
import sys
from typing import TYPE_CHECKING

from finetune.system.interpreter import without_gc

__version__ = "0.1.0"

# By default albumentations asks a server for newer versions when it is imported. With this, nothing leaves the machine.
os.environ["NO_ALBUMENTATIONS_UPDATE"] = "1"
# The client of the Hugging Face hub, which timm imports, then sends no versions of other packages, and asks for
# no list of AI agents.
os.environ["HF_HUB_DISABLE_TELEMETRY"] = "1"
_hub_constants = sys.modules.get("huggingface_hub.constants")
if _hub_constants is not None:  # imported before: it reads the variable only then
    _hub_constants.HF_HUB_DISABLE_TELEMETRY = True  # type: ignore[attr-defined]

if TYPE_CHECKING:
    from finetune.api.fitted_run import FittedRun as FittedRun
    from finetune.api.loaded_model import LoadedModel as LoadedModel
    from finetune.api.loaded_model import load as load
    from finetune.api.python_fit import fit as fit
    from finetune.data.datasets.fashion_mnist import FashionMNIST as FashionMNIST
    from finetune.data.datasets.image_folder import Hotdog as Hotdog
    from finetune.data.datasets.image_folder import ImageFolderData as ImageFolderData
    from finetune.demo.sample_data import SampleData as SampleData
    from finetune.training.classifier import Classifier as Classifier
    from finetune.training.lr_schedulers import WarmupCosine as WarmupCosine
    from finetune.training.prediction import Prediction as Prediction

# Public names are imported when first used: torch takes seconds, `finetune --help` must not.
_PUBLIC = {
    "Classifier": "finetune.training.classifier",
    "FashionMNIST": "finetune.data.datasets.fashion_mnist",
    "FittedRun": "finetune.api.fitted_run",
    "Hotdog": "finetune.data.datasets.image_folder",
    "ImageFolderData": "finetune.data.datasets.image_folder",
    "LoadedModel": "finetune.api.loaded_model",
    "Prediction": "finetune.training.prediction",
    "SampleData": "finetune.demo.sample_data",
    "WarmupCosine": "finetune.training.lr_schedulers",
    "fit": "finetune.api.python_fit",
    "load": "finetune.api.loaded_model",
}
__all__ = [
    "Classifier",
    "FashionMNIST",
    "FittedRun",
    "Hotdog",
    "ImageFolderData",
    "LoadedModel",
    "Prediction",
    "SampleData",
    "WarmupCosine",
    "__version__",
    "fit",
    "load",
]


def __getattr__(name: str) -> object:
    if name not in _PUBLIC:
        raise AttributeError(f"module 'finetune' has no attribute {name!r}")
    with without_gc():
        return getattr(importlib.import_module(_PUBLIC[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
