"""`finetune by-hand`: data parallelism without a framework on Fashion-MNIST, epoch by epoch."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from finetune.parity.data_parallel import Epoch, train
from finetune.settings.all_commands import ByHandSettings
from finetune.system.files import check_target, replacing
from finetune.system.messages import WrongUsage

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_DTYPES = {"float32": torch.float32, "float64": torch.float64}
_BLUE = "#1d4ed8"
_GREY = "#6b7280"


def by_hand(options: ByHandSettings) -> None:
    """Train LeNet on Fashion-MNIST on several devices with data parallelism written by hand.

    Prints test accuracy and time of training after each epoch, and draws the accuracy curve.
    """
    replicas = parse_devices(options.devices)
    check_target(options.output, "--out")
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4), layout="constrained")
    done: list[Epoch] = []
    for epoch in train(
        replicas,
        options.batch_size,
        options.lr,
        options.epochs,
        root=Path(options.root),
        dtype=_DTYPES[options.dtype],
        seed=options.seed,
    ):
        done.append(epoch)
        Path(options.output).parent.mkdir(parents=True, exist_ok=True)
        print(
            f"epoch {epoch.epoch}  test accuracy {epoch.accuracy:.4f}  time {epoch.seconds:.1f} s",
            flush=True,
        )
        draw_curve(
            figure,
            done,
            f"devices {options.devices}, batch_size {options.batch_size}, lr {options.lr:g}, {options.dtype}",
            options.output,
        )
    print(f"accuracy curve in {options.output}")


def parse_devices(names: str) -> list[torch.device]:
    """Return the devices in a list separated by commas. A device may occur more than once.

    Raises:
        WrongUsage: A device does not exist on this machine.
    """
    available = {"cpu": torch.device("cpu")}
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if accelerator is not None:
        available[accelerator.type] = torch.device(accelerator.type, 0)
        for i in range(torch.accelerator.device_count()):
            available[f"{accelerator.type}:{i}"] = torch.device(accelerator.type, i)
    devices = [name.strip() for name in names.split(",")]
    for name in devices:
        if name not in available:
            raise WrongUsage(
                f"--devices {names}: there is no device {name!r} on this machine; valid are: {', '.join(available)}"
            )
    return [available[name] for name in devices]


def draw_curve(figure: "Figure", epochs: Sequence[Epoch], settings: str, output: str) -> None:
    """Draw the curve of the test accuracy over epochs, labelled with its last value, into a PNG file."""
    from matplotlib.ticker import MaxNLocator

    numbers = [e.epoch for e in epochs]
    accuracies = [e.accuracy for e in epochs]
    figure.clear()
    axes = figure.add_subplot(
        xlabel="epoch", ylabel="test accuracy", xlim=(0.5, len(epochs) + 0.5), ylim=(0, 1)
    )
    axes.set_title(
        f"LeNet on Fashion-MNIST, data parallel by hand\n{settings}", loc="left", fontsize="medium"
    )
    axes.grid(axis="y", color="#e5e7eb")
    axes.spines[["top", "right"]].set_visible(False)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
    above: dict[str, Any] = {"xytext": (0, 7), "textcoords": "offset points"}
    axes.axhline(0.1, color=_GREY, linewidth=1, linestyle="--")
    axes.annotate(
        "chance", (1, 0.1), xycoords=("axes fraction", "data"), ha="right", color=_GREY, **above
    )
    axes.plot(numbers, accuracies, color=_BLUE, marker="o", markersize=5, clip_on=False)
    axes.annotate(
        f"{accuracies[-1]:.4f}", (numbers[-1], accuracies[-1]), ha="center", color=_BLUE, **above
    )
    with replacing(Path(output)) as file:
        figure.savefig(file, format="png", dpi=120)
