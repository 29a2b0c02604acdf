"""Which images have several frames or pages. `decode` reads the first one only."""

import os
import struct
from collections.abc import Sequence
from typing import Any, BinaryIO

import numpy as np
from PIL.ImageFile import ImageFile
from PIL.TiffImagePlugin import TiffImageFile

from finetune.data.addresses import StorageError
from finetune.data.decode import read_header, silence_pillow
from finetune.data.fetching import map_files
from finetune.data.heif import NUM_HEAD_BYTES, is_sequence
from finetune.data.storage import open_file
from finetune.system.messages import shown

# Files that are read, evenly spaced if there are more. It takes a second for GIF and TIFF.
_NUM_SAMPLED = 2000
_SINGLE = (".jpg", ".jpeg", ".bmp")  # formats without frames
_MAX_CHUNKS = 1000  # before the pixels of a PNG
# The bit in the flags of an extended WebP (its specification, "Extended File Format").
_ANIMATION = 2


def frames_line(paths: Sequence[str]) -> str:
    """Return a line about images with several frames or pages; "" if there are none."""
    candidates = [path for path in paths if os.path.splitext(path)[1].lower() not in _SINGLE]
    num = len(candidates)
    chosen = np.linspace(0, num - 1, min(_NUM_SAMPLED, num)).astype(int).tolist()
    paths = [candidates[i] for i in chosen]
    has_several = map_files(has_several_frames, paths)
    several = [path for path, is_it in zip(paths, has_several, strict=True) if is_it]
    if not several:
        return ""
    sampled = f" of {len(chosen):,} sampled images" if len(chosen) < num else ""
    what = f"{len(several):,}{sampled or (' image' if len(several) == 1 else ' images')}"
    have = "has" if len(several) == 1 else "have"
    return (
        f"{what} {have} several frames or pages, for example {shown(several[0])}: "
        "only the first frame or page is used"
    )


def has_several_frames(path: str) -> bool:
    """Return whether an image file has several frames or pages; False if it cannot be read."""
    silence_pillow()
    try:
        with open_file(path) as file:
            head = file.read(NUM_HEAD_BYTES)
            if head[:4] == b"RIFF":
                return head[12:16] == b"VP8X" and bool(head[20] & _ANIMATION)
            if head[:4] == b"\x89PNG":
                return _is_animated_png(file)
            if head[:4] == b"GIF8" or head[:2] in (b"II", b"MM"):
                file.seek(0)
                return is_several(read_header(file))
            return is_sequence(head)
    except StorageError:
        raise
    except Exception:  # Pillow raises nearly any for a damaged file, which is reported elsewhere
        return False


def is_several(image: ImageFile) -> bool:
    """Return whether an image from `read_header` has several frames or pages."""
    if isinstance(image, TiffImageFile):  # Pillow would read the complete file to count its pages
        tags: Any = image.tag_v2
        return bool(tags.next)
    return bool(getattr(image, "is_animated", False))


def _is_animated_png(file: BinaryIO) -> bool:
    """Return whether a PNG has an animation: a chunk acTL before its pixels (PNG specification, 11.3.4)."""
    place = 8
    for _ in range(_MAX_CHUNKS):
        file.seek(place)
        header = file.read(8)
        if len(header) < 8 or header[4:] in (b"IDAT", b"IEND"):
            return False
        if header[4:] == b"acTL":
            return True
        place += 12 + struct.unpack(">I", header[:4])[0]
    return False
