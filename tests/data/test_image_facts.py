"""The properties that one pass over an image measures, compared with Pillow and with the decoder."""

import os

import cv2
import numpy as np
import pytest
from drawings import drawing, empty_png, progressive
from PIL import Image

from finetune.data.checking.image_facts import (
    SIDE,
    collect_facts,
    inspect_image,
    inspect_images,
    small_copy,
)
from finetune.data.decode import decode


@pytest.mark.parametrize(
    ("suffix", "kind"),
    [
        ("jpg", "JPEG"),
        ("png", "PNG"),
        ("webp", "WEBP"),
        ("bmp", "BMP"),
        ("gif", "GIF"),
        ("tiff", "TIFF"),
    ],
)
def test_facts_are_those_of_the_file(tmp_path, suffix, kind):
    path = str(tmp_path / f"a.{suffix}")
    drawing(0).save(path)
    seen, pixels = inspect_image(path), decode(path)
    assert (seen.error, seen.kind, seen.size) == ("", kind, (220, 300))
    assert (seen.num_bytes, seen.changed) == (os.stat(path).st_size, os.stat(path).st_mtime)
    # a JPEG is looked at smaller
    np.testing.assert_allclose(seen.colour, pixels.mean(axis=(0, 1)), atol=1)
    grey = cv2.cvtColor(
        cv2.resize(pixels, (SIDE, SIDE), interpolation=cv2.INTER_AREA), cv2.COLOR_RGB2GRAY
    )
    assert np.abs(seen.grey.astype(int) - grey).mean() < (2 if suffix == "jpg" else 1e-9)


@pytest.mark.parametrize(
    ("mode", "suffix", "wanted"),
    [
        ("RGB", "jpg", "RGB"),
        ("L", "png", "L"),
        ("RGBA", "png", "RGBA"),
        ("CMYK", "jpg", "CMYK"),
        ("I;16", "png", "I;16"),
    ],
)
def test_what_pixels_are_is_in_pillows_words(tmp_path, mode, suffix, wanted):
    path = str(tmp_path / f"a.{suffix}")
    if mode == "I;16":
        Image.fromarray(np.asarray(drawing(0).convert("L")).astype(np.uint16) << 8).save(path)
    else:
        drawing(0).convert(mode).save(path)
    assert inspect_image(path).mode == wanted


@pytest.mark.slow
def test_images_that_move_say_so(tmp_path):
    frames = [drawing(seed) for seed in range(3)]
    for suffix in ("gif", "webp", "png"):
        path = str(tmp_path / f"a.{suffix}")
        frames[0].save(path, save_all=True, append_images=frames[1:])
        assert inspect_image(path).mode.endswith(" animated")
        frames[0].save(path)
        assert not inspect_image(path).mode.endswith("animated")


def test_what_can_not_be_read_is_reported_in_words_and_takes_no_memory(tmp_path):
    paths = [
        str(tmp_path / name)
        for name in ("gone.png", "bomb.png", "empty.jpg", "page.jpg", "cut.jpg", "fine.jpg")
    ]
    for path, content in (
        (paths[1], empty_png(70_000, 70_000)),
        (paths[2], b""),
        (paths[3], b"<html>"),
    ):
        with open(path, "wb") as file:
            file.write(content)
    drawing(0).save(paths[5])
    with open(paths[5], "rb") as file, open(paths[4], "wb") as half:
        half.write(file.read()[:2000])
    os.mkfifo(tmp_path / "pipe.jpg")
    paths.append(str(tmp_path / "pipe.jpg"))
    facts = collect_facts(inspect_images(paths), len(paths))
    words = (
        "No such file",
        "70000 x 70000 pixels are more",
        "is empty",
        "not a JPEG",
        "truncated",
        "",
        "pipe",
    )
    assert all(word in error for word, error in zip(words, facts.errors, strict=True)), facts.errors
    assert facts.is_readable.tolist() == [not word for word in words]
    assert facts.aspects.tolist() == pytest.approx([1] * 5 + [300 / 220] + [1])
    assert facts.brightness[5] > 0 == facts.brightness[:5].max()
    assert [small_copy(path, 144) is None for path in paths] == (~facts.is_readable).tolist()


def test_an_image_is_seen_upright_and_shown_no_smaller_than_wanted(tmp_path):
    exif = Image.Exif()
    exif[0x0112] = 6  # turned by a quarter
    drawing(0).save(tmp_path / "a.jpg", exif=exif, quality=95)
    drawing(0).rotate(-90, expand=True).save(tmp_path / "b.jpg", quality=95)
    grey = [inspect_image(str(tmp_path / name)).grey.astype(int) for name in ("a.jpg", "b.jpg")]
    assert np.abs(grey[0] - grey[1]).mean() < 2
    shown = small_copy(str(tmp_path / "a.jpg"), 100)
    assert shown.shape[0] > shown.shape[1] >= 100


def test_looks_come_in_the_order_of_the_paths(tmp_path):
    paths = [str(tmp_path / f"{i}.png") for i in range(300)]  # more than are under way at once
    for i, path in enumerate(paths):
        Image.new("L", (i + 1, 5)).save(path)
    assert collect_facts(inspect_images(paths), 300).sizes[:, 1].tolist() == list(range(1, 301))


def test_a_jpeg_of_very_many_scans_is_not_decoded(tmp_path):
    path = tmp_path / "a.jpg"
    path.write_bytes(progressive(200))
    assert (
        inspect_image(str(path)).error == "a JPEG of more than 100 scans"
        and small_copy(str(path), 100) is None
    )
    path.write_bytes(progressive(0))
    assert inspect_image(str(path)).error == "" and small_copy(str(path), 100) is not None


@pytest.mark.parametrize("suffix", ["jpg", "png"])
def test_sides_are_those_of_the_upright_image(tmp_path, suffix):
    sizes = []
    for orientation in (1, 3, 6):
        tags = Image.Exif()
        tags[0x0112] = orientation
        drawing(0, 400, 300).save(path := str(tmp_path / f"{orientation}.{suffix}"), exif=tags)
        sizes.append(inspect_image(path).size)
    assert sizes == [(300, 400), (300, 400), (400, 300)]
