"""Every format of image, compared with arrays made by hand, Pillow and OpenCV; limits; files that are no images."""

import io
import struct
import warnings
import zlib
from concurrent.futures import ThreadPoolExecutor

import cv2
import numpy as np
import pytest
from drawings import empty_png, progressive
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from image_files import encode
from PIL import Image, ImageOps
from promise import promise
from short_files import png, png_chunk

from finetune.data.decode import DecodeError, begins_like_image, decode, rgb_pixels, stored_size
from finetune.data.limits import MAX_BYTES, MAX_PIXELS, MAX_SCANS

H, W = 24, 40
Y, X = np.mgrid[:H, :W]
# Smooth, so that JPEG keeps it; no symmetry, so that every flip and rotation differs.
RGB = np.stack([X * 6, Y * 10, 255 - X * 3 - Y * 2], axis=-1).astype(np.uint8)
GREY = RGB[..., 0]
GREY_RGB = np.repeat(GREY[..., None], 3, axis=2)

LOSSLESS = {"WEBP": {"lossless": True, "exact": True}, "TIFF": {"compression": "tiff_lzw"}}
MODES = {"PNG": "1 L LA RGB RGBA", "BMP": "1 L RGB", "WEBP": "RGB RGBA", "TIFF": "1 L RGB RGBA"}
KINDS = [(format, mode) for format, modes in MODES.items() for mode in modes.split()]
SIDES = st.integers(1, 20)


def turned(pixels: np.ndarray, orientation: int) -> np.ndarray:
    """EXIF 2.32, tag 274: where the first row and column of the stored pixels belong, said in numpy's words."""
    turns = {1: 0, 2: 0, 3: 2, 4: 2, 5: -1, 6: -1, 7: 1, 8: 1}[orientation]  # by 90 degrees
    upright = np.rot90(pixels, turns)
    return np.fliplr(upright) if orientation in (2, 4, 5, 7) else upright


def exif(orientation: int) -> Image.Exif:
    tags = Image.Exif()
    tags[274] = orientation
    return tags


@given(
    kind=st.sampled_from(KINDS),
    orientation=st.integers(1, 8),
    size=st.tuples(SIDES, SIDES),
    data=st.data(),
)
def test_lossless_formats_give_back_their_pixels_upright_and_on_white(
    kind, orientation, size, data, tmp_path_factory
):
    format, mode = kind
    values = data.draw(arrays(np.uint8, (*size, len(mode))))
    orientation = 1 if format == "BMP" else orientation
    options = {} if format == "BMP" else {"exif": exif(orientation)}
    stored = values[..., 0] > 100 if mode == "1" else values.squeeze(-1) if mode == "L" else values
    compression = {"compression": "group4"} if (format, mode) == ("TIFF", "1") else {}
    content = encode(stored, format, **LOSSLESS.get(format, {}) | compression, **options)
    colour = np.where(values > 100, 255, 0) if mode == "1" else values[..., : len(mode.rstrip("A"))]
    share = values[..., -1:] / 255 if mode.endswith("A") else 1
    expected = np.floor(colour * share + 255 * (1 - share) + 0.5)
    expected = turned(np.broadcast_to(expected, (*size, 3)), orientation)
    path = tmp_path_factory.getbasetemp() / "image.any"  # the content decides, not the suffix
    path.write_bytes(content)
    for source in (path, str(path), content):
        pixels = decode(source)
        np.testing.assert_array_equal(pixels, expected)
        assert pixels.dtype == np.uint8 and pixels.flags.writeable and pixels.flags.c_contiguous
    assert sorted(stored_size(str(path))) == sorted(size) and begins_like_image(content)


JPEGS = st.fixed_dictionaries(
    {"subsampling": st.integers(0, 2), "quality": st.integers(30, 95)},
    optional={
        "progressive": st.just(True),
        "optimize": st.just(True),
        "restart_marker_blocks": st.just(1),
    },
)


@given(
    options=JPEGS,
    orientation=st.integers(1, 8),
    size=st.tuples(SIDES, SIDES),
    is_grey=st.booleans(),
)
def test_jpeg_has_pillows_very_pixels(options, orientation, size, is_grey):
    # sharp, so that every rounding shows
    noise = np.random.default_rng(0).integers(0, 256, (*size, 3), np.uint8)
    content = encode(noise[..., 0] if is_grey else noise, "JPEG", exif=exif(orientation), **options)
    expected = np.asarray(Image.open(io.BytesIO(content)).convert("RGB"))
    np.testing.assert_array_equal(decode(content), turned(expected, orientation))


