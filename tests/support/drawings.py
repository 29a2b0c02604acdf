"""Images with large and small details, as photographs have, and grey copies with known differences."""

import io
import struct
import zlib

import numpy as np
from PIL import Image

from finetune.data.checking.image_facts import Facts, empty_facts


def drawing(seed: int, width: int = 300, height: int = 220) -> Image.Image:
    rng = np.random.default_rng(seed)
    coarse, fine = (
        Image.fromarray(rng.integers(0, 256, (*size, 3)).astype(np.uint8)).resize(
            (width, height), 3
        )
        for size in ((5, 7), (height // 7, width // 7))
    )
    return Image.blend(coarse, fine, 0.4)


def facts_of(grey: np.ndarray, **changes) -> Facts:
    """Return facts of readable square images with these grey copies (N, S, S); everything else is equal."""
    num = len(grey)
    flat = grey.reshape(num, grey.shape[1] * grey.shape[2])
    values = {
        "kinds": "JPEG",
        "modes": "RGB",
        "sizes": 100,
        "num_bytes": 5000,
        "colours": 99,
        "grey": grey,
        "contrast": flat.std(axis=1),
        "brightest": np.percentile(flat, 99, axis=1) if num else 0,
    }
    facts = empty_facts(num)
    for name, value in {**values, **changes}.items():
        facts[name] = value
    return facts


def progressive(extra: int) -> bytes:
    """Return a progressive JPEG whose last scan comes this many times more."""
    file = io.BytesIO()
    Image.new("L", (64, 64), 100).save(file, "JPEG", progressive=True)
    content = file.getvalue()[:-2]
    return content + content[content.rindex(b"\xff\xda") :] * extra + b"\xff\xd9"


def empty_png(width: int, height: int) -> bytes:
    """Return a PNG of a few hundred bytes that declares this many pixels and holds none."""
    size = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    content = b"\x89PNG\r\n\x1a\n"
    for kind, body in ((b"IHDR", size), (b"IDAT", zlib.compress(b"")), (b"IEND", b"")):
        content += (
            struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))
        )
    return content
