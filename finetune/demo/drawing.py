"""The demo data set: images of food drawn by code, so that the demo needs no download and no binary files.

It has three tasks. `source` has eight dishes and many images, for pretraining. `target` is "hot dog or not" with few
images, for fine-tuning. Its negatives have the same parts as hot dogs: buns, sausages, wavy sauce. `several` has up to
three of the eight dishes in an image, which are its labels.
"""

import math
import os
import shutil
import uuid
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal, get_args

import cv2
import numpy as np

from finetune.system.files import one_at_a_time
from finetune.system.machine import num_cores

SOURCE_CLASSES = (
    "burger",
    "donut",
    "eclair",
    "fried_egg",
    "ice_cream",
    "pizza",
    "salad_bowl",
    "sandwich",
)
TARGET_CLASSES = ("hotdog", "not-hotdog")
NUM_SOURCE = {"train": 100, "val": 15, "test": 25}  # images per class
NUM_TARGET = {"train": 20, "val": 25, "test": 200}
NUM_SEVERAL = {"train": 400, "val": 100, "test": 200}  # images
# What images of not-hotdog show; a name occurs twice if it is drawn twice as often.
NEGATIVES = (
    "bun",
    "sausage",
    "sandwich",
    "sandwich",
    "eclair",
    "eclair",
    "banana",
    "burger",
    "donut",
    "pizza",
)
# Small objects near the edge of an image.
CLUTTER = ("knife", "cup", "napkin", "crumbs")
SUPERSAMPLING = 2  # images are drawn larger by this factor, then averaged down

Points = np.ndarray  # (N, 2) float curve; a dish spans about -1 to 1, y down
Colour = tuple[int, int, int]
Task = Literal["source", "target", "several"]
SPLITS = ("train", "val", "test")
TABLE = "labels.csv"
_NUM_DISHES_SHARES = (0.1, 0.25, 0.35, 0.3)  # of the images with 0, 1, 2 and 3 dishes
_SUPPORT_SHARES = (0.55, 0.2, 0.25)  # of plates, boards, and dishes on the table
_CORNERS = ((0.27, 0.27), (0.73, 0.27), (0.27, 0.73), (0.73, 0.73))  # x and y of the dishes
_SEVERAL = 8  # the seeds of `draw_several` differ from those of its labels
BREAD = (222, 168, 96)
CRUST = (196, 132, 66)
TOAST = (240, 208, 150)
PORK = (176, 72, 44)
BEEF = (150, 54, 40)
LETTUCE = (112, 170, 62)
HERB = (80, 132, 48)
TOMATO = (214, 62, 44)
CHEESE = (250, 196, 70)
CREAM = (250, 240, 220)
MUSTARD = (240, 194, 40)
KETCHUP = (196, 30, 26)
SALMON = (244, 132, 84)
CHOCOLATE = (84, 48, 32)
PINK = (240, 150, 178)
MINT = (170, 222, 190)
STEEL = (178, 182, 190)
WHITE = (244, 244, 240)
SLATE = (76, 86, 98)
PATTY = (104, 60, 38)
BLUE = (74, 110, 156)
PURPLE = (112, 60, 84)
LIME = (150, 196, 90)
YOLK = (252, 184, 40)
SMOKED = (198, 100, 66)


def noise(rng: np.random.Generator, size: int, cells: int) -> np.ndarray:
    """Return a smooth random field (size, size) with a standard deviation of about 1 and `cells` bumps per side."""
    return cv2.resize(
        rng.standard_normal((cells, cells), np.float32), (size, size), interpolation=cv2.INTER_CUBIC
    )


def log(
    length: float, width: float, bend: float = 0, y: float = 0, wave: tuple[float, float] = (0, 0)
) -> Points:
    """Return the outline of a long blunt shape, such as a bun or a line of sauce.

    Args:
        length: Half of the length.
        width: Half of the width.
        bend: How far the ends are lowered.
        y: Vertical position.
        wave: Amplitude and frequency of a wave along the shape.
    """
    t = np.sin(np.linspace(-np.pi / 2, np.pi / 2, 48))  # dense at the ends
    amplitude, frequency = wave
    path = t * length + 1j * (y + bend * (t * length) ** 2 + amplitude * np.sin(t * frequency))
    along = np.gradient(path)
    across = 1j * along / np.abs(along) * width * np.sqrt(1 - t**6)
    outline = np.concatenate([path + across, (path - across)[::-1]])
    return np.column_stack([outline.real, outline.imag])


