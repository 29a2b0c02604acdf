"""The training setup and the results of scenarios in several processes."""

import math
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from colours import draw_colours
from labelled_files import draw_labelled


def draw_scenarios(data: Path, nums: Sequence[int]) -> Path:
    """Images to train with, in equal and in unequal classes, and test splits of several sizes."""
    draw_colours(data / "train", train=30)
    # 25 images of unequal classes in batches of 6: the last batch has one image, and two of three devices none.
    uneven = draw_colours(data / "uneven", train=14)
    for name, kept in (("blue", 14), ("green", 8), ("red", 3)):
        for path in sorted((uneven / "train" / name).iterdir())[kept:]:
            path.unlink()
    shutil.rmtree(draw_colours(data / "two", train=11) / "train/red")
    draw_labelled(data / "labels", train=37)
    draw_labelled(data / "many_labels", train=52, test=13)
    for num in nums:
        folder = draw_colours(data / f"test{num}", test=5)
        for path in sorted((folder / "test").rglob("*.png"))[num:]:
            path.unlink()
    return data


def load(folder: Path, name: str, rank: int = 0) -> Any:
    return torch.load(folder / f"{name}_{rank}.pt", "cpu", weights_only=True)


def distance(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> float:
    """Largest difference between two networks' weights."""
    assert a.keys() == b.keys()
    return max(float((a[name] - b[name]).abs().max()) for name in a)


def is_close(a: Any, b: Any) -> bool:
    """Up to the rounding of float64, which differs with the number of images in a batch. Whole numbers are equal."""
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(is_close(a[key], b[key]) for key in a)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(is_close, a, b))
    if isinstance(a, float) and isinstance(b, float):
        return math.isclose(a, b, rel_tol=1e-10, abs_tol=1e-10)
    return bool(a == b)


def is_same(a: Any, b: Any) -> bool:
    """Bit for bit."""
    if isinstance(a, torch.Tensor):
        return a.dtype == b.dtype and torch.equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(is_same(a[key], b[key]) for key in a)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(is_same, a, b))
    return bool(a == b)
