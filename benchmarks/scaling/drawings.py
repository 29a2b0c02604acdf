"""Draw what lies where and what is sent when, for every way of using several devices: docs/parallelism/*.png.

    python -m benchmarks.scaling.drawings

The timelines are simulated, not drawn by hand: what a process does next is decided by its schedule.
"""

from collections.abc import Callable, Sequence

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.patches import FancyBboxPatch, Rectangle

from benchmarks.common.documents import ROOT
from benchmarks.scaling.model import buckets, untrained
from benchmarks.scaling.timelines import SCHEDULES, held, timeline

FOLDER = ROOT / "docs/parallelism"
DEVICES = ("#1d4ed8", "#c2410c", "#047857", "#7e22ce")  # by device
FILLS = ("#dbeafe", "#ffedd5", "#d1fae5", "#f3e8ff")
INK = "#111827"
GREY = "#6b7280"
PALE = "#f3f4f6"

Point = tuple[float, float]


def canvas(width: float, height: float) -> Axes:
    """Return axes with one unit to an inch tenth, without a frame."""
    figure = plt.figure(figsize=(width / 10, height / 10))
    axes = figure.add_axes((0, 0, 1, 1))
    axes.set(xlim=(0, width), ylim=(0, height))
    axes.axis("off")
    return axes


def save(axes: Axes, name: str) -> None:
    axes.figure.savefig(
        FOLDER / f"{name}.png", dpi=110, facecolor="white", metadata={"Software": None}
    )
    plt.close(axes.figure)


def box(
    axes: Axes, at: Point, size: Point, text: str, device: int | None = None, **options: object
) -> None:
    """Draw a rounded box with its lower left corner `at`; a box without a device is grey."""
    fill, edge = (PALE, GREY) if device is None else (FILLS[device], DEVICES[device])
    style = "round,pad=0,rounding_size=0.8"
    axes.add_patch(
        FancyBboxPatch(at, *size, boxstyle=style, facecolor=fill, edgecolor=edge, linewidth=1.2)
    )
    label(axes, (at[0] + size[0] / 2, at[1] + size[1] / 2), text, **options)


def label(axes: Axes, at: Point, text: str, **options: object) -> None:
    settings = {
        "ha": "center",
        "va": "center",
        "color": INK,
        "fontsize": 9.5,
        "linespacing": 1.35,
        **options,
    }
    axes.text(*at, text, **settings)


def arrow(
    axes: Axes, start: Point, end: Point, colour: str = INK, style: str = "-|>", bend: float = 0.0
) -> None:
    shape = {"arrowstyle": style, "color": colour, "linewidth": 1.4, "shrinkA": 0, "shrinkB": 0}
    axes.annotate(
        "",
        end,
        start,
        arrowprops={**shape, "connectionstyle": f"arc3,rad={bend}", "mutation_scale": 13},
    )


def by_hand() -> None:
    axes = canvas(90, 47)
    box(axes, (25, 40.5), (40, 5), "a batch of 256 pictures")
    for i, x in enumerate((3, 53)):
        colour = DEVICES[i]
        label(axes, (x + 17, 36.4), f"device {i}", color=colour, weight="bold")
        arrow(axes, (35 if i == 0 else 55, 40.5), (x + (28 if i == 0 else 6), 34.4), colour)
        box(axes, (x, 29), (34, 5), f"pictures {128 * i} to {128 * i + 127}, all weights", i)
        arrow(axes, (x + 17, 29), (x + 17, 26.5), colour)
        box(
            axes,
            (x, 21),
            (34, 5.2),
            "forward, backward:\ngradients, summed over its part",
            i,
            fontsize=9,
        )
        if i == 0:
            arrow(axes, (x + 17, 21), (x + 17, 14.5), colour)
        box(axes, (x, 9), (34, 5.2), "the sum of all gradients", i)
        arrow(axes, (x + 17, 9), (x + 17, 6.6), colour)
        box(axes, (x, 1), (34, 5.2), "the same step: the same weights", i)
    arrow(axes, (53, 22.5), (37, 13.2), DEVICES[1])
    label(axes, (47.5, 17.3), "1  all gradients", color=DEVICES[1], ha="left")
    arrow(axes, (37, 10.6), (53, 10.6), DEVICES[0])
    label(axes, (45, 8.9), "2  the sum", color=DEVICES[0])
    save(axes, "by_hand")