@dataclass
class Canvas:
    """An image that is being drawn, its light, and the pose of the next shapes."""

    rng: np.random.Generator
    image: np.ndarray  # (size, size, 3) float32, 0 to 255
    grain: np.ndarray  # (size, size) noise of all surfaces
    sun: float  # direction of the light, radians
    matrix: np.ndarray  # (2, 3) from dish coordinates to pixels

    def place(self, x: float, y: float, radius: float, angle: float, tilt: float = 1) -> None:
        """Set the pose: draw around (x, y), with a radius; all three are fractions of the image size."""
        cos = math.cos(angle)
        sin = math.sin(angle)
        scale = radius * len(self.image)
        self.matrix = scale * np.array(
            [[cos, -sin, x / radius], [tilt * sin, tilt * cos, y / radius]]
        )

    def pick(self, *colours: Colour) -> Colour:
        return colours[self.rng.integers(len(colours))]

    def blob(
        self,
        rx: float,
        ry: float = 0,
        x: float = 0,
        y: float = 0,
        wobble: float = 0,
        turn: float = 0,
    ) -> Points:
        """Ellipse (a circle without `ry`) whose radius wanders by the fraction `wobble`."""
        angle = np.linspace(0, 2 * np.pi, 40, endpoint=False)
        k = np.arange(2, 6)[:, None]
        radius = 1 + self.rng.normal(0, wobble / 2, 4) @ np.cos(
            k * angle + self.rng.uniform(0, 6.3, (4, 1))
        )
        outline = (
            radius * (rx * np.cos(angle) + 1j * (ry or rx) * np.sin(angle)) * np.exp(1j * turn)
        )
        return np.column_stack([x + outline.real, y + outline.imag])

    def paint(
        self,
        colour: Colour,
        *areas: Points,
        bulge: float = 0.5,
        shadow: float = 0,
        width: float = 0.1,
    ) -> None:
        """Fill the first outline, with the second one as a hole. Edges are shaded by `bulge`, over a shadow.

        Shading and shadow have the width `width`.
        """
        tint = (np.array(colour) * self.rng.normal(1, 0.05) + self.rng.normal(0, 6, 3)).astype(
            np.float32
        )
        reach = max(1, round(width * math.hypot(*self.matrix[:, 0])))
        curves = [points @ self.matrix[:, :2].T + self.matrix[:, 2] for points in areas]
        low = np.clip(curves[0].min(0) - 2 * reach - 1, 0, len(self.image) - 2).astype(int)
        high = np.clip(curves[0].max(0) + 2 * reach + 2, 2, len(self.image)).astype(int)
        part = np.s_[low[1] : high[1], low[0] : high[0]]
        mask = np.zeros(self.grain[part].shape, np.uint8)
        cv2.fillPoly(
            mask,
            [np.round((curve - low) * 16).astype(np.int32) for curve in curves],
            255,
            cv2.LINE_AA,
            4,
        )
        surface = 1 + 0.035 * self.grain[part]
        soft = cv2.blur(mask, (reach, reach))
        kernel = (2 * reach - 1, 2 * reach - 1)
        shift = np.rint((reach - 1) * np.array([math.cos(self.sun), math.sin(self.sun)])).astype(
            int
        )
        lit, dark = (
            cv2.blur(soft, kernel, anchor=(reach - 1 + k * shift).tolist()) for k in (1, -1)
        )
        self.image[part] *= (1 - shadow / 255 * dark)[..., None].astype(np.float32)
        surface += bulge / 255 * (lit.astype(np.float32) - dark)
        self.image[part] += (mask / np.float32(255))[..., None] * (
            surface[..., None] * tint - self.image[part]
        )

    def dots(
        self,
        colours: Sequence[Colour],
        most: int,
        spread: float,
        radii: tuple[float, float],
        bulge: float = 0,
    ) -> None:
        """Scatter between `most / 2` and `most` blobs evenly over a disc with the radius `spread`."""
        rx, ry = radii
        count = int(self.rng.integers(most // 2, most + 1))
        for i in self.rng.permutation(count):
            # arranged like the seeds of a sunflower
            away = spread * math.sqrt((i + 0.5) / count)
            angle = i * 2.4 + 9 * self.sun
            blob = self.blob(
                rx, ry, away * math.cos(angle), away * math.sin(angle), 0.06, self.rng.uniform(0, 3)
            )
            self.paint(colours[i % len(colours)], blob, bulge=bulge, shadow=bulge / 2, width=0.05)


def draw_burger(c: Canvas, bread: Colour, turns: float) -> None:
    """Draw a burger."""
    c.paint(bread, c.blob(1, 0.9, y=c.rng.uniform(0, 0.15)), bulge=0.8, shadow=0.4, width=0.2)
    c.paint(bread, log(0.95, 0.25, y=0.6), shadow=0.2)
    for k, filling in enumerate(c.rng.permutation([PATTY, PATTY, LETTUCE, TOMATO, CHEESE])[:4]):
        c.paint(
            filling,
            log(1.02, 0.1, y=0.15 + 0.12 * k, wave=(0.035, turns)),
            shadow=0.3,
            width=0.06,
        )
    for x in c.rng.uniform(-0.6, 0.6, c.rng.integers(14)):  # sesame
        c.paint(CREAM, c.blob(0.05, 0.03, x, c.rng.uniform(-0.6, -0.3)), bulge=0)


def draw_donut(c: Canvas, bread: Colour, turns: float) -> None:
    """Draw a donut."""
    hole = c.rng.uniform(0.22, 0.34)
    c.paint(CRUST, c.blob(1, wobble=0.03), c.blob(hole), bulge=0.9, shadow=0.5, width=0.2)
    glaze = (c.blob(0.87, wobble=0.08), c.blob(hole + 0.07, wobble=0.15))
    c.paint(c.pick(CHOCOLATE, PINK, MINT, WHITE, TOAST), *glaze, bulge=0.7)
    for angle in np.arange(0, 6, c.rng.uniform(0.25, 2)):  # sprinkles
        x, y = c.rng.uniform(hole + 0.2, 0.75) * np.array([math.cos(angle), math.sin(angle)])
        c.paint(c.pick(WHITE, MUSTARD, PINK, BLUE), c.blob(0.09, 0.03, x, y, turn=9 * x), bulge=0)


def draw_eclair(c: Canvas, bread: Colour, turns: float) -> None:
    """Draw an eclair."""
    c.paint(bread, log(0.95, 0.38), bulge=0.8, shadow=0.5)
    c.paint(c.pick(CHOCOLATE, CHOCOLATE, PINK, WHITE), log(0.86, 0.25), bulge=0.6)
    c.paint(c.pick(CREAM, CHOCOLATE, MINT), log(0.7, 0.035, wave=(0.11, turns)), bulge=0)


def draw_fried_egg(c: Canvas, bread: Colour, turns: float) -> None:
    """Draw fried eggs."""
    c.paint(c.pick(WHITE, CREAM), c.blob(1, wobble=0.22), bulge=0.3, shadow=0.3)
    for x in (c.rng.uniform(-0.4, 0), c.rng.uniform(0.1, 0.4))[c.rng.integers(2) :]:
        c.paint(YOLK, c.blob(0.36, x=x, y=0.4 * x, wobble=0.05), bulge=0.8, shadow=0.15)
        c.paint(
            WHITE,
            c.blob(0.06, 0.06, x + 0.15 * math.cos(c.sun), 0.4 * x + 0.15 * math.sin(c.sun)),
            bulge=0,
        )


def draw_ice_cream(c: Canvas, bread: Colour, turns: float) -> None:
    """Draw an ice cream."""
    c.paint(CRUST, np.array([[-0.42, 0], [0.42, 0], [0.05, 1.15], [-0.05, 1.15]]), shadow=0.4)
    for x in (-0.24, -0.08, 0.08, 0.24):  # the waffle
        c.paint(BREAD, c.blob(0.3, 0.02, 0.6 * x, 0.3, turn=1.2 if x < 0 else 1.9), bulge=0)
    for x, y in ((0, -0.75), (-0.3, -0.2), (0.3, -0.2))[c.rng.integers(3) :]:
        scoop = c.blob(0.42, x=x, y=y, wobble=0.08)
        c.paint(
            c.pick(CHOCOLATE, PINK, MINT, CREAM, CHEESE),
            scoop,
            bulge=0.8,
            shadow=0.25,
            width=0.15,
        )


def draw_pizza(c: Canvas, bread: Colour, turns: float) -> None:
    """Draw a pizza."""
    c.paint(CRUST, c.blob(1, wobble=0.04), bulge=0.8, shadow=0.4)
    c.paint(TOMATO, c.blob(0.86, wobble=0.05), bulge=-0.3)
    c.paint(c.pick(CHEESE, CHEESE, CREAM), c.blob(0.82, wobble=0.1), bulge=0.2)
    c.dots([c.pick(KETCHUP, SALMON, TOMATO)], 13, 0.65, (0.15, 0.15), 0.3)
    c.dots([c.pick(HERB, CHOCOLATE)], 9, 0.6, (0.12, 0.06), 0.3)


def draw_salad_bowl(c: Canvas, bread: Colour, turns: float) -> None:
    """Draw a salad bowl."""
    c.paint(c.pick(WHITE, STEEL, CRUST, MINT), c.blob(1), shadow=0.5)
    c.paint(HERB, c.blob(0.86), bulge=-0.5)
    c.dots([HERB, LETTUCE, LIME, PURPLE], 32, 0.66, (0.28, 0.16), 0.6)
    c.dots([TOMATO, CREAM, TOAST], 10, 0.6, (0.14, 0.13), 0.5)


def draw_sandwich(c: Canvas, bread: Colour, turns: float) -> None:
    """Draw a sandwich."""
    c.paint(bread, log(0.98, 0.42), bulge=0.8, shadow=0.5)
    c.paint(LETTUCE, log(0.98, 0.18, 0, 0.16, (0.06, turns)), shadow=0.3)
    c.paint(c.pick(TOMATO, PINK, CHEESE), log(0.92, 0.17, 0, 0.07, (0.03, turns)), shadow=0.3)
    c.paint(bread, log(0.96, 0.26, y=-0.16), bulge=0.8, shadow=0.3)


def draw_hotdog(
    c: Canvas, bread: Colour, turns: float, has_bun: bool = True, has_sausage: bool = True
) -> None:
    """Draw a hotdog, or one of its parts alone."""
    bend = c.rng.normal(0, 0.06)
    half = c.rng.uniform(0.34, 0.44)
    if has_bun:
        c.paint(bread, log(0.98, half, bend), bulge=0.8, shadow=0.5, width=0.15)
        c.paint(TOAST, log(0.88, 0.45 * half, bend), bulge=-0.5, width=0.06)
    if has_sausage:
        c.paint(
            c.pick(PORK, BEEF, SMOKED),
            log(c.rng.uniform(0.95, 1.15), 0.47 * half, bend),
            bulge=0.8,
            shadow=0.4,
        )
    for sauce in c.rng.permutation([MUSTARD, KETCHUP])[c.rng.integers(3) :]:
        c.paint(
            sauce,
            log(0.75, 0.05, bend, 0, (c.rng.uniform(0.05, 0.13), turns)),
            shadow=0.15,
            width=0.04,
        )


def draw_banana(c: Canvas, bread: Colour, turns: float) -> None:
    """Draw a banana."""
    c.paint(MUSTARD, log(1, 0.2, c.rng.uniform(0.25, 0.5), -0.2), bulge=0.8, shadow=0.4)


def draw_plate(c: Canvas, bread: Colour, turns: float) -> None:
    """Draw a plate."""
    c.paint(c.pick(WHITE, STEEL, SLATE, MINT, PINK, TOAST), c.blob(1), bulge=0.3, shadow=0.5)
    c.paint(c.pick(WHITE, CREAM, STEEL), c.blob(0.76), bulge=-0.25)


def draw_knife(c: Canvas, bread: Colour, turns: float) -> None:
    """Draw a knife."""
    c.paint(STEEL, log(1.4, 0.08), shadow=0.4)


def draw_cup(c: Canvas, bread: Colour, turns: float) -> None:
    """Draw a cup with a drink."""
    c.paint(c.pick(WHITE, MINT, TOMATO), c.blob(0.75), shadow=0.5)
    c.paint(c.pick(CHOCOLATE, PATTY, CHEESE), c.blob(0.6), bulge=-0.5)


def draw_board(c: Canvas, bread: Colour, turns: float) -> None:
    """Draw a board or a napkin."""
    c.paint(c.pick(WHITE, PINK, TOMATO, CRUST, TOAST), log(0.95, 0.8), bulge=0.2, shadow=0.4)


def draw_crumbs(c: Canvas, bread: Colour, turns: float) -> None:
    """Draw crumbs."""
    c.dots([BREAD, CRUST], 14, 1, (0.08, 0.06), 0.4)


def draw_nothing(c: Canvas, bread: Colour, turns: float) -> None:
    """Draw no support: the dish is on the table."""


# Each takes the colour of bread and the frequency of a ripple, even if it uses neither: `draw_thing` always draws both
# random numbers.
_DRAWINGS: dict[str, Callable[[Canvas, Colour, float], None]] = {
    "burger": draw_burger,
    "donut": draw_donut,
    "eclair": draw_eclair,
    "fried_egg": draw_fried_egg,
    "ice_cream": draw_ice_cream,
    "pizza": draw_pizza,
    "salad_bowl": draw_salad_bowl,
    "sandwich": draw_sandwich,
    "hotdog": draw_hotdog,
    "bun": partial(draw_hotdog, has_sausage=False),
    "sausage": partial(draw_hotdog, has_bun=False),
    "banana": draw_banana,
    "plate": draw_plate,
    "knife": draw_knife,
    "cup": draw_cup,
    "board": draw_board,
    "nothing": draw_nothing,
    "napkin": draw_board,
    "crumbs": draw_crumbs,
}


def draw_thing(c: Canvas, name: str) -> None:
    """Draw a dish, a part of one, or another object on the table, in the pose of the canvas.

    Args:
        c: The canvas.
        name: One of `_DRAWINGS`.
    """
    bread = c.pick(BREAD, CRUST, TOAST)
    turns = c.rng.uniform(9, 20)
    _DRAWINGS[name](c, bread, turns)


def draw_table(c: Canvas) -> None:
    """Fill the image with wood, checked cloth, marble or a plain colour."""
    rng = c.rng
    size = len(c.image)
    kind = rng.integers(4)
    v, u = np.indices((size, size), np.float32) / size
    angle = rng.uniform(0, 3)
    cos = math.cos(angle)
    sin = math.sin(angle)
    period = rng.uniform(8, 24)
    x = u * cos + v * sin
    y = v * cos - u * sin
    if kind == 0:  # wood
        field = (
            np.sin(40 * y + 1.5 * noise(rng, size, 4))
            + noise(rng, size, 6)
            - 4 * (0.2 * period * y % 1 < 0.04)
        )
    elif kind == 1:  # checked cloth
        field = 1.6 * (np.tanh(6 * np.sin(period * x)) + np.tanh(6 * np.sin(period * y)))
    elif kind == 2:  # marble
        field = 1.5 * np.tanh(4 * np.abs(noise(rng, size, 6) + 0.5 * noise(rng, size, 13)))
    else:  # a plain colour that is brighter on one side
        field = 3 * u
    colour = c.pick(PATTY, CRUST, BREAD, WHITE, SLATE, STEEL, BLUE, TOMATO, MINT, (112, 140, 150))
    c.image[:] = (
        np.array(colour, np.float32)
        * (rng.uniform(0.8, 1.05) + 0.1 * field + 0.03 * c.grain)[..., None]
    )


def draw(class_name: str, seed: Sequence[int], size: int = 96) -> np.ndarray:
    """Draw an image, (size, size, 3) uint8 RGB. The result depends only on the arguments."""
    if class_name not in SOURCE_CLASSES + TARGET_CLASSES:
        raise ValueError(f"unknown class {class_name!r}, not in {SOURCE_CLASSES + TARGET_CLASSES}")
    rng = np.random.default_rng([*class_name.encode(), *seed])
    name = rng.choice(NEGATIVES) if class_name == "not-hotdog" else class_name
    sun, tilt, radius = rng.uniform([0, 0.8, 0.32], [6.3, 1, 0.46]).tolist()
    x, y, warm = rng.normal([0.5, 0.5, 0], [0.06, 0.06, 0.08]).tolist()
    c = _empty_canvas(rng, size, sun)
    draw_table(c)
    clutter = rng.choice(CLUTTER, rng.integers(1, 5))
    support = rng.choice(["plate", "board", "nothing"], p=_SUPPORT_SHARES)
    angle = _angle_of(rng, name)
    # later objects are in front
    for thing in (*clutter[1:], support, name, *clutter[: rng.integers(3) // 2]):
        if thing in CLUTTER:
            _place_clutter(c)
        else:
            c.place(x, y, radius * (1.25 if thing == support else 1), angle, tilt)
        draw_thing(c, thing)
    return _photograph(c, size, warm)


def draw_several(names: Sequence[str], seed: Sequence[int], size: int = 96) -> np.ndarray:
    """Draw a table with up to four dishes, (size, size, 3) uint8 RGB. The result depends only on the arguments.

    Args:
        names: The dishes, of `SOURCE_CLASSES`; none for a table without dishes.
        seed: Seed of the image.
        size: Side of the image in pixels.
    """
    rng = np.random.default_rng([*seed, _SEVERAL])
    sun, tilt = rng.uniform([0, 0.8], [6.3, 1]).tolist()
    warm = rng.normal(0, 0.08)
    c = _empty_canvas(rng, size, sun)
    draw_table(c)
    for thing in rng.choice(CLUTTER, rng.integers(1, 4)):
        _place_clutter(c)
        draw_thing(c, thing)
    corners = rng.permutation(4).tolist()
    for corner, name in zip(corners, names, strict=False):
        x, y = (_CORNERS[corner] + rng.normal(0, 0.03, 2)).tolist()
        radius = rng.uniform(0.17, 0.23)
        angle = _angle_of(rng, name)
        support = rng.choice(["plate", "board", "nothing"], p=_SUPPORT_SHARES)
        c.place(x, y, 1.2 * radius, angle, tilt)
        draw_thing(c, support)
        c.place(x, y, radius, angle, tilt)
        draw_thing(c, name)
    return _photograph(c, size, warm)


def _empty_canvas(rng: np.random.Generator, size: int, sun: float) -> Canvas:
    """Return a canvas for an image of `size` pixels a side."""
    large = size * SUPERSAMPLING
    image = np.empty((large, large, 3), np.float32)
    return Canvas(rng, image, noise(rng, large, size // 2), sun, np.eye(2, 3))


def _angle_of(rng: np.random.Generator, name: str) -> float:
    """Return a random angle for a dish. Some dishes stand upright."""
    return rng.normal(0, 0.3) if name in ("burger", "ice_cream") else rng.uniform(0, 6.3)


def _place_clutter(c: Canvas) -> None:
    """Set the pose of a small object near the edge."""
    away = c.rng.uniform(0.35, 0.7)
    around = c.rng.uniform(0, 6.3)
    radius = c.rng.uniform(0.2, 0.3)
    c.place(0.5 + away * math.cos(around), 0.5 + away * math.sin(around), radius, 5 * around)


def _photograph(c: Canvas, size: int, warm: float) -> np.ndarray:
    """Return the image in the light of a photograph, (size, size, 3) uint8.

    Args:
        c: The drawing.
        size: Side of the image in pixels.
        warm: How much redder than blue the light is.
    """
    rng = c.rng
    sun = c.sun
    large = len(c.image)
    v, u = np.indices((large, large), np.float32) / large - 0.5
    gleam = rng.uniform(0.7, 1.15) * (
        1 + rng.uniform(0, 0.5) * (u * math.cos(sun) + v * math.sin(sun))
    )
    if rng.random() < 0.3:  # the shadow of the photographer
        gleam *= 1 - 0.4 / (1 + np.exp(40 * (u * math.sin(sun) - v * math.cos(sun) + 3 * warm)))
    c.image *= gleam[..., None] * np.array([1 + warm, 1, 1 - warm], np.float32)
    image = cv2.resize(c.image, (size, size), interpolation=cv2.INTER_AREA)
    image = cv2.GaussianBlur(image, (0, 0), rng.uniform(0.2, 0.9))
    return np.clip(rng.normal(image, rng.uniform(1, 7)), 0, 255).astype(np.uint8)


def write_sample(
    root: str | Path, task: Task, seed: int = 0, counts: Mapping[str, int] | None = None
) -> Path:
    """Write images `root/task/split/class/0000.png` and return the folder `root/task`.

    The images of `several` are `root/several/split/0000.png`, and `root/several/labels.csv` has their labels.

    The folder appears only when it is complete. If it exists, it does not change. If several processes call this at the
    same time, one draws and the others wait.

    Args:
        root: The parent folder.
        task: `source`, `target` or `several`.
        seed: Seed of the images.
        counts: Images for each split, of each class if they have one; None for the default numbers.
    """
    if task not in get_args(Task):
        raise ValueError(f"unknown task {task!r}, not in {get_args(Task)}")
    defaults = {"source": NUM_SOURCE, "target": NUM_TARGET, "several": NUM_SEVERAL}
    num_images = counts or defaults[task]
    folder = Path(root) / task
    unfinished = folder.with_name(f".{task}-{uuid.uuid4().hex}")
    with one_at_a_time(folder), ExitStack() as clean_up:
        if folder.is_dir():
            return folder
        clean_up.callback(shutil.rmtree, unfinished, ignore_errors=True)
        if task == "several":
            _write_table(unfinished, seed, num_images)
        else:
            classes = SOURCE_CLASSES if task == "source" else TARGET_CLASSES
            _write_class_folders(unfinished, seed, num_images, classes)
        os.replace(unfinished, folder)  # noqa: TID251 (nothing is in its place)
    return folder


def _write_class_folders(
    folder: Path, seed: int, counts: Mapping[str, int], classes: Sequence[str]
) -> None:
    """Write images of one class each, `split/class/0000.png`, in a thread for each core."""

    def write(split: str, name: str, index: int) -> None:
        drawn = draw(name, (seed, SPLITS.index(split), index))
        _write_png(folder / split / name / f"{index:04d}.png", drawn)

    images = []
    for split, count in counts.items():
        for name in classes:
            (folder / split / name).mkdir(parents=True)
            images += [(split, name, index) for index in range(count)]
    with ThreadPoolExecutor(num_cores()) as pool:
        for _ in pool.map(lambda image: write(*image), images):
            pass


def _write_table(folder: Path, seed: int, counts: Mapping[str, int]) -> None:
    """Write images with several dishes, `split/0000.png`, and their table labels.csv."""
    rows = ["path,labels,split\n"]
    for split, count in counts.items():
        (folder / split).mkdir(parents=True)
        for index in range(count):
            own_seed = (seed, SPLITS.index(split), index)
            rng = np.random.default_rng(own_seed)
            num_dishes = rng.choice(len(_NUM_DISHES_SHARES), p=_NUM_DISHES_SHARES)
            names = rng.choice(SOURCE_CLASSES, num_dishes, replace=False).tolist()
            path = f"{split}/{index:04d}.png"
            _write_png(folder / path, draw_several(names, own_seed))
            rows.append(f"{path},{';'.join(sorted(names))},{split}\n")
    (folder / TABLE).write_text("".join(rows), "utf-8")


def _write_png(path: Path, image: np.ndarray) -> None:
    _, png = cv2.imencode(".png", image[..., ::-1])
    path.write_bytes(png.tobytes())
