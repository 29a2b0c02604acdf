"""A copy of a data set with faults planted in it, this many of each kind, each on an image of its own."""

import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
from PIL import Image

# What may be taken for what, of the sets that are measured; of others any class.
SIMILAR = {
    **{"shirt": "t-shirt", "t-shirt": "shirt", "longsleeve": "shirt", "outwear": "longsleeve"},
    **{
        "pants": "shorts",
        "shorts": "pants",
        "skirt": "dress",
        "dress": "skirt",
        "hat": "shoes",
        "shoes": "hat",
    },
    **{"paper": "cardboard", "cardboard": "paper", "glass": "plastic", "plastic": "glass"},
    **{"metal": "glass", "trash": "paper", "hotdog": "not-hotdog", "not-hotdog": "hotdog"},
}
HTML = b"<!DOCTYPE html>\n<html><head><title>404 Not Found</title></head><body>Not Found</body></html>\n"
Planted = dict[str, list[list[str]]]  # kind: the files of each, beneath the root
Rng = np.random.Generator


def copied(source: Path, target: Path, num: int, seed: int) -> Planted:
    """Copy a set with splits and plant `num` faults of each kind.

    Returns:
        Of each fault the file that bears it, of a copy the original too, as they lie beneath `target`.
    """
    shutil.copytree(source, target)
    rng = np.random.default_rng(seed)
    paths = sorted(path for split in ("train", "test") for path in (target / split).glob("*/*.jpg"))
    order = [paths[i] for i in rng.permutation(len(paths))]
    found: Planted = {}

    def name(path: Path) -> str:
        return str(path.relative_to(target))

    for kind, spoil in FAULTS.items():
        found[kind] = []
        for _ in range(num):
            path = order.pop()
            spoil(path, rng)
            found[kind].append([name(path)])
    for kind, (change, to) in COPIES.items():
        found[kind] = []
        for i in range(num):
            path = order.pop()
            copy = _place(target, path, to, rng) / f"{kind}_{i}.jpg"
            change(path, copy, rng)
            found[kind].append([name(path), name(copy)])
    return found


def _place(root: Path, path: Path, to: str, rng: Rng) -> Path:
    """Return the folder that a copy goes to: of the other split, of another class, or its own."""
    if to == "split":
        return root / ("test" if path.parent.parent.name == "train" else "train") / path.parent.name
    if to == "class":
        others = sorted(folder for folder in path.parent.parent.iterdir() if folder != path.parent)
        return others[rng.integers(len(others))]
    return path.parent


def _cut(path: Path, rng: Rng) -> None:
    content = path.read_bytes()
    path.write_bytes(content[: int(len(content) * rng.uniform(0.2, 0.9))])


def _blank(path: Path, rng: Rng) -> None:
    with Image.open(path) as image:
        size = image.size
    pixels = np.full((size[1], size[0], 3), rng.integers(0, 256, 3)) + rng.normal(
        0, 1, (size[1], size[0], 1)
    )
    Image.fromarray(pixels.clip(0, 255).astype(np.uint8)).save(path, quality=90)


def _black(path: Path, rng: Rng) -> None:
    with Image.open(path) as image:
        pixels = np.asarray(image.convert("RGB"))
    Image.fromarray((pixels * 0.03).astype(np.uint8)).save(path, quality=90)


def _wide(path: Path, rng: Rng) -> None:
    with Image.open(path) as image:
        width, height = image.size
        strip = image.crop((0, height // 3, width, height // 3 + width // 3))
    (strip if rng.random() < 0.5 else strip.rotate(90, expand=True)).save(path, quality=90)


def _cmyk(path: Path, rng: Rng) -> None:
    with Image.open(path) as image:
        image.convert("CMYK").save(path, quality=90)


def _deep(path: Path, rng: Rng) -> None:
    with Image.open(path) as image:
        grey = np.asarray(image.convert("L")).astype(np.uint16) << 8
    Image.fromarray(grey).save(path.with_suffix(".png"))
    path.unlink()
    path.with_suffix(".png").rename(path)  # as another program might have named it


FAULTS: dict[str, Callable[[Path, Rng], None]] = {
    "truncated": _cut,
    "empty": lambda path, rng: path.write_bytes(b"") and None,
    "web page": lambda path, rng: path.write_bytes(HTML + rng.bytes(4).hex().encode()) and None,
    "one colour": _blank,
    "nearly black": _black,
    "3 times as wide or tall": _wide,
    "CMYK": _cmyk,
    "16 bits": _deep,
}


def _saved(
    change: Callable[[Image.Image, Rng], Image.Image], quality: int = 88
) -> Callable[[Path, Path, Rng], None]:
    def save(path: Path, copy: Path, rng: Rng) -> None:
        with Image.open(path) as image:
            change(image.convert("RGB"), rng).save(copy, quality=quality)

    return save


def _resized(image: Image.Image, rng: Rng) -> Image.Image:
    scale = rng.uniform(0.4, 1.6)
    return image.resize(
        (round(image.width * scale), round(image.height * scale)), Image.Resampling.BICUBIC
    )


def _cropped(image: Image.Image, rng: Rng) -> Image.Image:
    width, height = round(0.95 * image.width), round(0.95 * image.height)
    left, top = rng.integers(image.width - width + 1), rng.integers(image.height - height + 1)
    return image.crop((left, top, left + width, top + height))


def _mirrored(image: Image.Image, rng: Rng) -> Image.Image:
    return image.transpose(Image.Transpose.FLIP_LEFT_RIGHT)


def _plain(path: Path, copy: Path, rng: Rng) -> None:
    shutil.copyfile(path, copy)


# How a copy is changed, and where it goes.
COPIES: dict[str, tuple[Callable[[Path, Path, Rng], None], str]] = {
    "equal in both splits": (_plain, "split"),
    "equal in two classes": (_plain, "class"),
    "equal in one class": (_plain, "same"),
    "resized": (_saved(_resized), "split"),
    "re-encoded": (_saved(lambda image, rng: image, quality=50), "split"),
    "cropped by 5 %": (_saved(_cropped), "split"),
    "mirrored": (_saved(_mirrored), "split"),
    "cropped by 5 % and mirrored": (
        _saved(lambda image, rng: _mirrored(_cropped(image, rng), rng)),
        "class",
    ),
}