def ddp() -> None:
    axes = canvas(90, 40)
    corners = ((3, 25), (21, 25), (21, 9), (3, 9))
    for i, (x, y) in enumerate(corners):
        box(axes, (x, y), (10, 7), f"device {i}\nall weights", i, fontsize=9)
    label(axes, (17, 37), "a ring sums each bucket", weight="bold")
    for i, (start, end) in enumerate(
        (((13, 28.5), (21, 28.5)), ((26, 25), (26, 16)), ((21, 12.5), (13, 12.5)))
    ):
        arrow(axes, start, end, DEVICES[i])
    arrow(axes, (8, 16), (8, 25), DEVICES[3])
    label(axes, (17, 20.5), "1/k of it\n2 (k − 1)\ntimes", fontsize=9)
    label(axes, (17, 4), "all at the same time", color=GREY, fontsize=9)

    label(
        axes,
        (64, 37),
        "one device's time: buckets are summed while backward goes on",
        weight="bold",
    )
    start, unit = 40.0, 12.5
    for y, name in ((27, "computes"), (18, "sends")):
        axes.plot((start, 88), (y - 0.6, y - 0.6), color="#d1d5db", linewidth=1)
        label(axes, (start, y + 6.4), name, ha="left", color=GREY, fontsize=9)
    parts = (("forward", unit), ("backward: layer4 … conv1", 2 * unit), ("update", 5.5))
    sizes = buckets(untrained("resnet18", 1000))
    sent = [10 * size / sum(sizes) for size in sizes]
    ready = [start + 1.06 * unit, start + 1.62 * unit, start + 3 * unit]
    end = ready[-1] + sent[-1]
    x = start
    for name, width in parts:
        x = end if name == "update" else x
        box(axes, (x, 27), (width, 4.8), name, 0, fontsize=9)
        x += width
    for i, (at, width) in enumerate(zip(ready, sent, strict=True)):
        axes.add_patch(
            Rectangle((at, 18), width, 4.8, facecolor="#fde68a", edgecolor="#92400e", linewidth=1.2)
        )
        axes.plot((at, at), (22.8, 27), color="#92400e", linewidth=1, linestyle=":")
        label(axes, (at + width / 2, 15.6), f"{sizes[i] / 1e6:.0f} MB", color="#92400e", fontsize=9)
    arrow(axes, (ready[-1] + sent[-1] / 2, 8.8), (ready[-1] + sent[-1] / 2, 13.8), GREY)
    note = (
        "ResNet-18's three buckets, the last layer's first: the last one is full\n"
        "when backward ends, and nothing is left to hide it behind"
    )
    label(axes, (64, 6), note, color=GREY, fontsize=9)
    save(axes, "ddp")


def pipeline() -> None:
    k = 4
    m = 6
    left = 21.0
    unit = 2.46
    axes = canvas(90, 59)
    parts = ("conv1, layer1", "layer2", "layer3", "layer4, fc")
    titles = {
        "gpipe": "GPipe: all forward, then all backward",
        "1f1b": "1F1B: backward as early as it can",
    }
    for panel, (name, title) in enumerate(titles.items()):
        top = 56 - 28 * panel
        label(axes, (left, top), title, weight="bold", ha="left")
        steps = timeline(SCHEDULES[name], k, m)
        for i in range(k):
            y = top - 6.4 - 4.3 * i
            label(
                axes,
                (1, y + 1.7),
                f"device {i}: {parts[i]}",
                color=DEVICES[i],
                ha="left",
                fontsize=9,
            )
            for kind, number, start, width in steps[i]:
                is_forward = kind == "forward"
                style = {
                    "facecolor": FILLS[i] if is_forward else "white",
                    "edgecolor": DEVICES[i],
                    "linewidth": 1.1,
                }
                axes.add_patch(Rectangle((left + unit * start, y), unit * width, 3.5, **style))
                label(
                    axes,
                    (left + unit * (start + width / 2), y + 1.7),
                    str(number),
                    fontsize=9,
                    color=DEVICES[i],
                )
        note = f"held at once by devices 0 to 3: activations of {', '.join(map(str, map(held, steps)))} micro-batches"
        label(axes, (left, top - 21.8), note, color=GREY, ha="left", fontsize=9)
    note = (
        "filled: forward, then activations go down.   empty: backward (twice as long), then the "
        "gradient of the input goes up.   number: micro-batch"
    )
    label(axes, (1, 1.3), note, color=GREY, ha="left", fontsize=8.5)
    save(axes, "pipeline")


