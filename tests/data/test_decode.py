"""Every format, compared with arrays made by hand or read by OpenCV, and every kind of broken file."""

import io
import os
import struct
import subprocess
import sys
import warnings
import zlib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from unittest.mock import patch

import cv2
import numpy as np
import pytest
from image_files import encode, in_memory
from PIL import Image
from short_files import png, png_chunk

from finetune.data import completeness
from finetune.data import decode as module
from finetune.data.decode import IMAGE_SUFFIXES, MAX_PIXELS, DecodeError, decode, rgb_pixels

H, W = 24, 40
Y, X = np.mgrid[:H, :W]
# Smooth, so that JPEG keeps it; no symmetry, so that every flip and rotation differs.
RGB = np.stack([X * 6, Y * 10, 255 - X * 3 - Y * 2], axis=-1).astype(np.uint8)
GREY = RGB[..., 0]
GREY_RGB = np.repeat(GREY[..., None], 3, axis=2)


def tiff(
    samples: bytes, bits: int, white_is_zero: bool = False, order: str = "<", **more: int
) -> bytes:
    """A TIFF of one strip of H x W grey samples, for the kinds Pillow and OpenCV cannot write."""
    tags = [
        (256, W),
        (257, H),
        (258, bits),
        (262, 1 - white_is_zero),
        (273, 158),
        (278, H),
        (279, len(samples)),
    ]
    tags += [(int(tag.removeprefix("tag")), value) for tag, value in more.items()]
    entries = b"".join(struct.pack(f"{order}HHII", tag, 4, 1, value) for tag, value in sorted(tags))
    head = (
        struct.pack(f"{order}2sHIH", b"II" if order == "<" else b"MM", 42, 8, len(tags))
        + entries
        + bytes(4)
    )
    return head.ljust(158, b"\0") + samples


@pytest.mark.parametrize("format", ["PNG", "BMP", "WEBP", "TIFF"])
def test_lossless_formats_give_back_their_pixels(tmp_path, format):
    path = tmp_path / "image.any"  # the content decides, not the suffix
    options = {"WEBP": {"lossless": True}, "TIFF": {"compression": "tiff_lzw"}}.get(format, {})
    path.write_bytes(encode(RGB, format, **options))
    for source in (path, str(path), path.read_bytes()):
        pixels = decode(source)
        np.testing.assert_array_equal(pixels, RGB)
        assert pixels.dtype == np.uint8 and pixels.flags.writeable and pixels.flags.c_contiguous


@pytest.mark.parametrize("progressive", [False, True])
@pytest.mark.parametrize("subsampling", [0, 2])
def test_jpeg_equals_opencv(progressive, subsampling):
    content = encode(RGB, "JPEG", progressive=progressive, subsampling=subsampling)
    reference = cv2.imdecode(np.frombuffer(content, np.uint8), cv2.IMREAD_COLOR_RGB)
    # One step of tolerance: the two may be built with different versions of libjpeg (ours were bit-identical).
    np.testing.assert_allclose(decode(content).astype(int), reference, atol=1)
    # BGR would be seen
    assert np.abs(decode(content)[..., ::-1].astype(int) - reference).max() > 100


@pytest.mark.parametrize(
    "options", [{}, {"progressive": True}, {"restart_marker_blocks": 1}, {"optimize": True}]
)
@pytest.mark.parametrize("subsampling", [0, 1, 2])
@pytest.mark.parametrize("size", [(24, 40), (17, 33), (1, 1), (64, 7)])
def test_jpeg_has_pillow_s_very_pixels(options, subsampling, size):
    # sharp, so that every rounding shows
    noise = np.random.default_rng(0).integers(0, 256, (*size, 3), np.uint8)
    for pixels, more in (noise, {"subsampling": subsampling}), (noise[..., 0], {}):
        content = encode(pixels, "JPEG", **options, **more)
        np.testing.assert_array_equal(
            decode(content), np.asarray(Image.open(io.BytesIO(content)).convert("RGB"))
        )


def test_pillow_decodes_only_the_jpegs_that_are_unusual(monkeypatch):
    loads = []
    load = module.load
    monkeypatch.setattr(
        module, "load", lambda image, file: loads.append(image.mode) or load(image, file)
    )
    sound = encode(RGB, "JPEG")
    for content in sound, encode(GREY, "JPEG"):
        decode(content)
    assert loads == []
    tables = sound.index(b"\xff\xdb")
    decode(sound[:tables] + b"abc" + sound[tables:])  # bytes where a marker belongs
    decode(encode(Image.new("CMYK", (W, H)), "JPEG"))
    assert loads == ["RGB", "CMYK"]


