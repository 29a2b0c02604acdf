"""Fashion-MNIST's files to arrays: 60,000 and 10,000 grey pictures of clothes, 28x28 (arXiv:1708.07747)."""

from contextlib import suppress
from pathlib import Path
from typing import Literal

import numpy as np

from finetune.system.files import one_at_a_time
from finetune.system.messages import reason as told_in_a_line

CLASS_NAMES = (
    *("T-shirt or top", "Trouser", "Pullover", "Dress", "Coat"),
    *("Sandal", "Shirt", "Sneaker", "Bag", "Ankle boot"),
)
# What torchvision raises at files that are cut off, beside the RuntimeError that it has for missing ones.
_DAMAGED = AssertionError, KeyError, TypeError, ValueError


def obtain(root: Path) -> None:
    """Make the set ready in `root`, as torchvision lays it out: found beneath `root` and unpacked, or else downloaded.

    Of several processes one does it, and the others wait.

    Raises:
        OSError: If it can't be had; the message says where its files would belong.
    """
    from torchvision.datasets import FashionMNIST as Source

    if _is_whole(root):
        return
    raw = root / "FashionMNIST/raw"
    try:
        with one_at_a_time(root / "FashionMNIST"):
            if not _is_whole(root):
                try:
                    _gather(root, raw)
                    Source(str(root), download=True)
                    read(root, "test")
                finally:
                    for folder in (raw, raw.parent):  # made here for nothing
                        with suppress(OSError):
                            folder.rmdir()
    except (OSError, RuntimeError, *_DAMAGED) as error:
        reason = "a file is damaged" if isinstance(error, _DAMAGED) else told_in_a_line(error)
        raise OSError(
            f"Fashion-MNIST can't be had: {reason}; put its four .gz files in {raw}"
        ) from error


def is_beneath(root: Path) -> bool:
    """Return whether the files lie beneath `root`, packed or not, so that `obtain` downloads nothing."""
    from torchvision.datasets import FashionMNIST as Source
    from torchvision.datasets.utils import check_md5

    if _is_whole(root):
        return True
    for packed, md5 in Source.resources:
        path = next(root.rglob(packed), None)
        # torchvision would download it again
        if path is not None and not check_md5(str(path), md5):
            return False
        if path is None and next(root.rglob(packed.removesuffix(".gz")), None) is None:
            return False
    return True


def read(root: Path, split: Literal["train", "test"]) -> tuple[np.ndarray, np.ndarray]:
    """Return pixels (N, 28, 28) uint8 and labels (N,) int64 of a split that `obtain` has made ready."""
    from torchvision.datasets import FashionMNIST as Source

    source = Source(str(root), train=split == "train")
    return source.data.numpy(), source.targets.numpy()


def _is_whole(root: Path) -> bool:
    try:
        read(root, "train"), read(root, "test")
    except (
        AssertionError,
        KeyError,
        RuntimeError,
        TypeError,
        ValueError,
    ):  # torchvision's for files missing or cut off
        return False
    return True


def _gather(root: Path, raw: Path) -> None:
    """Link the files, packed or not, from wherever they lie beneath `root` into the folder that torchvision reads."""
    from torchvision.datasets import FashionMNIST as Source

    raw.mkdir(parents=True, exist_ok=True)
    for packed, _ in Source.resources:
        unpacked = packed.removesuffix(".gz")
        for name in (packed, unpacked):
            if not (raw / name).exists() and (found := next(root.rglob(name), None)):
                (raw / name).symlink_to(found.resolve())
        if (raw / packed).exists():  # torchvision would take half an unpacked file for a whole one
            (raw / unpacked).unlink(missing_ok=True)
