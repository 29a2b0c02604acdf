"""`finetune sheet`: draw a contact sheet of images with their predictions."""

import math
from functools import cache
from importlib.util import find_spec
from pathlib import Path

import numpy as np
from PIL import Image, ImageDraw, ImageFont

from finetune.data.decode import decode
from finetune.data.prediction_paths import files_to_predict
from finetune.data.samplers import SHEET, draw_indices
from finetune.inference.predictor import Predictor
from finetune.system.file_names import class_name, composed
from finetune.system.files import check_target, replacing
from finetune.system.messages import WrongUsage, check_seed

RIGHT = (22, 128, 60)
WRONG = (190, 30, 45)
_GREY = (70, 70, 70)
_PAPER = (255, 255, 255)
# pixels: side of each image, height of its caption
SIDE = 120
_CAPTION = 22


def sheet(
    ckpt_path: str,
    pictures: list[str] | str,
    output: str = "sheet.png",
    num: int = 24,
    columns: int = 8,
    seed: int = 0,
) -> None:
    """Draw a contact sheet of images with the predicted class of each and its probability.

    Captions are green if the image is in a folder of the predicted class, red if it is in one of another class, and
    grey otherwise, also for a network that predicts several labels.

    Args:
        ckpt_path: A checkpoint of `finetune fit`.
        pictures: Image, folder, glob or text file with a path on each line, or several.
        output: The PNG file to write.
        num: Largest number of images on the sheet, chosen at random.
        columns: Images in a row.
        seed: Seed of the choice of images.
    """
    if num < 1 or columns < 1:
        raise WrongUsage(f"num and columns must be at least 1, got {num} and {columns}")
    if Path(output).suffix.lower() != ".png":
        raise WrongUsage(f"--out {output}: a sheet is a .png")
    check_seed(seed)
    check_target(output, "--out")
    predictor = Predictor(ckpt_path)
    paths = files_to_predict(pictures)
    Path(output).parent.mkdir(parents=True, exist_ok=True)
    chosen = np.sort(draw_indices(len(paths), num, SHEET, seed))
    shown = list[np.ndarray]()
    prepared = list[np.ndarray]()
    parts = list[np.ndarray]()
    for place, i in enumerate(chosen, 1):
        image = decode(paths[int(i)])  # only one image at a time is in memory at full size
        shown.append(predictor.prepare(image, SIDE))
        prepared.append(predictor.prepare(image))
        if place == len(chosen) or len(prepared) == predictor.batch_size:
            parts.append(predictor.classify(np.stack(prepared)))
            prepared.clear()
    names = predictor.class_names
    predicted = np.concatenate(parts)
    classes = predictor.decide(predicted, [paths[int(i)] for i in chosen])
    rows = zip(predicted, classes, chosen, strict=True)
    if predictor.label_kind == "several":
        captions = [(labels_text(names, p, is_predicted), _GREY) for p, is_predicted, _ in rows]
    else:
        captions = [caption(p[k], names[k], names, Path(paths[int(i)])) for p, k, i in rows]
    with replacing(Path(output)) as file:
        draw_sheet(np.stack(shown), captions, columns).save(file, format="PNG", optimize=True)
    print(f"sheet in {output}")


def caption(
    probability: float, label: str, class_names: list[str], path: Path
) -> tuple[str, tuple[int, int, int]]:
    """Return the caption of an image and its colour."""
    colour = _GREY
    true_class = class_name(path.parent.name)
    if true_class in map(composed, class_names):
        colour = RIGHT if true_class == composed(label) else WRONG
    return caption_text(label, probability), colour


def caption_text(label: str, probability: float) -> str:
    """Return the caption of an image: the predicted class and its probability."""
    return f"{label} {100 * probability:.0f} %"


def labels_text(class_names: list[str], probabilities: np.ndarray, chosen: np.ndarray) -> str:
    """Return the caption of an image with several labels: the predicted ones and their probabilities.

    Args:
        class_names: The labels.
        probabilities: Of each label, (K,).
        chosen: Whether each label is predicted, (K,) bool.
    """
    indices = np.flatnonzero(chosen)
    texts = [caption_text(class_names[k], probabilities[k]) for k in indices]
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