def layer_wise() -> None:
    axes = canvas(90, 44)
    axes.set_ylim(-1, 43)
    label(axes, (29, 40.5), "two layers: column-wise, then row-wise", weight="bold")
    box(axes, (1, 17.5), (9, 8), "x\n(B, in)\non both")
    for i, y in enumerate((24.5, 9)):
        arrow(axes, (10, 21.5), (13.5, y + 4.5), DEVICES[i])
        box(axes, (13.5, y), (14, 9), "half of W₁:\nhalf of the\noutputs", i, fontsize=9)
        arrow(axes, (27.5, y + 4.5), (30.5, y + 4.5), DEVICES[i])
        box(axes, (30.5, y), (14, 9), "half of W₂:\nhalf of the\ninputs", i, fontsize=9)
        arrow(axes, (44.5, y + 4.5), (48.5, 21.5), DEVICES[i])
        label(
            axes,
            (20.5, y + 11 if i == 0 else y - 2),
            f"device {i}",
            color=DEVICES[i],
            weight="bold",
        )
    box(axes, (48.5, 17), (9.5, 9), "sum\n(B, out)\non both", fontsize=9)
    note = "sent forward: (B, out), summed round a ring\nsent backward: gradient of x, (B, in), likewise"
    label(axes, (29, 3.2), note, color=GREY, fontsize=9)
    axes.plot((60.3, 60.3), (2, 41), color="#d1d5db", linewidth=1)
    label(axes, (75.5, 40.5), "the head alone", weight="bold")
    box(axes, (62, 17), (8, 9), "x\n(B, 512)\non both", fontsize=9)
    for i, y in enumerate((24.5, 9)):
        arrow(axes, (70, 21.5), (72, y + 4.5), DEVICES[i])
        box(
            axes, (72, y), (8.5, 9), ("classes\n0 to 499", "classes\n500 to\n999")[i], i, fontsize=9
        )
        arrow(axes, (80.5, y + 4.5), (82.2, 21.5), DEVICES[i])
        label(
            axes,
            (76.2, y + 11 if i == 0 else y - 2),
            f"device {i}",
            color=DEVICES[i],
            weight="bold",
        )
    box(axes, (82.2, 17), (7.3, 9), "all\nlogits\non both", fontsize=9)
    label(
        axes,
        (75.5, 3.2),
        "forward: logits, to all others\nbackward: (B, 512), summed",
        color=GREY,
        fontsize=9,
    )
    save(axes, "layer_wise")


def branches() -> None:
    axes = canvas(90, 37)
    for i, y in enumerate((24, 4)):
        box(axes, (1, y), (20, 7), f"sequence {i}\n(B, 140, 256)", i)
        arrow(axes, (21, y + 3.5), (27, y + 3.5), DEVICES[i])
        box(
            axes,
            (27, y),
            (24, 7),
            f"device {i}: LSTM(64)\na copy of the same weights",
            i,
            fontsize=9,
        )
        arrow(axes, (51, y + 3.5), (62, 19 if i == 0 else 16), DEVICES[i])
        label(axes, (58.5, 24.8 if i == 0 else 10), "(B, 64)", color=DEVICES[i], ha="left")
    arrow(axes, (39, 24), (39, 11), GREY, "<|-|>")
    label(axes, (40.5, 17.5), "backward:\ngradients, summed", ha="left", color=GREY)
    box(axes, (62, 13), (27, 9), "CPU: side by side (B, 128),\nlinear layer, one logit (B,)")
    label(axes, (75.5, 10.2), "back go gradients of (B, 64)", color=GREY, fontsize=9)
    save(axes, "branches")


DRAWINGS: Sequence[Callable[[], None]] = (by_hand, ddp, pipeline, layer_wise, branches)

if __name__ == "__main__":
    FOLDER.mkdir(exist_ok=True)
    for drawing in DRAWINGS:
        drawing()
