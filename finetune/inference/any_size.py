"""Image preparation as an ONNX graph in front of a network, so that a file accepts images of any size.

The graph computes bit for bit what `eval_transform` computes by `data/resize`. That uses two
libraries, which both compute with integers:
- torch, if a side gets smaller: weights of 16 bits, rounded to bytes after each direction.
- OpenCV, if no side gets smaller: weights of 11 bits.

There is one exception: an image with more than `MAX_PIXELS` / side rows (about 700,000), where side
is the side that it is resized to. `resize` processes it in another order, and the result differs by
at most one grey level.
"""

from pathlib import Path
from typing import Any

import onnx
from onnx import compose, inliner
from onnxscript import UINT8, opset20, script

from finetune.data.limits import MAX_PIXELS
from finetune.data.resize import PADDING
from finetune.data.transforms import CROP_SHARE, ResizeMode, resized_side
from finetune.inference.onnx_session import PREPARED

pixel: Any = UINT8
op: Any = opset20  # as the exporters write it
BYTE: int = onnx.TensorProto.UINT8
INT: int = onnx.TensorProto.INT32
LONG: int = onnx.TensorProto.INT64
BOOL: int = onnx.TensorProto.BOOL
DOUBLE: int = onnx.TensorProto.DOUBLE
FLOAT: int = onnx.TensorProto.FLOAT

# Shapes: N images of H x W pixels; S is the side of the result. Lengths are float64 scalars. `first` and `size` are
# int64 of shape (1,): the centre crop starts at pixel `first` of the resized side and has `size` pixels.


def prepend(
    source: Path, target: Path, image_size: int, resize: ResizeMode, crop_share: float = CROP_SHARE
) -> None:
    """Write a copy of an .onnx whose `images` (N, H, W, 3) may have any H and W, resized bilinearly.

    Args:
        source: A file that takes prepared `images` (N, S, S, 3) uint8.
        target: The copy.
        image_size: S, in pixels.
        resize: Resize mode, as in `data.resize`.
        crop_share: As in `data.crop_share`.
    """
    model = onnx.load(source)
    prepared: list[Any] = ["batch", image_size, image_size, 3]
    first = _preparation(image_size, resize, crop_share).to_model_proto(
        ir_version=model.ir_version,
        input_types=[pixel["batch", "height", "width", 3]],
        output_types=[pixel[*prepared]],
    )
    first = inliner.inline_local_functions(first)
    del first.graph.value_info[:]  # these have no types
    first = compose.add_prefix(first, "preparation/", rename_inputs=False, rename_outputs=False)
    joined = compose.merge_models(first, model, io_map=[(PREPARED, "images")])
    # `onnx_session` cuts the graph at this tensor.
    joined.graph.value_info.append(onnx.helper.make_tensor_value_info(PREPARED, BYTE, prepared))
    onnx.helper.set_model_props(joined, {prop.key: prop.value for prop in model.metadata_props})
    onnx.checker.check_model(joined)
    onnx.save_model(joined, target)


@script()
def _kernel(num_in, num_out):
    """Return the k source pixels that each of `num_out` pixels averages, and their weights, both (num_out, k)."""
    scale = num_in / num_out
    reach = op.Max(scale, 1.0)
    centre = op.Unsqueeze(scale * (op.Range(0.0, num_out, 1.0) + 0.5), [1])
    lowest = op.Max(op.Floor(centre - reach + 0.5), 0.0)
    end = op.Min(op.Floor(centre + reach + 0.5), num_in)
    taps = lowest + op.Range(0.0, 2.0 * op.Ceil(reach) + 1.0, 1.0)
    triangle = op.Max(1.0 - op.Abs((taps - centre + 0.5) / reach), 0.0)
    triangle = op.Where(taps < end, triangle, 0.0 * triangle)
    return op.Cast(taps, to=LONG), triangle / op.ReduceSum(triangle, [1])