@pytest.mark.parametrize("format", ["JPEG", "PNG", "WEBP", "TIFF"])
@pytest.mark.parametrize("orientation", range(1, 9))
def test_exif_orientation(format, orientation):
    # EXIF 2.32, tag 274: where the first row and column of the stored pixels belong, said in numpy's words.
    # by 90 degrees, counter-clockwise
    turns = {1: 0, 2: 0, 3: 2, 4: 2, 5: -1, 6: -1, 7: 1, 8: 1}[orientation]
    mirrored = orientation in (2, 4, 5, 7)  # afterwards, left to right
    exif = Image.Exif()
    exif[274] = orientation
    options = {"JPEG": {"quality": 95, "subsampling": 0}, "WEBP": {"lossless": True}}.get(
        format, {}
    )
    content = encode(RGB, format, exif=exif, **options)
    expected = np.rot90(decode(encode(RGB, format, **options)), turns)
    expected = np.fliplr(expected) if mirrored else expected
    np.testing.assert_array_equal(decode(content), expected)
    if format == "JPEG" and orientation > 1:  # Pillow alone leaves the image lying
        assert not np.array_equal(Image.open(io.BytesIO(content)), expected)


def test_grey_and_one_bit():
    np.testing.assert_array_equal(decode(encode(GREY, "PNG")), GREY_RGB)
    expected = np.where(GREY_RGB > 100, 255, 0)
    np.testing.assert_array_equal(decode(encode(GREY > 100, "PNG")), expected)
    np.testing.assert_array_equal(
        decode(encode(GREY > 100, "TIFF", compression="group4")), expected
    )


@pytest.mark.parametrize("format", ["PNG", "WEBP", "TIFF"])
def test_alpha_lies_on_white(format):
    colour, alpha = np.mgrid[:256, :256].astype(np.uint8)
    rgba = np.stack([colour, 255 - colour, colour, alpha], axis=-1)
    share = alpha[..., None] / 255
    expected = np.floor(rgba[..., :3] * share + 255 * (1 - share) + 0.5)
    # exact: also where nothing is seen
    options = {"lossless": True, "exact": True} if format == "WEBP" else {}
    np.testing.assert_array_equal(decode(encode(rgba, format, **options)), expected)
    if format == "PNG":
        grey = np.stack([colour, alpha], axis=-1)
        np.testing.assert_array_equal(decode(encode(grey, "PNG"))[..., 0], expected[..., 0])
    assert np.any(
        np.asarray(Image.fromarray(rgba).convert("RGB")) != expected
    )  # dropping alpha shows what lies beneath


