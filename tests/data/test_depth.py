"""A warning about 16-bit images that come out black, and none about others."""

import logging
import os
from collections.abc import Callable
from pathlib import Path

import cv2
import numpy as np
import pytest

from finetune.data import depth
from finetune.data.depth import warn_of_dark_samples

CHANNELS = [1, 3]


@pytest.fixture
def warned(tmp_path, caplog) -> Callable[..., list[str]]:
    """The warnings about images with these largest samples, of 8 or 16 bits."""

    os.mkfifo(tmp_path / "pipe.png")  # to open it would wait

    def look(
        *largest: int, dtype: type = np.uint16, channels: int = 1, suffix: str = ".png"
    ) -> list[str]:
        paths = []
        for i, value in enumerate(largest):
            paths.append(str(tmp_path / f"{i}{suffix}"))
            cv2.imwrite(
                paths[-1],
                np.linspace(0, value, 8 * 8 * channels).astype(dtype).reshape(8, 8, channels),
            )
        caplog.clear()
        with caplog.at_level(logging.WARNING):
            warn_of_dark_samples(
                [*paths, str(tmp_path / "nowhere.png"), str(tmp_path / "pipe.png")]
            )
        return [record.getMessage() for record in caplog.records]

    return look


@pytest.mark.parametrize("suffix", [".png", ".tiff"])
@pytest.mark.parametrize("channels", CHANNELS)
def test_12_bits_in_16_are_noticed(warned, channels, suffix, tmp_path):
    (line,) = warned(4095, 3000, 900, channels=channels, suffix=suffix)
    assert line.startswith(
        f"all 3 checked 16-bit images, such as {tmp_path / '0'}{suffix}, are nearly black"
    )
    assert "\n" not in line


@pytest.mark.parametrize("channels", CHANNELS)
def test_one_image_that_is_bright_enough_is_one_scale_for_all(warned, channels):
    assert warned(4095, 65535, 900, channels=channels) == []
    assert warned(15, 12, dtype=np.uint8, channels=channels) == []  # 8 bits are what they are
    assert warned() == []


def test_few_of_many_are_looked_at(warned, monkeypatch):
    decoded: list[str] = []
    monkeypatch.setattr(
        depth, "decode", lambda path: decoded.append(Path(path).name) or np.zeros(1)
    )
    assert len(warned(*[100] * 50)) == 1
    assert len(decoded) == 19 and decoded[0] == "0.png"  # of the 20 the last is a pipe
