"""A warning for 16-bit images that use fewer bits without stating it: they would be nearly black in training."""

import logging
from collections.abc import Sequence
from contextlib import suppress
from itertools import compress

import numpy as np

from finetune.data.addresses import StorageError
from finetune.data.decode import DecodeError, decode, read_header
from finetune.data.fetching import map_files
from finetune.data.storage import open_file

log = logging.getLogger(__name__)

_NUM_LOOKED_AT = 20
_DARK = 16  # of 255: 12-bit samples in 16 bits stay below it


def warn_of_dark_samples(paths: Sequence[str]) -> None:
    """Log a warning if all 16-bit images in a sample of `paths` are nearly black, as 12-bit samples would be.

    `decode` does not guess the depth, because a single image may be dark. A complete data set hardly is.
    """
    chosen = np.linspace(0, len(paths) - 1, min(_NUM_LOOKED_AT, len(paths))).astype(int)
    looked_at = [paths[i] for i in chosen.tolist()]
    deep = list(compress(looked_at, map_files(has_16_bits, looked_at)))
    largest = []
    for path in deep:
        with suppress(DecodeError):  # reported when the image is read
            largest.append(int(decode(path).max()))
    if largest and max(largest) < _DARK:
        log.warning(
            "all %d checked 16-bit images, such as %s, are nearly black: if they hold samples of 12 bits or fewer, "
            "scale them to 16, or declare it in the file (TIFF: MaxSampleValue 4095)",
            len(largest),
            deep[0],
        )


def has_16_bits(path: str) -> bool:
    """Return whether the header of an image states samples of 9 to 16 bits."""
    try:
        with open_file(path) as file:
            image = read_header(file)
            # Pillow loads 16-bit colours as 8 bits, so their mode does not show the depth
            return image.mode.startswith("I;16") or ";16" in str(image.tile)
    except StorageError:
        raise
    except Exception:  # any exception: see `decode`
        return False