@pytest.mark.parametrize(
    "format, transparency, alpha",
    [(format, None, [255, 255, 255]) for format in ("PNG", "GIF")]
    + [(format, 1, [255, 0, 255]) for format in ("PNG", "GIF")]
    + [("PNG", bytes([255, 0, 128]), [255, 0, 128])],
)
def test_palette(format, transparency, alpha):
    colours = np.array([[250, 10, 20], [0, 90, 200], [40, 160, 0]], np.uint8)
    index = (X // 4 % 3).astype(np.uint8)
    image = Image.frombytes("P", (W, H), index.tobytes())
    image.putpalette(colours.tobytes())
    share = np.array(alpha)[:, None] / 255
    expected = np.floor(colours * share + 255 * (1 - share) + 0.5)[index]
    content = (
        encode(image, format)
        if transparency is None
        else encode(image, format, transparency=transparency)
    )
    np.testing.assert_array_equal(decode(content), expected)


# Each depth and colour type of a PNG.
DEPTHS = [(1, 0), (2, 0), (4, 0), (8, 0), (16, 0), (8, 2), (16, 2), (1, 3), (2, 3), (4, 3), (8, 3)]
TRANSPARENT = [(bits, kind) for bits, kind in DEPTHS if kind == 3 or bits in (1, 8)]
PNGS = [(*depth, "none") for depth in DEPTHS] + [(*depth, "tRNS") for depth in TRANSPARENT]
PNGS += [(bits, colour_type, "alpha") for bits in (8, 16) for colour_type in (0, 2)]


def stored(values: np.ndarray, bits: int) -> list[bytes]:
    """The rows of a PNG of samples (H, W, C) below 2 ** bits, each after the byte of its filter."""
    if bits == 16:
        return [b"\0" + row.astype(">u2").tobytes() for row in values]
    as_bits = np.unpackbits(values.astype(np.uint8)[..., None], axis=-1)[..., 8 - bits :]
    return [b"\0" + np.packbits(row).tobytes() for row in as_bits.reshape(len(values), -1)]


@pytest.mark.parametrize("source", ["bytes", "PIL"])
@pytest.mark.parametrize(("bits", "colour_type", "transparency"), PNGS)
def test_a_png_gives_the_same_pixels_whatever_its_depth(bits, colour_type, transparency, source):
    num_channels = 3 if colour_type == 2 else 1
    full = 2**bits - 1
    values = np.random.default_rng(bits).integers(0, min(full, 3) + 1, (H, W, num_channels)) * max(
        1, full // 3
    )
    clear = values[values[..., 0] > 0][0]
    is_clear = (values == clear).all(axis=-1, keepdims=True)
    colours = np.random.default_rng(7).integers(0, 256, (full + 1, 3)) if colour_type == 3 else None
    if colours is not None:
        rgb = colours[values[..., 0]]
    else:
        rgb = np.broadcast_to(values >> 8 if bits == 16 else values * 255 // full, (H, W, 3))
    chunks = [png_chunk(b"PLTE", colours.astype(np.uint8).tobytes())] if colours is not None else []
    if transparency == "tRNS" and colour_type == 3:
        chunks.append(
            png_chunk(b"tRNS", bytes(0 if i == clear[0] else 255 for i in range(full + 1)))
        )
    elif transparency == "tRNS":
        chunks.append(png_chunk(b"tRNS", clear.astype(">u2").tobytes()))
    elif transparency == "alpha":
        values = np.concatenate([values, np.where(is_clear, 0, full)], axis=-1)
        colour_type += 4
    content = png(stored(values, bits), bits, colour_type, *chunks, size=(W, H))
    expected = rgb if transparency == "none" else np.where(is_clear, 255, rgb)
    assert 0.002 < is_clear.mean() < 0.9
    np.testing.assert_array_equal(
        decode(content) if source == "bytes" else rgb_pixels(Image.open(io.BytesIO(content))),
        expected,
    )


@pytest.mark.parametrize("source", ["bytes", "PIL"])
@pytest.mark.parametrize(
    ("bits", "colour_type"), [depth for depth in DEPTHS if depth not in TRANSPARENT]
)
def test_a_transparent_colour_that_pillow_misreads_is_refused(bits, colour_type, source):
    values = np.zeros((H, W, 3 if colour_type == 2 else 1), int)
    clear = png_chunk(b"tRNS", bytes(2 * values.shape[-1]))
    content = png(stored(values, bits), bits, colour_type, clear, size=(W, H))
    with pytest.raises(ValueError, match="2, 4 or 16 bits with a transparent colour: save it"):
        decode(content) if source == "bytes" else rgb_pixels(Image.open(io.BytesIO(content)))


def test_cmyk_and_ycck():
    ink = np.stack([X * 5, Y * 8, 200 - X * 3, Y * 4], axis=-1).astype(np.uint8)  # 255 is full ink
    image = Image.frombytes("CMYK", (W, H), ink.tobytes())
    printed = (255.0 - ink[..., :3]) * (255.0 - ink[..., 3:]) / 255
    np.testing.assert_allclose(decode(encode(image, "TIFF")), printed, atol=1)
    jpeg = encode(image, "JPEG", quality=100, subsampling=0)
    adobe = jpeg.index(b"Adobe")
    # quality 100 still rounds the four channels
    np.testing.assert_allclose(decode(jpeg), printed, atol=6)

    # Byte 11 of the Adobe segment: 0 says CMYK; 2 says YCCK, where C, M, Y are kept as YCbCr.
    ycck = jpeg[: adobe + 11] + b"\x02" + jpeg[adobe + 12 :]
    y, cb, cr, k = np.moveaxis(255.0 - ink, -1, 0)  # Adobe stores inverted ink
    rgb = np.stack(
        [
            y + 1.402 * (cr - 128),
            y - 0.344136 * (cb - 128) - 0.714136 * (cr - 128),
            y + 1.772 * (cb - 128),
        ],
        -1,
    )
    # libjpeg converts YCbCr to RGB and calls 255 - RGB the stored C, M, Y, which is RGB again as (inverted) ink.
    expected = (255 - rgb.clip(0, 255)) * k[..., None] / 255
    np.testing.assert_allclose(decode(ycck), expected, atol=6)


@pytest.mark.parametrize("suffix", [".png", ".tiff"])
@pytest.mark.parametrize("channels", [1, 3])
def test_16_bits_keep_their_high_byte(suffix, channels):
    deep = np.random.default_rng(0).integers(0, 2**16, (H, W, channels), dtype=np.uint16)
    np.testing.assert_array_equal(
        decode(cv2.imencode(suffix, deep[..., ::-1])[1].tobytes()),
        np.broadcast_to(deep >> 8, (H, W, 3)),
    )
    big_endian = encode(deep[..., 0].astype(">u2"), "TIFF")
    np.testing.assert_array_equal(decode(big_endian)[..., 0], deep[..., 0] >> 8)


def test_rare_tiffs():
    deep = GREY.astype("<u2") << 8
    np.testing.assert_array_equal(decode(tiff(deep.tobytes(), 16, white_is_zero=False)), GREY_RGB)
    np.testing.assert_array_equal(
        decode(tiff(deep.tobytes(), 16, white_is_zero=True)), 255 - GREY_RGB
    )


@pytest.mark.parametrize("white_is_zero", [True, False])
def test_a_tiff_whose_16_bits_stop_at_12_is_refused(white_is_zero):
    dark = GREY.astype("<u2") << 4
    with pytest.raises(DecodeError, match="its samples of 16 bits go up to 4095 only: save it"):
        decode(tiff(dark.tobytes(), 16, white_is_zero, tag281=4095))
    # Not stated, or stated as no full scale: merely dark, for all that is known.
    for content in (
        tiff(dark.tobytes(), 16),
        tiff(dark.tobytes(), 16, tag281=65535),
        tiff(dark.tobytes(), 16, tag281=int(dark.max())),
        encode(dark, "PNG"),
    ):
        np.testing.assert_array_equal(decode(content), GREY_RGB >> 4)


@pytest.mark.parametrize("order", ["<", ">"])
@pytest.mark.parametrize("compression", [1, 8])
@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("u1", lambda values: values),
        ("u2", lambda values: values // 256),
        *[(kind, None) for kind in ("i1", "i2", "i4", "u4", "f4", "u8", "i8", "f2", "f8", "c8")],
        *[(kind, None) for kind in ("void 8", "void 16")],
    ],
)
def test_each_sample_format_and_depth_is_read_or_refused(kind, expected, compression, order):
    dtype = np.dtype("u1" if kind == "void 8" else "u2" if kind == "void 16" else kind)
    # float64, in which these are spread, has 53 bits
    if dtype.kind in "iu" and dtype.itemsize <= 4:
        values = np.linspace(np.iinfo(dtype).min, np.iinfo(dtype).max, H * W).round().astype(dtype)
    else:
        values = np.linspace(0, 1, H * W).astype(dtype)
    sample_format = 4 if kind.startswith("void") else {"u": 1, "i": 2, "f": 3, "c": 6}[dtype.kind]
    samples = values.astype(dtype.newbyteorder(order)).tobytes()
    if compression == 8:
        samples = zlib.compress(samples)
    content = tiff(
        samples, 8 * dtype.itemsize, order=order, tag259=compression, tag339=sample_format
    )
    if expected is None:
        with pytest.raises(DecodeError, match="unknown pixel mode|save it with unsigned samples"):
            decode(content)
    else:
        wanted = expected(values.astype(int)).reshape(H, W)
        np.testing.assert_array_equal(decode(content)[..., 0], wanted)


@pytest.mark.parametrize("dtype", [np.float32, np.int32])
def test_an_open_image_of_32_bits_is_refused(dtype):
    with pytest.raises(ValueError, match="save it with unsigned samples"):
        rgb_pixels(Image.fromarray(GREY.astype(dtype)))


# MPO: several JPEGs, as some phones write
@pytest.mark.parametrize("format", ["GIF", "WEBP", "TIFF", "PNG", "MPO"])
def test_first_frame_of_several(format):
    first, second = Image.fromarray(RGB), Image.fromarray(255 - RGB)
    if format == "GIF":
        first, second = first.quantize(), second.quantize()
    options = {"lossless": True} if format == "WEBP" else {}
    content = encode(first, format, save_all=True, append_images=[second], **options)
    assert Image.open(io.BytesIO(content)).n_frames == 2
    expected = decode(encode(RGB, "JPEG")) if format == "MPO" else np.asarray(first.convert("RGB"))
    np.testing.assert_array_equal(decode(content), expected)


@pytest.mark.parametrize("format", ["JPEG", "PNG", "WEBP", "BMP", "TIFF", "GIF"])
def test_no_truncated_file_gives_other_pixels(format):
    content = encode(RGB, format)
    full = decode(content)
    with pytest.raises(DecodeError):
        decode(content[: len(content) * 3 // 4])
    for length in range(0, len(content), 7):
        try:
            pixels = decode(content[:length], name="half")
        except DecodeError as error:
            assert str(error).startswith("half: cannot be decoded: ") and "\n" not in str(error)
        else:  # only what follows the pixels was missing
            np.testing.assert_array_equal(pixels, full)


def test_pixel_limit_is_checked_in_the_header(monkeypatch):
    width, height = 14_000, MAX_PIXELS // 14_000 + 1
    header = struct.pack(
        "<2sIIIIiiHHIIiiII", b"BM", 0, 0, 54, 40, width, height, 1, 24, 0, 0, 0, 0, 0, 0
    )
    with pytest.raises(
        DecodeError, match="14000 x 12783 pixels are more than the limit of 178,956,970"
    ):
        decode(header)
    monkeypatch.setattr(module, "MAX_PIXELS", H * W)
    decode(encode(RGB, "PNG"))  # the limit itself is allowed
    monkeypatch.setattr(module, "MAX_PIXELS", H * W - 1)
    with pytest.raises(DecodeError, match="more than the limit"):
        decode(encode(RGB, "PNG"))
    monkeypatch.undo()
    decode(encode(RGB, "PNG"), max_pixels=H * W)
    with pytest.raises(DecodeError, match=f"more than the limit of {H * W - 1}"):
        decode(encode(RGB, "PNG"), max_pixels=H * W - 1)


def test_files_and_tiles_have_a_limit_too(monkeypatch):
    large = tiff(GREY.tobytes(), 8, tag322=2**17, tag323=2**17)
    with pytest.raises(DecodeError, match="131072 x 131072 pixels are more than the limit"):
        decode(large)
    with pytest.raises(
        DecodeError, match="4096 x 4096 pixels are more than the limit of 1,000,000"
    ):
        decode(tiff(GREY.tobytes(), 8, tag322=2**12, tag323=2**12), max_pixels=1e6)
    content = encode(RGB, "PNG")
    monkeypatch.setattr(module, "MAX_BYTES", len(content) - 1)
    with pytest.raises(DecodeError, match=f"{len(content):,} bytes are more than the limit"):
        decode(content)
    monkeypatch.setattr(module, "MAX_BYTES", len(content))
    decode(content)


def kind_of(kind: str, side: int) -> bytes:
    """A square image that is converted, or takes more memory than its pixels."""
    grey = np.tile(np.arange(side, dtype=np.uint8), (side, 1))
    if kind in ("RGB", "RGBA", "LA", "CMYK", "rotated"):
        bands = [Image.fromarray(grey.T), *[Image.fromarray(grey)] * 3]
        mode = "RGB" if kind == "rotated" else kind
        image = Image.merge(mode, bands[: len(mode)])
        rotated = Image.Exif()
        rotated[274] = 6 if kind == "rotated" else 1
        return encode(image, "TIFF" if kind in ("CMYK", "rotated") else "PNG", exif=rotated)
    if kind == "P":
        return encode(Image.fromarray(grey).convert("P"), "PNG", transparency=3)
    return encode(grey.T.astype(np.uint16) * 257, "TIFF", compression="tiff_lzw")


@pytest.mark.parametrize("kind", ["RGB", "RGBA", "LA", "P", "CMYK", "rotated", "I;16"])
def test_strips_change_no_pixel(kind, monkeypatch):
    content = kind_of(kind, 50)
    full = decode(content)
    assert full.std() > 5
    monkeypatch.setattr(module, "_AT_ONCE", 50 * 7)  # the last is smaller
    np.testing.assert_array_equal(decode(content), full)


# Bytes a pixel: what Pillow holds (4, or 2), the result (3) and some room. All at once it would be 15 and 12.
@pytest.mark.slow
@pytest.mark.skipif(
    not Path("/proc/self/clear_refs").exists(), reason="Linux says how much memory a process has"
)
@pytest.mark.parametrize(("kind", "most"), [("RGBA", 9), ("I;16", 7)])
def test_a_large_image_takes_little_more_memory_than_its_pixels(kind, most, monkeypatch):
    # 6 million pixels; the decoders' own buffers and what malloc asks for ahead
    side, more = 2500, 2**24
    content = kind_of(kind, side)
    for strip, fits in ((2**18, True), (side**2, False)):  # the second is the control
        monkeypatch.setattr(module, "_AT_ONCE", strip)
        assert in_memory(most * side**2 + more, lambda: decode(content)) == fits


@pytest.mark.slow
@pytest.mark.skipif(
    not Path("/proc/self/clear_refs").exists(), reason="Linux says how much memory a process has"
)
def test_a_second_look_at_a_large_image_takes_little_more_memory():
    """In a new interpreter, because memory that other tests have used would count."""
    code = f"import sys; sys.path[:0] = {sys.path!r}; import test_decode; print(test_decode.second_look_fits())"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=Path(__file__).parent, capture_output=True, text=True
    )
    assert done.stdout == "True\n", done.stderr


def second_look_fits() -> bool:
    """Whether decoding a large JPEG with a warning, which is read twice, takes at most 9 bytes a pixel."""
    side = 2500
    most = 9
    more = 2**24
    grey = np.tile(np.arange(side, dtype=np.uint8), (side, 1))
    pixels = np.stack([grey, grey.T, grey], axis=-1)
    content = encode(pixels, "JPEG")
    tables = content.index(b"\xff\xdb")
    content = content[:tables] + b"abc" + content[tables:]
    with patch.object(module, "_AT_ONCE", 2**18), patch.object(completeness, "_AT_ONCE", 2**18):
        return in_memory(most * side**2 + more, lambda: decode(content))


def test_no_warning_and_no_limit_of_pillow_gets_through(monkeypatch):
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 3 * H * W // 4)
    # a text beyond the end
    exif = b"Exif\0\0" + struct.pack("<2sHIHHHII", b"II", 42, 8, 1, 270, 2, 1000, 5000)
    damaged = encode(RGB, "JPEG", exif=exif)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        Image.open(io.BytesIO(damaged))
        assert {Image.DecompressionBombWarning, UserWarning} <= {
            warning.category for warning in caught
        }
        caught.clear()
        np.testing.assert_array_equal(decode(damaged), decode(encode(RGB, "JPEG")))
    assert not caught


def test_files_that_are_no_images(tmp_path, monkeypatch):
    (tmp_path / "text.jpg").write_text("not an image")
    (tmp_path / "empty.png").touch()
    (tmp_path / "folder.png").mkdir()
    reasons = {
        "missing.jpg": "No such file",
        "text.jpg": "not a JPEG",
        "empty.png": "empty",
        "folder.png": "directory",
    }
    for name, reason in reasons.items():
        with pytest.raises(DecodeError, match=reason) as caught:
            decode(tmp_path / name)
        assert str(caught.value).startswith(f"{tmp_path / name}: cannot be decoded: ")

    def refuse(*_):  # root, as in a container, may read everything, so mode bits cannot stage this
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(os, "open", refuse)
    with pytest.raises(DecodeError, match="text.jpg: cannot be decoded: Permission denied$"):
        decode(tmp_path / "text.jpg")


def test_a_film_of_the_family_of_heic_is_no_image():
    film = b"\0\0\0\x18ftypisom\0\0\0\0mif1heic" + bytes(100)
    with pytest.raises(DecodeError, match="it is a video"):
        decode(film)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"\n<!DOCTYPE html><html>", "it is a web page"),
        (b"%PDF-1.7 \xe2\xe3", "it is a PDF"),
        (b"<svg xmlns='http'>", "it is SVG or XML"),
        (b"plain words in a file", "it is a text file"),
        (b"PK\x03\x04\x14\x00\x06\x00", "it is a ZIP archive"),
        (bytes(range(1, 20)), "unknown format, first bytes 01 02 03"),
    ],
)
def test_what_is_no_image_is_named_in_words(content, words):
    with pytest.raises(DecodeError) as caught:
        decode(content)
    assert words in str(caught.value) and "b'" not in str(caught.value)


def test_threads_get_the_same_pixels():
    contents = [
        encode(RGB, format) for format in ("JPEG", "PNG", "WEBP", "BMP", "TIFF", "GIF")
    ] * 20
    with ThreadPoolExecutor(8) as pool:
        for content, pixels in zip(contents, pool.map(decode, contents), strict=True):
            np.testing.assert_array_equal(pixels, decode(content))


def test_suffixes_are_lower_case():
    assert {".jpg", ".tiff"} < IMAGE_SUFFIXES == {suffix.lower() for suffix in IMAGE_SUFFIXES}
