"""An incomplete image is refused, whatever its format, and whatever the last bytes of its file are."""

import re
import tempfile
from pathlib import Path

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from image_files import encode
from PIL import Image
from short_files import FILES, NOT_ZEROS, RGB, H, W, cut

from finetune.data.checking.image_facts import inspect_image, small_copy
from finetune.data.decode import DecodeError, decode, rgb_pixels

SHARES = st.floats(0.02, 0.999)


@pytest.mark.parametrize("kind", FILES)
def test_each_file_decodes_as_long_as_nothing_is_missing(kind):
    pixels = decode(FILES[kind])
    assert pixels.shape == (H, W, 3)
    assert all(rows.std() > 10 for rows in np.array_split(pixels, 10)), "a part of it is flat"


def is_refused(content: bytes, **options) -> bool:
    try:
        decode(content, **options)
    except DecodeError:
        return True
    return False


@settings(max_examples=3 * settings.default.max_examples)
@given(kind=st.sampled_from([*FILES]), share=SHARES, has_end=st.booleans())
def test_a_cut_file_is_refused_or_still_complete(kind, share, has_end):
    num = int(share * len(FILES[kind]))
    # a JPEG that ends between two scans is only coarse
    around = FILES[kind][num - 1 : num + 2]
    assume("jpeg" not in kind or not re.search(rb"\xff[\xc4\xd0-\xda]", around))
    content = cut(kind, num, has_end)
    if not is_refused(content):
        np.testing.assert_array_equal(decode(content), decode(FILES[kind]))
        return
    assert is_refused(content, shorter_side=30)
    with tempfile.NamedTemporaryFile() as file:
        file.write(content)
        file.flush()
        assert inspect_image(file.name).errors[0]
        assert small_copy(file.name, 60) is None


@settings(max_examples=3 * settings.default.max_examples)
@given(kind=st.sampled_from(NOT_ZEROS), share=SHARES)
def test_zeros_in_place_of_the_rest_are_refused(kind, share):
    """As a disk leaves a file that was not written to its end."""
    content = cut(kind, int(share * len(FILES[kind]))).ljust(len(FILES[kind]), b"\0")
    if not is_refused(content):
        np.testing.assert_array_equal(decode(content), decode(FILES[kind]))


@pytest.mark.parametrize("progressive", [False, True])
def test_what_is_odd_about_a_complete_jpeg_is_no_reason_to_refuse_it(progressive):
    content = encode(RGB, "JPEG", progressive=progressive)
    restarts = encode(RGB, "JPEG", progressive=progressive, restart_marker_blocks=7)
    tables = content.index(b"\xff\xdb")
    version = content.index(b"JFIF\0") + 5
    odd = {
        "bytes behind its end": content + b"\xff\xda a film" + bytes(1000),
        "half of another behind its end": content + content[: len(content) // 2],
        "bytes before a marker": content[:tables] + b"abc" + content[tables:],
        "bytes before its end": content[:-2] + b"abc\0" + content[-2:],
        "bytes before a restart": restarts.replace(b"\xff\xd3", b"abc\xff\xd3", 1),
        "two more fill bytes before a marker": content[:tables] + b"\xff\xff" + content[tables:],
        "an unknown version": content[:version] + b"\x07\x07" + content[version + 2 :],
    }
    for kind, changed in odd.items():
        for side in (None, 30):
            np.testing.assert_array_equal(
                decode(changed, shorter_side=side), decode(content, shorter_side=side), err_msg=kind
            )


def test_an_image_that_the_caller_has_opened_stays_as_it_is(tmp_path: Path):
    path = tmp_path / "image.png"
    for format, expected in (("PNG", RGB), ("JPEG", decode(encode(RGB, "JPEG")))):
        path.write_bytes(encode(RGB, format))
        with Image.open(path) as image:
            np.testing.assert_array_equal(rgb_pixels(image), expected)
            np.testing.assert_array_equal(np.asarray(image), expected)  # loaded after it
            np.testing.assert_array_equal(rgb_pixels(image), expected)
