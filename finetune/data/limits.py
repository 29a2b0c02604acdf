"""Limits on the size of an image. They are checked before memory or time is spent."""

import re
from typing import BinaryIO

MAX_PIXELS = 178_956_970  # Pillow's own limit: twice Image.MAX_IMAGE_PIXELS, 0.5 GB as RGB
MAX_BYTES = 8 * MAX_PIXELS  # of a file: four uncompressed 16-bit samples per pixel
MAX_SCANS = 100  # of a JPEG, as in libvips; usual files have up to 10

# JPEG markers (ITU-T T.81, table B.1)
SOS = 0xDA  # start of a scan
EOI = 0xD9  # end of the image
# A marker that is followed by a length, or the end marker. They are faster to search than all markers.
SEGMENT = re.compile(rb"\xff[^\x00\x01\xd0-\xd8\xff]")


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
    if content.count(bytes([0xFF, SOS])) <= MAX_SCANS:
        return
    while (match := SEGMENT.search(content, place)) and content[match.end() - 1] != EOI:
        if content[match.end() - 1] == SOS:
            number += 1
        if number > MAX_SCANS:
            raise ValueError(f"a JPEG of more than {MAX_SCANS} scans")
        place = match.end() + int.from_bytes(content[match.end() : match.end() + 2], "big")
