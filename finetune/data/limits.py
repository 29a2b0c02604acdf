"""What a picture may take: more is refused before memory or time is asked for."""

import re
from typing import BinaryIO

MAX_PIXELS = 178_956_970  # where Pillow itself refuses: twice Image.MAX_IMAGE_PIXELS, 0.5 GB as RGB
MAX_BYTES = 8 * MAX_PIXELS  # of a file: four samples of 16 bits a pixel, as they are
MAX_SCANS = 100  # of a JPEG, as in libvips; usual ones have up to 10

_SCAN, _END = 0xDA, 0xD9
# of those that a length follows, and the end
_MARKER = re.compile(rb"\xff[^\x00\x01\xd0-\xd8\xff]")


def check_scans(file: BinaryIO) -> None:
    """Make sure that a JPEG takes no hours: each scan, of 95 bytes, may go over all of its pixels.

    Raises:
        ValueError: It has more than `MAX_SCANS`.
    """
    file.seek(0)
    content = file.read()
    place = 2
    number = 0
    # in a thousandth of the time that decoding takes
    if content.count(bytes([0xFF, _SCAN])) <= MAX_SCANS:
        return
    while (found := _MARKER.search(content, place)) and content[found.end() - 1] != _END:
        number += content[found.end() - 1] == _SCAN
        if number > MAX_SCANS:
            raise ValueError(f"a JPEG of more than {MAX_SCANS} scans")
        place = found.end() + int.from_bytes(content[found.end() : found.end() + 2], "big")
