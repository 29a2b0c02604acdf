"""An incomplete image is refused, whatever its format, and whatever the last bytes of its file are."""

import io
import re
import struct
import tempfile
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from image_files import encode, in_memory
from PIL import Image
from short_files import RGB, SHORT, H, W

from finetune.data.checking.image_facts import inspect_image, small_copy
from finetune.data.completeness import IncompleteError, check_jpeg
from finetune.data.decode import DecodeError, decode, rgb_pixels


@pytest.mark.parametrize("kind", SHORT)
def test_each_file_decodes_as_long_as_nothing_is_missing(kind):
    pixels = decode(SHORT[kind](1))
    assert pixels.shape == (H, W, 3)
    assert all(rows.std() > 10 for rows in np.array_split(pixels, 10)), "a part of it is flat"
    if kind in (
        "png",
        "webp lossless",
        "bmp",
    ):
        np.testing.assert_array_equal(pixels, RGB)


@settings(max_examples=3 * settings.default.max_examples)
@given(kind=st.sampled_from([*SHORT]), share=st.floats(0.05, 0.95), has_end=st.booleans())
def test_a_short_file_is_refused(kind, share, has_end):
    content = SHORT[kind](share if has_end else 1)
    if not has_end:
        content = content[: int(len(content) * share)]
    for shorter_side in (None, 30):
        with pytest.raises(DecodeError):
            decode(content, shorter_side=shorter_side)
    with tempfile.NamedTemporaryFile() as file:
        file.write(content)
        file.flush()
        with pytest.raises(DecodeError):
            decode(file.name)
        assert inspect_image(file.name).error
        assert small_copy(file.name, 60) is None
    with (
        pytest.raises((OSError, ValueError, SyntaxError)),
        Image.open(io.BytesIO(content)) as image,
    ):
        rgb_pixels(image)


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
        "bytes before its end and before a marker": content[:tables]
        + b"abc"
        + content[tables:-2]
        + b"abc\xff\xd9",
        "bytes before a restart": restarts.replace(b"\xff\xd3", b"abc\xff\xd3", 1),
        "two more fill bytes before a marker": content[:tables] + b"\xff\xff" + content[tables:],
        "an unknown version": content[:version] + b"\x07\x07" + content[version + 2 :],
    }
    for kind, changed in odd.items():
        np.testing.assert_array_equal(decode(changed), decode(content), err_msg=kind)
        np.testing.assert_array_equal(
            decode(changed, shorter_side=30), decode(content, shorter_side=30), err_msg=kind
        )


KINDS = {
    "colours": Image.fromarray(RGB),
    "grey": Image.fromarray(RGB[..., 0]),
    "ink": Image.fromarray(RGB).convert("CMYK"),
}


@pytest.mark.parametrize("kind", KINDS)
def test_a_progressive_jpeg_that_ends_between_two_scans_is_refused(kind, tmp_path):
    content = encode(KINDS[kind], "JPEG", progressive=True)
    starts = [match.start() for match in re.finditer(b"\xff\xda", content)]
    assert len(starts) >= 6
    for start in starts[1:]:
        short = content[:start] + b"\xff\xd9"
        (tmp_path / "image").write_bytes(short)
        for source in (short, tmp_path / "image"):
            with pytest.raises(DecodeError, match="scans are missing"):
                decode(source)
        with (
            pytest.raises(ValueError, match="scans are missing"),
            Image.open(io.BytesIO(short)) as image,
        ):
            rgb_pixels(image)
        with Image.open(io.BytesIO(short)) as image:
            image.load()  # the control: Pillow and libjpeg see nothing


def test_a_jpeg_without_the_scan_of_a_component_is_refused():
    content = encode(RGB, "JPEG", subsampling=0)
    scan = content.index(b"\xff\xda")
    assert content[scan + 4] == 3
    luminance = (
        content[:scan]
        + b"\xff\xda\0\x08\1"
        + content[scan + 5 : scan + 7]
        + b"\0\x3f\0"
        + content[scan + 14 :]
    )
    with pytest.raises(IncompleteError, match="scans are missing"):
        check_jpeg(luminance)


def test_an_arithmetic_coded_jpeg_is_refused():
    content = encode(RGB, "JPEG")
    arithmetic = content.replace(b"\xff\xc0", b"\xff\xc9", 1)
    with pytest.raises(DecodeError, match="arithmetic"):
        decode(arithmetic)


def test_an_image_that_the_caller_has_opened_stays_as_it_is(tmp_path):
    path = tmp_path / "image.png"
    path.write_bytes(encode(RGB, "PNG"))
    with Image.open(path) as image:
        np.testing.assert_array_equal(rgb_pixels(image), RGB)
        np.testing.assert_array_equal(np.asarray(image), RGB)  # loaded after it
        np.testing.assert_array_equal(rgb_pixels(image), RGB)
    Path(path).write_bytes(encode(RGB, "JPEG"))
    with Image.open(path) as image:
        image.draft(None, (40, 40))
        assert rgb_pixels(image).shape[0] == image.height < H


def test_black_rows_that_a_png_states_are_not_missing():
    for pixels in (
        np.zeros_like(RGB),
        np.where(np.arange(H)[:, None, None] < 30, RGB, 0).astype(np.uint8),
    ):
        np.testing.assert_array_equal(decode(encode(pixels, "PNG")), pixels)
    clear = np.zeros((5, 7, 4), np.uint8)
    assert (decode(encode(clear, "PNG")) == 255).all()


@pytest.mark.parametrize("share", [0.1, 0.5, 0.9])
@pytest.mark.parametrize("mode", ["1", "L", "LA", "RGB"])
def test_a_png_whose_rest_is_zeros_is_refused(mode, share):
    """As a disk leaves a file that was not written to its end."""
    content = encode(np.asarray(Image.fromarray(RGB).convert(mode)), "PNG")
    decode(content)  # the control
    num = int(share * len(content))
    with pytest.raises(DecodeError, match="is damaged|truncated"):
        decode(content[:num] + bytes(len(content) - num))


def offsets_of(content: bytes) -> tuple[int, ...]:
    return Image.open(io.BytesIO(content)).tag_v2[273]


def test_a_strip_that_begins_after_the_end_of_the_file_takes_no_memory(tmp_path):
    content = SHORT["tiff short strip"](1)
    offsets = struct.pack("<6I", *offsets_of(content))
    far = struct.pack("<6I", *offsets_of(content)[:4], 2**32 - 10, 2**32 - 5)
    path = tmp_path / "far.tif"
    path.write_bytes(content.replace(offsets, far))

    def refuse() -> None:
        with pytest.raises(DecodeError, match="4,294,967,286"):
            decode(path)

    refuse()
    assert in_memory(2**26, refuse)
