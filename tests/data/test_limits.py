"""The bound on the size of an image is the one at which Pillow refuses."""

import io
import struct
import warnings

import pytest
from drawings import empty_png, progressive
from PIL import Image

from finetune.data.decode import DecodeError, decode
from finetune.data.limits import MAX_BYTES, MAX_PIXELS, MAX_SCANS


def test_it_is_where_pillow_refuses():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", Image.DecompressionBombWarning)  # from half of it on
        with Image.open(io.BytesIO(empty_png(MAX_PIXELS, 1))) as image:
            assert image.width == MAX_PIXELS
    with pytest.raises(Image.DecompressionBombError):
        Image.open(io.BytesIO(empty_png(MAX_PIXELS + 1, 1)))


def test_a_file_of_the_largest_image_as_it_is_fits():
    assert MAX_BYTES >= MAX_PIXELS * 4 * 16 // 8


@pytest.mark.parametrize("shorter_side", [None, 8])
def test_a_small_jpeg_can_t_take_hours(shorter_side):
    usual = progressive(0).count(b"\xff\xda")
    assert decode(progressive(MAX_SCANS - usual), shorter_side=shorter_side).ndim == 3
    with pytest.raises(DecodeError, match="more than 100 scans"):
        decode(progressive(MAX_SCANS - usual + 1), shorter_side=shorter_side)


def test_what_follows_a_jpeg_or_its_metadata_are_no_scans():
    """Phones append a video to the JPEG, with arbitrary bytes."""
    many = b"\xff\xda" * 200
    comment = b"\xff\xfe" + struct.pack(">H", 2 + len(many)) + many
    content = progressive(0)
    assert (decode(content[:2] + comment + content[2:] + many) == decode(content)).all()
