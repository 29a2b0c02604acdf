"""Limits on the size of an image. They are checked before memory or time is spent."""

import re
from typing import BinaryIO

MAX_PIXELS = 178_956_970  # Pillow's own limit: twice Image.MAX_IMAGE_PIXELS, 0.5 GB as RGB
MAX_BYTES = 8 * MAX_PIXELS  # of a file: four uncompressed 16-bit samples per pixel
MAX_SCANS = 100  # of a JPEG, as in libvips; usual files have up to 10

_SCAN = 0xDA
_END = 0xD9
# JPEG markers that are followed by a length, and the end marker
_MARKER = re.compile(rb"\xff[^\x00\x01\xd0-\xd8\xff]")


def check_scans(file: BinaryIO) -> None:
    """Check the number of scans of a JPEG. A scan of 95 bytes may update all pixels, so decoding could take hours.

    Raises:
        ValueError: The file has more than `MAX_SCANS` scans.
    """
    file.seek(0)
    content = file.read()
    place = 2
    number = 0
    # a fast check, in a thousandth of the time of decoding
    if content.count(bytes([0xFF, _SCAN])) <= MAX_SCANS:
        return
    while (match := _MARKER.search(content, place)) and content[match.end() - 1] != _END:
        if content[match.end() - 1] == _SCAN:
            number += 1
        if number > MAX_SCANS:
            raise ValueError(f"a JPEG of more than {MAX_SCANS} scans")
        place = match.end() + int.from_bytes(content[match.end() : match.end() + 2], "big")
