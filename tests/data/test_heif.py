"""HEIC and AVIF images are read by the rules of the other formats: upright, complete, within limits."""

import io

import numpy as np
import pytest
from image_files import encode
from PIL import ExifTags, Image
from promise import promise

from finetune.data.decode import DecodeError, begins_like_image, decode, stored_size

ROWS, COLUMNS = np.mgrid[:96, :128]
SMOOTH = np.stack([2 * ROWS, COLUMNS, 255 - COLUMNS], axis=2).astype(np.uint8)
LOSSLESS = {
    "AVIF": {"quality": 100, "subsampling": "4:4:4"},
    "HEIF": {"quality": -1, "chroma": 444},
}


@pytest.fixture(params=["AVIF", "HEIF"])
def format(request):
    if request.param == "HEIF":
        pytest.importorskip("pillow_heif").register_heif_opener()  # writes them
    return request.param


def exif(orientation):
    tags = Image.Exif()
    tags[ExifTags.Base.Orientation] = orientation
    return tags


def test_pixels_are_those_that_were_written(format):
    content = encode(SMOOTH, format, **LOSSLESS[format])
    found = decode(content).astype(int)
    # RGB to YCbCr and back rounds twice
    assert np.abs(found - SMOOTH).max() <= 3
    assert begins_like_image(content)
    np.testing.assert_array_equal(found, np.asarray(Image.open(io.BytesIO(content)).convert("RGB")))


@promise("heif")
@pytest.mark.parametrize("orientation", [3, 5, 6, 8])
def test_an_image_is_turned_upright_once(format, orientation, tmp_path):
    tags = exif(orientation).tobytes()
    content = encode(SMOOTH, format, exif=tags, **LOSSLESS[format])
    assert b"irot" in content or b"imir" in content
    png = encode(SMOOTH, "PNG", exif=exif(orientation))
    upright = decode(png)
    assert np.abs(decode(content).astype(int) - upright).max() <= 3
    assert not np.array_equal(upright, SMOOTH)  # the control
    path = tmp_path / f"a.{format.lower()}"
    path.write_bytes(content)
    assert sorted(stored_size(str(path))) == [96, 128]


def test_transparency_becomes_white(format):
    pixels = np.dstack([SMOOTH, np.zeros((96, 128), np.uint8)])
    assert decode(encode(pixels, format)).min() == 255


@promise("heif")
def test_a_truncated_file_is_an_error_and_so_is_a_large_one(format):
    noise = np.random.default_rng(0).integers(0, 256, (96, 128, 3), np.uint8)
    content = encode(noise, format)
    for share in (0.02, 0.1, 0.5, 0.9, 0.99):
        with pytest.raises(DecodeError):
            decode(content[: int(share * len(content))])
    with pytest.raises(DecodeError, match="128 x 96 pixels are more than the limit of 5,000"):
        decode(content, max_pixels=5000)


@promise("heif")
def test_without_pillow_heif_a_line_says_what_to_install(without_heic):
    heic = b"\0\0\0\x18ftypmif1\0\0\0\0mif1heic" + bytes(100)
    install = r"pip install '.\[heic\]' in a checkout of finetune"
    with pytest.raises(DecodeError, match=f"a HEIC image, which needs pillow-heif: {install}"):
        decode(heic)


def test_the_first_of_several_frames_is_read(tmp_path):
    frames = [Image.fromarray(SMOOTH), Image.fromarray(255 - SMOOTH)]
    for name in ("a.gif", "b.webp", "c.png", "d.tif", "e.avif"):
        frames[0].save(tmp_path / name, save_all=True, append_images=frames[1:])
        first = decode(tmp_path / name).astype(int)
        assert np.abs(first - SMOOTH).mean() < 20  # a GIF has few colours