@script()
def _averages(num_in, num_out, first, size):
    """Return the integer weights of `size` of the `num_out` pixels, and the integer that stands for weight 1.

    The weights are two byte matrices (size, num_in), `coarse` and `fine`: a weight is 256 * coarse + fine.
    torch chooses the number of fractional bits such that the largest weight stays below 2**15, but at most 22.
    """
    taps, shares = _kernel(num_in, num_out)
    two = 2.0 + 0.0 * num_in
    powers = op.Pow(two, op.Range(1.0, 23.0, 1.0))
    fits = op.Floor(op.ReduceMax(shares, keepdims=0) * powers + 0.5) < 32768.0
    unit = op.Pow(two, op.ReduceSum(op.Cast(fits, to=DOUBLE), keepdims=0))
    weights = op.Floor(op.Slice(shares, first, first + size, [0]) * unit + 0.5)
    taps = op.Slice(taps, first, first + size, [0])
    coarse = op.Floor(weights / 256.0)
    fine = weights - 256.0 * coarse
    # Taps behind the last pixel have weight 0. They are cut off below.
    num = op.Unsqueeze(op.Cast(num_in, to=LONG), [0])
    blank = op.Expand(op.Cast(0, to=BYTE), op.Concat(size, num + op.Shape(taps, start=1), axis=0))
    coarse = op.Slice(
        op.ScatterElements(blank, taps, op.Cast(coarse, to=BYTE), axis=1), [0], num, [1]
    )
    fine = op.Slice(op.ScatterElements(blank, taps, op.Cast(fine, to=BYTE), axis=1), [0], num, [1])
    return coarse, fine, op.Cast(unit, to=INT)


@script()
def _rounded(total, unit):
    return op.Cast(op.Min((total + unit / 2) / unit, 255), to=BYTE)


@script()
def _smaller(pixels, height, width, new_height, new_width, top, left, rows, columns):
    """Resize pixels (N, 3, H, W) as torch's antialiased bilinear kernel for bytes does; crop to rows and columns."""
    coarse, fine, unit = _averages(width, new_width, left, columns)
    sums = 256 * op.MatMulInteger(pixels, op.Transpose(coarse)) + op.MatMulInteger(
        pixels, op.Transpose(fine)
    )
    narrow = _rounded(sums, unit)
    coarse, fine, unit = _averages(height, new_height, top, rows)
    return _rounded(256 * op.MatMulInteger(coarse, narrow) + op.MatMulInteger(fine, narrow), unit)


@script()
def _neighbours(num_in, num_out, first, size):
    """Return the two source pixels around each cropped pixel, and their weights, which add up to 2048."""
    scale = 1.0 / (num_out / num_in)
    place = op.Cast((op.Range(0.0, num_out, 1.0) + 0.5) * scale - 0.5, to=FLOAT)
    place = op.Slice(place, first, first + size, [0])
    before = op.Floor(place)
    share = place - before
    last = op.Cast(num_in, to=LONG) - 1
    lower = op.Cast(before, to=LONG)
    upper = op.Min(op.Max(lower + 1, 0), last)
    lower = op.Min(op.Max(lower, 0), last)
    return (
        lower,
        upper,
        op.Cast(op.Round((1.0 - share) * 2048.0), to=INT),
        op.Cast(op.Round(share * 2048.0), to=INT),
    )


@script()
def _larger(pixels, height, width, new_height, new_width, top, left, rows, columns):
    """Resize pixels (N, 3, H, W) as OpenCV's `INTER_LINEAR` does; crop to rows and columns."""
    lower, upper, low, high = _neighbours(width, new_width, left, columns)
    wide = op.Cast(op.Gather(pixels, lower, axis=3), to=INT) * low
    wide = (wide + op.Cast(op.Gather(pixels, upper, axis=3), to=INT) * high) / 16
    lower, upper, low, high = _neighbours(height, new_height, top, rows)
    tall = op.Gather(wide, lower, axis=2) * op.Unsqueeze(low, [1]) / 65536
    tall = tall + op.Gather(wide, upper, axis=2) * op.Unsqueeze(high, [1]) / 65536
    return op.Cast((tall + 2) / 4, to=BYTE)


