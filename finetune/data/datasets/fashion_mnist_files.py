"""Fashion-MNIST's files as arrays and as PNGs: 60,000 and 10,000 grey images of clothes, 28x28 (arXiv:1708.07747)."""

import logging
import tempfile
from collections import Counter
from contextlib import suppress
from pathlib import Path
from typing import Literal

import numpy as np

from finetune.system.files import one_at_a_time
from finetune.system.messages import reason as one_line

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
_SPLITS: tuple[Literal["train", "test"], ...] = ("train", "test")
# Exceptions of torchvision for truncated files. For missing files it raises a RuntimeError.
_DAMAGED = AssertionError, KeyError, TypeError, ValueError


def obtain(root: Path) -> None:
    """Prepare the data set in `root` in torchvision's layout: unpack files in `root`, or else download them.

    One process does this; the others wait.

    Raises:
        OSError: The download failed, or a file is damaged. The message says where to put the files.
    """
    from torchvision.datasets import FashionMNIST as Source

    if _is_complete(root):
        return
    raw = root / "FashionMNIST/raw"
    try:
        with one_at_a_time(root / "FashionMNIST"):
            if not _is_complete(root):
                try:
                    _link_files(root, raw)
                    Source(str(root), download=True)
                    read(root, "test")
                finally:
                    # after a failure, remove the folders if they are empty
                    for folder in (raw, raw.parent):
                        with suppress(OSError):
                            folder.rmdir()
    except (OSError, RuntimeError, *_DAMAGED) as error:
        reason = "a file is damaged" if isinstance(error, _DAMAGED) else one_line(error)
        raise OSError(
            f"Fashion-MNIST is not available: {reason}; put its four .gz files in {raw}"
        ) from error


def is_available(root: Path) -> bool:
    """Return whether the files are in `root` or a subfolder, packed or not, so that nothing is downloaded."""
    from torchvision.datasets import FashionMNIST as Source
    from torchvision.datasets.utils import check_md5

    if _image_folder(root).is_dir() or _is_complete(root):
        return True
    for packed, md5 in Source.resources:
        path = next(root.rglob(packed), None)
        # torchvision would download a damaged file again
        if path is not None and not check_md5(str(path), md5):
            return False
        if path is None and next(root.rglob(packed.removesuffix(".gz")), None) is None:
            return False
    return True


def write_images(root: Path) -> Path:
    """Return the folder with the images as `train/CLASS/NUMBER.png` and `test/...`. It is written at the first call.

    Images of a class are numbered in the order of the original files. The folder is complete or absent. One process
    writes it; the others wait. The original files are not needed afterwards.

    Raises:
        OSError: The set cannot be obtained, or the images cannot be written.
    """
    folder = _image_folder(root)
    if folder.is_dir():
        return folder
    obtain(root)
    with one_at_a_time(folder):
        if not folder.is_dir():
            log.info("writing Fashion-MNIST once as PNG files into %s", folder)
            with tempfile.TemporaryDirectory(
                prefix=f".{folder.name}-", dir=folder.parent
            ) as temporary:
                content = Path(temporary, folder.name)
                for split in _SPLITS:
                    _write_split(root, split, content)
                content.rename(folder)
    return folder


def _write_split(root: Path, split: Literal["train", "test"], content: Path) -> None:
    import cv2

    for name in CLASS_NAMES:
        (content / split / name).mkdir(parents=True)
    pixels, labels = read(root, split)
    num_written: Counter[int] = Counter()
    for image, label in zip(pixels, labels.tolist(), strict=True):
        _, encoded = cv2.imencode(".png", image)
        name = f"{num_written[label]:04d}.png"
        (content / split / CLASS_NAMES[label] / name).write_bytes(encoded.tobytes())
        num_written[label] += 1


def _image_folder(root: Path) -> Path:
    return root / "FashionMNIST/images"


def read(root: Path, split: Literal["train", "test"]) -> tuple[np.ndarray, np.ndarray]:
    """Return pixels (N, 28, 28) uint8 and labels (N,) int64 of a split, after `obtain`."""
    from torchvision.datasets import FashionMNIST as Source

    source = Source(str(root), train=split == "train")
    return source.data.numpy(), source.targets.numpy()


def _is_complete(root: Path) -> bool:
    try:
        for split in _SPLITS:
            read(root, split)
    except (RuntimeError, *_DAMAGED):  # missing or truncated files
        return False
    return True


def _link_files(root: Path, raw: Path) -> None:
    """Link the files, packed or not, from any subfolder of `root` into the folder that torchvision reads."""
    from torchvision.datasets import FashionMNIST as Source

    raw.mkdir(parents=True, exist_ok=True)
    for packed, _ in Source.resources:
        unpacked = packed.removesuffix(".gz")
        for name in (packed, unpacked):
            if not (raw / name).exists() and (existing := next(root.rglob(name), None)):
                (raw / name).symlink_to(existing.resolve())
        if (raw / packed).exists():  # torchvision would accept a truncated unpacked file
            (raw / unpacked).unlink(missing_ok=True)
