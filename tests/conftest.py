"""Shared by the tests: small folders of pictures, and the command line in this process."""

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import cv2
import numpy as np
import pytest
import torch

# Options of a fit that takes a second.
QUICK = [
    *("--data.image_size", "32", "--data.batch_size", "16", "--data.num_workers", "0", "--model.weights", "null"),
    *("--model.backbone", "mobilenet_v3_small", "--trainer.max_epochs", "1", "--trainer.accelerator", "cpu"),
    *("--trainer.precision", "32-true"),  # the same on every machine
]

torch.set_num_threads(1)  # the pictures are tiny: more threads only cost time


@pytest.fixture(scope="session", autouse=True)
def caches(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The folder of decoded pictures, apart from the user's own."""
    with pytest.MonkeyPatch.context() as patch:
        folder = tmp_path_factory.mktemp("caches")
        patch.setenv("FINETUNE_CACHE", str(folder))
        yield folder


@pytest.fixture(scope="session")
def colours(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder in three easy classes: 20 pictures each in train, 10 in test."""
    return draw_colours(tmp_path_factory.mktemp("data") / "colours", train=20, test=10)


def draw_colours(root: Path, **num_pictures: int) -> Path:
    """Write `split=n` noisy 48x56 pictures for each of blue, green and red."""
    rng = np.random.default_rng(0)
    for split, num in num_pictures.items():
        for channel, name in enumerate(("blue", "green", "red")):
            folder = root / split / name
            folder.mkdir(parents=True)
            for i in range(num):
                picture = rng.integers(0, 120, (48, 56, 3)).astype(np.uint8)
                picture[:, :, channel] += 60  # BGR, as OpenCV has it
                cv2.imwrite(str(folder / f"{i:02d}.png"), picture)
    return root


@pytest.fixture
def cli(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., None]]:
    """`finetune` in this process, in an empty folder."""
    from finetune.cli import run

    monkeypatch.chdir(tmp_path)
    before = dict(os.environ)
    yield lambda *arguments: run([str(argument) for argument in arguments])
    os.environ.clear()
    os.environ.update(before)
