"""HEIC and AVIF images are read by the rules of the other formats: upright, complete, within limits."""

import io
import sys

import numpy as np
import pytest
from image_files import encode
from PIL import ExifTags, Image

from finetune.data import heif
from finetune.data.decode import DecodeError, begins_like_image, decode, stored_size
from finetune.data.frames import frames_line, has_several_frames
from finetune.data.heif import heif_kind, missing_reader, readable_suffixes

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
    assert heif_kind(content[:64]) == {"AVIF": "AVIF", "HEIF": "HEIC"}[format]
    assert begins_like_image(content)
    np.testing.assert_array_equal(found, np.asarray(Image.open(io.BytesIO(content)).convert("RGB")))


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


def test_a_truncated_file_is_an_error_and_so_is_a_large_one(format):
    noise = np.random.default_rng(0).integers(0, 256, (96, 128, 3), np.uint8)
    content = encode(noise, format)
    for share in (0.02, 0.1, 0.5, 0.9, 0.99):
        with pytest.raises(DecodeError):
            decode(content[: int(share * len(content))])
    with pytest.raises(DecodeError, match="128 x 96 pixels are more than the limit of 5,000"):
        decode(content, max_pixels=5000)


def test_without_their_readers_a_line_says_what_to_install(monkeypatch, without_heic):
    heic = b"\0\0\0\x18ftypmif1\0\0\0\0mif1heic" + bytes(100)
    install = "pip install '.[heic]' in a checkout of finetune"
    assert missing_reader("HEIC") == f"HEIC, which needs pillow-heif: {install}"
    with pytest.raises(DecodeError) as caught:
        decode(heic)
    assert str(caught.value) == f"image: cannot be decoded: it is {missing_reader('HEIC')}"
    assert not begins_like_image(heic) and not readable_suffixes() & {".heic", ".heif", ".hif"}
    monkeypatch.setattr(heif, "_avif_reader", lambda: None)
    with pytest.raises(
        DecodeError, match="AVIF, which needs a newer Pillow: pip install --upgrade"
    ):
        decode(encode(SMOOTH, "AVIF"))


def test_the_package_is_only_imported_for_a_heic_image(monkeypatch, tmp_path):
    monkeypatch.setattr(heif, "_PACKAGES", ("reader_of_heic",))
    monkeypatch.syspath_prepend(tmp_path)
    lines = "class HeifImageFile: pass\nclass options: pass\n"
    (tmp_path / "reader_of_heic.py").write_text(lines)
    heif._heic_reader.cache_clear()
    assert ".heic" in readable_suffixes() and decode(encode(SMOOTH, "PNG")).shape == SMOOTH.shape
    assert "reader_of_heic" not in sys.modules
    assert heif.heif_reader("HEIC").__module__ == "reader_of_heic"
    heif._heic_reader.cache_clear()
    monkeypatch.delitem(sys.modules, "reader_of_heic")


SEVERAL = {
    "a.gif": {},
    "b.webp": {},
    "c.png": {},
    "d.tif": {"compression": "tiff_lzw"},
    "e.avif": {},
}


def test_files_with_several_frames_are_counted_in_a_line(tmp_path):
    frames = [Image.fromarray(SMOOTH), Image.fromarray(255 - SMOOTH)]
    paths = []
    for name, options in SEVERAL.items():
        for folder, others in (("one", []), ("two", frames[1:])):
            path = tmp_path / folder / name
            path.parent.mkdir(exist_ok=True)
            frames[0].save(path, save_all=bool(others), append_images=others, **options)
            assert has_several_frames(str(path)) == bool(others), path
            paths.append(str(path))
        first = decode(tmp_path / "two" / name).astype(int)
        assert np.abs(first - SMOOTH).mean() < 20  # the first frame; a GIF has few colours
    (tmp_path / "f.jpg").write_bytes(encode(SMOOTH, "JPEG"))
    (tmp_path / "g.gif").write_bytes(b"GIF8")
    lines = frames_line([*paths, str(tmp_path / "f.jpg"), str(tmp_path / "g.gif")])
    assert lines == (
        f"5 images have several frames or pages, for example {tmp_path / 'two/a.gif'}: "
        "only the first frame or page is used"
    )
    assert frames_line(paths[::2]) == ""
    assert frames_line(paths[1:2]).startswith("1 image has several frames")
    assert frames_line(paths[1:2] * 2001).startswith("2,000 of 2,000 sampled images have")
