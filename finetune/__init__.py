"""A folder of labelled pictures in, a trained and measured image classifier out."""

import importlib
import os
from typing import TYPE_CHECKING

__version__ = "0.1.0"

# albumentations asks a server for newer versions when it is imported, unless told not to: nothing leaves the machine.
os.environ["NO_ALBUMENTATIONS_UPDATE"] = "1"

if TYPE_CHECKING:
    from finetune.classifier import Classifier as Classifier
    from finetune.datamodules import FashionMNIST as FashionMNIST
    from finetune.datamodules import Hotdog as Hotdog
    from finetune.datamodules import ImageFolderData as ImageFolderData
    from finetune.datamodules import SampleData as SampleData

# Public names are imported when first used: torch takes seconds, `finetune --help` must not.
_PUBLIC = {
    "Classifier": "finetune.classifier",
    "FashionMNIST": "finetune.datamodules",
    "Hotdog": "finetune.datamodules",
    "ImageFolderData": "finetune.datamodules",
    "SampleData": "finetune.datamodules",
}
__all__ = ["Classifier", "FashionMNIST", "Hotdog", "ImageFolderData", "SampleData", "__version__"]


def __getattr__(name: str) -> object:
    if name not in _PUBLIC:
        raise AttributeError(f"module 'finetune' has no attribute {name!r}")
    return getattr(importlib.import_module(_PUBLIC[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