def _padded_preparation(image_size: int) -> Any:
    """Return the ONNX function that prepares images as `data.resize.Pad` does."""
    side = float(image_size)
    colour = onnx.helper.make_tensor("colour", BYTE, [1, 3, 1, 1], PADDING)

    @script()
    def prepare_padded(images):
        shape = op.Cast(op.Shape(images), to=DOUBLE)
        height = op.Gather(shape, 1)
        width = op.Gather(shape, 2)
        pixels = op.Transpose(images, perm=[0, 3, 1, 2])
        scale = side / op.Max(height, width)
        new_height = op.Max(op.Round(height * scale), 1.0)
        new_width = op.Max(op.Round(width * scale), 1.0)
        size = op.Constant(value_ints=[image_size])
        none = op.Constant(value_ints=[0])
        rows = op.Unsqueeze(op.Cast(new_height, to=LONG), [0])
        columns = op.Unsqueeze(op.Cast(new_width, to=LONG), [0])
        if op.And(new_height >= height, new_width >= width):
            resized = _larger(
                pixels, height, width, new_height, new_width, none, none, rows, columns
            )
        else:
            resized = _smaller(
                pixels, height, width, new_height, new_width, none, none, rows, columns
            )
        above = (size - rows) / 2
        before = (size - columns) / 2
        below = size - rows - above
        behind = size - columns - before
        pads = op.Concat(none, none, above, before, none, none, below, behind, axis=0)
        one = op.Constant(value_ints=[1])
        is_image = op.Expand(op.Cast(one, to=BYTE), op.Concat(one, one, rows, columns, axis=0))
        is_image = op.Cast(op.Pad(is_image, pads), to=BOOL)
        padded = op.Where(is_image, op.Pad(resized, pads), op.Constant(value=colour))
        prepared = op.Transpose(padded, perm=[0, 2, 3, 1])
        return prepared

    return prepare_padded


def _preparation(image_size: int, resize: ResizeMode, crop_share: float) -> Any:
    """Return the ONNX function from images (N, H, W, 3) uint8 to prepared images (N, S, S, 3) uint8."""
    if resize == "pad":
        return _padded_preparation(image_size)
    side = float(image_size if resize == "whole" else resized_side(image_size, crop_share))
    most = float(MAX_PIXELS)

    @script()
    def shorter_side(pixels, height, width):
        scale = side / op.Min(height, width)
        new_height = op.Max(op.Round(height * scale), 1.0)
        new_width = op.Max(op.Round(width * scale), 1.0)
        # A very long and thin image is first cut to its middle, as `SmallestMaxSize` does.
        num = op.Floor(most / (op.Min(new_height, new_width) * scale)) - 1.0
        is_line = op.Cast(new_height * new_width > most, to=DOUBLE)
        above = is_line * op.Floor(op.Max(height - num + 1.0, 0.0) / 2.0)
        before = is_line * op.Floor(op.Max(width - num + 1.0, 0.0) / 2.0)
        height = height - 2.0 * above
        width = width - 2.0 * before
        top = op.Cast(op.Unsqueeze(above, [0]), to=LONG)
        left = op.Cast(op.Unsqueeze(before, [0]), to=LONG)
        pixels = op.Slice(pixels, top, top + op.Cast(height, to=LONG), [2])
        pixels = op.Slice(pixels, left, left + op.Cast(width, to=LONG), [3])
        return (
            pixels,
            height,
            width,
            op.Max(op.Round(height * scale), 1.0),
            op.Max(op.Round(width * scale), 1.0),
        )

    @script()
    def square(pixels, height, width):
        new_side = op.Mul(height, 0.0) + side
        return pixels, height, width, new_side, new_side

    new_sides = shorter_side if resize == "shorter_side" else square

    @script()
    def prepare(images):
        shape = op.Cast(op.Shape(images), to=DOUBLE)
        pixels = op.Transpose(images, perm=[0, 3, 1, 2])
        pixels, height, width, new_height, new_width = new_sides(
            pixels, op.Gather(shape, 1), op.Gather(shape, 2)
        )
        size = op.Constant(value_ints=[image_size])
        top = (op.Cast(new_height, to=LONG) - size) / 2
        left = (op.Cast(new_width, to=LONG) - size) / 2
        if op.And(new_height >= height, new_width >= width):
            resized = _larger(pixels, height, width, new_height, new_width, top, left, size, size)
        else:
            resized = _smaller(pixels, height, width, new_height, new_width, top, left, size, size)
        prepared = op.Transpose(resized, perm=[0, 2, 3, 1])
        return prepared

    return prepare
