"""Draws a contact sheet: images in rows, with their predictions below."""

import math
from functools import cache
from importlib.util import find_spec
from pathlib import Path

import numpy as np
from PIL import Image, ImageDraw, ImageFont

from finetune.runs.predictions_table import Predictions

RIGHT = (22, 128, 60)
WRONG = (190, 30, 45)
_PAPER = (255, 255, 255)
# pixels: side of each image, height of its caption
SIDE = 120
_CAPTION = 22


def caption_of(predictions: Predictions, i: int) -> str:
    """Return the caption of image `i`: the predicted class or labels with their probabilities."""
    p = predictions.probabilities[i]
    chosen = np.flatnonzero(predictions.decided[i])
    texts = [f"{predictions.names[k]} {100 * p[k]:.0f} %" for k in chosen]
    return ", ".join(texts) or "no label"


def draw_sheet(
    images: np.ndarray,
    captions: list[tuple[str, tuple[int, int, int]]],
    columns: int,
    side: int = SIDE,
    gap: int = 8,
) -> Image.Image:
    """Draw images (N, h, w, 3) uint8 in rows, with a caption below each."""
    columns = min(columns, len(images))
    rows = math.ceil(len(images) / columns)
    width = columns * (side + gap) + gap
    height = rows * (side + _CAPTION + gap) + gap
    paper = Image.new("RGB", (width, height), _PAPER)
    draw = ImageDraw.Draw(paper)
    for i, (image, (text, colour)) in enumerate(zip(images, captions, strict=True)):
        x = gap + i % columns * (side + gap)
        y = gap + i // columns * (side + _CAPTION + gap)
        paper.paste(Image.fromarray(image).resize((side, side), Image.Resampling.BICUBIC), (x, y))
        font = _fitting_font(draw, text, side)
        draw.text((x + side / 2, y + side + _CAPTION / 2), text, colour, font, anchor="mm")
    return paper


def _fitting_font(
    draw: ImageDraw.ImageDraw, text: str, width: int
) -> ImageFont.FreeTypeFont | ImageFont.ImageFont:
    """Return the largest font, of at most 14 points, in which a text is not wider than `width` pixels."""
    for size in range(14, 1, -1):
        if draw.textlength(text, _font(size)) <= width:
            return _font(size)
    return _font(1)


@cache
def _font(size: int) -> ImageFont.FreeTypeFont | ImageFont.ImageFont:
    """Return DejaVu Sans, which matplotlib contains: Pillow's font has few letters beyond ASCII."""
    spec = find_spec("matplotlib")  # not imported: that would read the user's settings
    assert spec and spec.origin, "it is installed with finetune"
    try:
        return ImageFont.truetype(
            Path(spec.origin).with_name("mpl-data") / "fonts/ttf/DejaVuSans.ttf", size
        )
    except OSError:  # some distributions install fonts elsewhere
        return ImageFont.load_default(size)
