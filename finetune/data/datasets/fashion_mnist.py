"""Fashion-MNIST by torchvision: 60,000 and 10,000 grey images of clothes, 28x28 (arXiv:1708.07747)."""

import logging
import tempfile
from pathlib import Path

import numpy as np
from PIL import Image

from finetune.data.addresses import check_is_local
from finetune.data.datasets.image_folder import ImageFolderData
from finetune.system.files import one_at_a_time, rename_folder
from finetune.system.messages import reason

log = logging.getLogger(__name__)

CLASS_NAMES = (
    "T-shirt or top",
    "Trouser",
    "Pullover",
    "Dress",
    "Coat",
    "Sandal",
    "Shirt",
    "Sneaker",
    "Bag",
    "Ankle boot",
)
_IMAGES = "FashionMNIST/images"  # next to torchvision's folder of the original files


class FashionMNIST(ImageFolderData):
    """Fashion-MNIST by torchvision: grey 28x28 images of clothes, which are written once as PNGs in class folders."""

    default_root = "data/fashion-mnist"
    reads_tables = False
    default_class_names = CLASS_NAMES

    def place_in(self, folder: str) -> str:
        check_is_local(folder)
        return str(write_images(Path(folder)))

    @classmethod
    def is_in(cls, root: str) -> bool:
        return Path(root, _IMAGES).is_dir()


def write_images(root: Path) -> Path:
    """Return the folder with the images as `train/CLASS/NUMBER.png` and `test/...`. It is written at the first call.

    Images of a class are numbered in the order of the original files. The folder is complete or absent. One process
    writes it; the others wait.

    Raises:
        OSError: The data set is not available, or the images cannot be written.
    """
    folder = root / _IMAGES
    with one_at_a_time(folder):
        if folder.is_dir():
            return folder
        splits = {split: read(root, is_train=split == "train") for split in ("train", "test")}
        log.info("writing Fashion-MNIST once as PNG files into %s", folder)
        with tempfile.TemporaryDirectory(prefix=f".{folder.name}-", dir=folder.parent) as temporary:
            content = Path(temporary, folder.name)
            for split, (pixels, labels) in splits.items():
                for label, name in enumerate(CLASS_NAMES):
                    (content / split / name).mkdir(parents=True)
                    for number, image in enumerate(pixels[labels == label]):
                        Image.fromarray(image).save(content / split / name / f"{number:04d}.png")
            rename_folder(content, folder)
    return folder


def read(root: Path, is_train: bool) -> tuple[np.ndarray, np.ndarray]:
    """Return pixels (N, 28, 28) uint8 and labels (N,) int64 of a split. torchvision downloads missing files.

    Raises:
        OSError: The download failed, or a file is damaged. The message says where to put the files.
    """
    from torchvision.datasets import FashionMNIST as Source

    try:
        source = Source(str(root), train=is_train, download=True)
    # torchvision's errors for missing and for truncated files
    except (OSError, RuntimeError, AssertionError, KeyError, TypeError, ValueError) as error:
        raise OSError(
            f"Fashion-MNIST is not available: {reason(error)}; put its four .gz files in {root}/FashionMNIST/raw"
        ) from error
    return source.data.numpy(), source.targets.numpy()