@pytest.mark.parametrize("subsampling", [0, 2])
def test_jpeg_equals_opencv(subsampling):
    content = encode(RGB, "JPEG", subsampling=subsampling)
    reference = cv2.imdecode(np.frombuffer(content, np.uint8), cv2.IMREAD_COLOR_RGB)
    # One step of tolerance: the two may be built with different versions of libjpeg (ours were bit-identical).
    np.testing.assert_allclose(decode(content).astype(int), reference, atol=1)
    # the control: BGR would be seen
    assert np.abs(decode(content)[..., ::-1].astype(int) - reference).max() > 100
    tables = content.index(b"\xff\xdb")  # bytes where a marker belongs, which simplejpeg refuses
    np.testing.assert_array_equal(
        decode(content[:tables] + b"abc" + content[tables:]), decode(content)
    )


@pytest.mark.parametrize(
    ("format", "transparency", "alpha"),
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
    options = {} if transparency is None else {"transparency": transparency}
    np.testing.assert_array_equal(decode(encode(image, format, **options)), expected)


# Each depth and colour type of a PNG.
DEPTHS = [(1, 0), (2, 0), (4, 0), (8, 0), (16, 0), (8, 2), (16, 2), (1, 3), (2, 3), (4, 3), (8, 3)]
TRANSPARENT = [(bits, kind) for bits, kind in DEPTHS if kind == 3 or bits in (1, 8)]
PNGS = [(*depth, "none") for depth in DEPTHS] + [(*depth, "tRNS") for depth in TRANSPARENT]
PNGS += [(bits, colour_type, "alpha") for bits in (8, 16) for colour_type in (0, 2)]


def rows_of(values: np.ndarray, bits: int) -> list[bytes]:
    """The rows of a PNG of samples (H, W, C) below 2 ** bits, each after the byte of its filter."""
    if bits == 16:
        return [b"\0" + row.astype(">u2").tobytes() for row in values]
    as_bits = np.unpackbits(values.astype(np.uint8)[..., None], axis=-1)[..., 8 - bits :]
    return [b"\0" + np.packbits(row).tobytes() for row in as_bits.reshape(len(values), -1)]


@pytest.mark.parametrize(("bits", "colour_type", "transparency"), PNGS)
def test_a_png_gives_the_same_pixels_whatever_its_depth(bits, colour_type, transparency):
    shape = (H, W, 3 if colour_type == 2 else 1)
    full = 2**bits - 1
    values = np.random.default_rng(bits).integers(0, min(full, 3) + 1, shape) * max(1, full // 3)
    clear = values[values[..., 0] > 0][0]
    is_clear = (values == clear).all(axis=-1, keepdims=True)
    colours = np.random.default_rng(7).integers(0, 256, (full + 1, 3))
    chunks = []
    if colour_type == 3:
        rgb = colours[values[..., 0]]
        chunks.append(png_chunk(b"PLTE", colours.astype(np.uint8).tobytes()))
    else:
        rgb = np.broadcast_to(values >> 8 if bits == 16 else values * 255 // full, (H, W, 3))
    if transparency == "tRNS" and colour_type == 3:
        table = bytes(0 if i == clear[0] else 255 for i in range(full + 1))
        chunks.append(png_chunk(b"tRNS", table))
    elif transparency == "tRNS":
        chunks.append(png_chunk(b"tRNS", clear.astype(">u2").tobytes()))
    elif transparency == "alpha":
        values = np.concatenate([values, np.where(is_clear, 0, full)], axis=-1)
        colour_type += 4
    content = png(rows_of(values, bits), bits, colour_type, *chunks, size=(W, H))
    expected = rgb if transparency == "none" else np.where(is_clear, 255, rgb)
    assert 0.002 < is_clear.mean() < 0.9
    np.testing.assert_array_equal(decode(content), expected)
    np.testing.assert_array_equal(rgb_pixels(Image.open(io.BytesIO(content))), expected)


def test_samples_of_other_kinds_are_refused_also_of_an_open_image():
    for bits, colour_type in set(DEPTHS) - set(TRANSPARENT):  # which Pillow misreads
        values = np.zeros((H, W, 3 if colour_type == 2 else 1), int)
        clear = png_chunk(b"tRNS", bytes(2 * values.shape[-1]))
        content = png(rows_of(values, bits), bits, colour_type, clear, size=(W, H))
        for read in decode, lambda content: rgb_pixels(Image.open(io.BytesIO(content))):
            with pytest.raises(ValueError, match="transparent colour: save it"):
                read(content)
    for dtype in (np.float32, np.int32):
        with pytest.raises(ValueError, match="unsigned samples"):
            rgb_pixels(Image.fromarray(GREY.astype(dtype)))


def test_cmyk_and_ycck():
    ink = np.stack([X * 5, Y * 8, 200 - X * 3, Y * 4], axis=-1).astype(np.uint8)  # 255 is full ink
    image = Image.frombytes("CMYK", (W, H), ink.tobytes())
    printed = (255.0 - ink[..., :3]) * (255.0 - ink[..., 3:]) / 255
    np.testing.assert_allclose(decode(encode(image, "TIFF")), printed, atol=1)
    jpeg = encode(image, "JPEG", quality=100, subsampling=0)
    # quality 100 still rounds the four channels
    np.testing.assert_allclose(decode(jpeg), printed, atol=6)
    # Byte 11 of the Adobe segment: 0 says CMYK; 2 says YCCK, where C, M, Y are kept as YCbCr.
    adobe = jpeg.index(b"Adobe")
    ycck = jpeg[: adobe + 11] + b"\x02" + jpeg[adobe + 12 :]
    y, cb, cr, k = np.moveaxis(255.0 - ink, -1, 0)  # Adobe stores inverted ink
    green = y - 0.344136 * (cb - 128) - 0.714136 * (cr - 128)
    rgb = np.stack([y + 1.402 * (cr - 128), green, y + 1.772 * (cb - 128)], -1)
    # libjpeg converts YCbCr to RGB and calls 255 - RGB the stored C, M, Y, which is RGB again as (inverted) ink.
    expected = (255 - rgb.clip(0, 255)) * k[..., None] / 255
    np.testing.assert_allclose(decode(ycck), expected, atol=6)


# TIFF


def tiff(
    samples: bytes, bits: int, white_is_zero: bool = False, order: str = "<", **more: int
) -> bytes:
    """A TIFF of one strip of H x W grey samples, for the kinds Pillow and OpenCV cannot write."""
    tags = [(256, W), (257, H), (258, bits), (262, 1 - white_is_zero), (273, 158), (278, H)]
    tags += [(279, len(samples)), *((int(tag.removeprefix("tag")), v) for tag, v in more.items())]
    entries = b"".join(struct.pack(f"{order}HHII", tag, 4, 1, value) for tag, value in sorted(tags))
    mark = b"II" if order == "<" else b"MM"
    head = struct.pack(f"{order}2sHIH", mark, 42, 8, len(tags)) + entries + bytes(4)
    return head.ljust(158, b"\0") + samples


@pytest.mark.parametrize("suffix", [".png", ".tiff"])
@pytest.mark.parametrize("channels", [1, 3])
def test_16_bits_keep_their_high_byte(suffix, channels):
    deep = np.random.default_rng(0).integers(0, 2**16, (H, W, channels), dtype=np.uint16)
    content = cv2.imencode(suffix, deep[..., ::-1])[1].tobytes()
    np.testing.assert_array_equal(decode(content), np.broadcast_to(deep >> 8, (H, W, 3)))
    big_endian = encode(deep[..., 0].astype(">u2"), "TIFF")
    np.testing.assert_array_equal(decode(big_endian)[..., 0], deep[..., 0] >> 8)


@pytest.mark.parametrize("white_is_zero", [True, False])
def test_a_tiff_of_16_bits_keeps_its_high_byte_and_one_of_12_is_refused(white_is_zero):
    deep = (GREY.astype("<u2") << 8).tobytes()
    expected = 255 - GREY_RGB if white_is_zero else GREY_RGB
    np.testing.assert_array_equal(decode(tiff(deep, 16, white_is_zero)), expected)
    dark = GREY.astype("<u2") << 4
    with pytest.raises(DecodeError, match="up to 4095 only"):
        decode(tiff(dark.tobytes(), 16, white_is_zero, tag281=4095))
    # Not stated, or stated as no full scale: merely dark, for all that is known.
    for more in ({}, {"tag281": 65535}, {"tag281": int(dark.max())}):
        np.testing.assert_array_equal(decode(tiff(dark.tobytes(), 16, **more)), GREY_RGB >> 4)


UNREAD = ("i1", "i2", "i4", "u4", "f4", "u8", "i8", "f2", "f8", "c8", "void 8", "void 16")


@pytest.mark.parametrize("kind", ["u1", "u2", *UNREAD])
@pytest.mark.parametrize("order", ["<", ">"])
def test_each_sample_format_and_depth_of_a_tiff_is_read_or_refused(kind, order):
    dtype = np.dtype({"void 8": "u1", "void 16": "u2"}.get(kind, kind))
    low, high = 0.0, 1.0
    if (
        dtype.kind in "iu" and dtype.itemsize <= 4
    ):  # float64, in which these are spread, has 53 bits
        low, high = np.iinfo(dtype).min, np.iinfo(dtype).max
    values = np.linspace(low, high, H * W).round(0 if high > 1 else 9).astype(dtype)
    sample_format = 4 if kind.startswith("void") else {"u": 1, "i": 2, "f": 3, "c": 6}[dtype.kind]
    samples = values.astype(dtype.newbyteorder(order)).tobytes()
    for compression, stored in ((1, samples), (8, zlib.compress(samples))):
        tags = {"tag259": compression, "tag339": sample_format}
        content = tiff(stored, 8 * dtype.itemsize, order=order, **tags)
        if kind in UNREAD:
            with pytest.raises(DecodeError, match="unsigned samples"):
                decode(content)
        else:
            wanted = (values.astype(int) >> (8 * dtype.itemsize - 8)).reshape(H, W)
            np.testing.assert_array_equal(decode(content)[..., 0], wanted)


# HEIC, AVIF, and several frames


@pytest.fixture(params=["AVIF", "HEIF"])
def modern(request) -> str:
    if request.param == "HEIF":
        pytest.importorskip("pillow_heif").register_heif_opener()  # writes them
    return request.param


def mirror_what_is_upright(monkeypatch):
    def mirrored(image: Image.Image, **_) -> Image.Image:
        return image.transpose(Image.Transpose.FLIP_LEFT_RIGHT)

    monkeypatch.setattr(ImageOps, "exif_transpose", mirrored)


@promise("heif", controls=[mirror_what_is_upright])
@pytest.mark.parametrize("orientation", [1, 3, 5, 6, 8])
def test_heic_and_avif_give_their_pixels_upright_once(modern, orientation, tmp_path):
    lossless = {
        "AVIF": {"subsampling": "4:4:4", "quality": 100},
        "HEIF": {"chroma": 444, "quality": -1},
    }
    content = encode(RGB, modern, exif=exif(orientation).tobytes(), **lossless[modern])
    assert orientation == 1 or b"irot" in content or b"imir" in content
    # RGB to YCbCr and back rounds twice
    assert np.abs(decode(content).astype(int) - turned(RGB, orientation)).max() <= 3
    (tmp_path / "a.heic").write_bytes(content)
    assert sorted(stored_size(str(tmp_path / "a.heic"))) == [H, W] and begins_like_image(content)
    with pytest.raises(DecodeError, match="limit of 100"):
        decode(content, max_pixels=100)


@promise("heif")
def test_a_heic_or_avif_that_was_cut_is_refused(modern):
    noise = np.random.default_rng(0).integers(0, 256, (96, 128, 3), np.uint8)
    content = encode(noise, modern)
    for share in (0.02, 0.1, 0.5, 0.9, 0.99):
        with pytest.raises(DecodeError):
            decode(content[: int(share * len(content))])


def test_transparency_of_heic_and_avif_becomes_white(modern):
    assert decode(encode(np.dstack([RGB, np.zeros((H, W), np.uint8)]), modern)).min() == 255


@promise("heif")
def test_heic_without_its_package_says_what_to_install(without_heic):
    with pytest.raises(DecodeError, match=r"pillow-heif: pip install '.\[heic\]'"):
        decode(b"\0\0\0\x18ftypmif1\0\0\0\0mif1heic" + bytes(100))


# MPO: several JPEGs, as some phones write
@pytest.mark.parametrize("format", ["GIF", "WEBP", "TIFF", "PNG", "MPO", "AVIF"])
def test_the_first_frame_of_several_is_read(format):
    first, second = Image.fromarray(RGB), Image.fromarray(255 - RGB)
    if format == "GIF":
        first, second = first.quantize(), second.quantize()
    options = {"lossless": True} if format == "WEBP" else {}
    content = encode(first, format, save_all=True, append_images=[second], **options)
    assert Image.open(io.BytesIO(content)).n_frames == 2
    expected = decode(encode(RGB, "JPEG")) if format == "MPO" else np.asarray(first.convert("RGB"))
    difference = np.abs(decode(content).astype(int) - expected)
    assert difference.mean() < 5 if format == "AVIF" else difference.max() == 0


# Limits


def test_the_limit_of_pixels_is_pillows_and_is_checked_in_the_header():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", Image.DecompressionBombWarning)  # from half of it on
        with Image.open(io.BytesIO(empty_png(MAX_PIXELS, 1))) as image:
            assert image.width == MAX_PIXELS
    with pytest.raises(Image.DecompressionBombError):
        Image.open(io.BytesIO(empty_png(MAX_PIXELS + 1, 1)))
    width, height = 14_000, MAX_PIXELS // 14_000 + 1
    fields = (0, 0, 54, 40, width, height, 1, 24, 0, 0, 0, 0, 0, 0)
    tile = tiff(GREY.tobytes(), 8, tag322=2**17, tag323=2**17)
    for content in (struct.pack("<2sIIIIiiHHIIiiII", b"BM", *fields), tile):
        with pytest.raises(DecodeError, match=r"limit of 178,?956,?970"):
            decode(content)
    decode(encode(RGB, "PNG"), max_pixels=H * W)  # the limit itself is allowed
    for content in (encode(RGB, "PNG"), tiff(GREY.tobytes(), 8, tag322=2**12, tag323=2**12)):
        with pytest.raises(DecodeError, match=f"limit of {H * W - 1}"):
            decode(content, max_pixels=H * W - 1)


def test_the_limit_of_bytes_fits_the_largest_image(tmp_path):
    assert MAX_BYTES >= MAX_PIXELS * 4 * 16 // 8
    path = tmp_path / "sparse.png"
    for more in (0, 1):
        path.write_bytes(encode(RGB, "PNG"))
        with open(path, "r+b") as file:
            file.truncate(MAX_BYTES + more)
        if more:
            with pytest.raises(DecodeError, match="bytes are more than the limit"):
                decode(path)
        else:
            decode(path)


@pytest.mark.parametrize("shorter_side", [None, 8])
def test_a_small_jpeg_of_many_scans_cannot_take_hours(shorter_side):
    usual = progressive(0).count(b"\xff\xda")
    assert decode(progressive(MAX_SCANS - usual), shorter_side=shorter_side).ndim == 3
    with pytest.raises(DecodeError, match="more than 100 scans"):
        decode(progressive(MAX_SCANS - usual + 1), shorter_side=shorter_side)
    # What follows a JPEG, such as the video that phones append, or is in its metadata is no scan.
    many = b"\xff\xda" * 200
    comment = b"\xff\xfe" + struct.pack(">H", 2 + len(many)) + many
    content = progressive(0)
    assert (decode(content[:2] + comment + content[2:] + many) == decode(content)).all()


# What is no image


def test_no_warning_and_no_limit_of_pillow_gets_through(monkeypatch):
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 3 * H * W // 4)
    # a text beyond the end
    fields = struct.pack("<2sHIHHHII", b"II", 42, 8, 1, 270, 2, 1000, 5000)
    damaged = encode(RGB, "JPEG", exif=b"Exif\0\0" + fields)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        Image.open(io.BytesIO(damaged))
        categories = {warning.category for warning in caught}
        assert {Image.DecompressionBombWarning, UserWarning} <= categories  # the control
        caught.clear()
        np.testing.assert_array_equal(decode(damaged), decode(encode(RGB, "JPEG")))
    assert not caught


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"\n<!DOCTYPE html><html>", "first bytes are .*html"),
        (b"%PDF-1.7 \xe2\xe3", "first bytes are .*PDF"),
        (b"", "empty"),
        (b"\0\0\0\x18ftypisom\0\0\0\0mif1heic" + bytes(100), "video"),
    ],
)
def test_a_file_that_is_no_image_is_named(content, words, tmp_path):
    (tmp_path / "a.jpg").write_bytes(content)
    with pytest.raises(DecodeError, match=words) as caught:
        decode(tmp_path / "a.jpg")
    assert str(tmp_path / "a.jpg") in str(caught.value) and "\n" not in str(caught.value)


def test_a_path_that_is_no_file_is_named(tmp_path):
    (tmp_path / "folder.png").mkdir()
    for name, reason in {"missing\n.jpg": "No such file", "folder.png": "directory"}.items():
        with pytest.raises(DecodeError, match=reason) as caught:
            decode(tmp_path / name)
        assert "\n" not in str(caught.value)
    assert stored_size(str(tmp_path / "missing.jpg")) == (0, 0)


def test_threads_get_the_same_pixels():
    contents = [
        encode(RGB, format) for format in ("JPEG", "PNG", "WEBP", "BMP", "TIFF", "GIF")
    ] * 20
    with ThreadPoolExecutor(8) as pool:
        for content, pixels in zip(contents, pool.map(decode, contents), strict=True):
            np.testing.assert_array_equal(pixels, decode(content))
