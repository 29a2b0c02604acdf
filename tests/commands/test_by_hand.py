"""`finetune by-hand` as a user meets it: lines, chart and errors."""

import re

import numpy as np
import pytest
import torch
from data_files import write_unpacked
from PIL import Image

from finetune.commands.by_hand import parse_devices
from finetune.parity import data_parallel

LINE = re.compile(r"epoch (\d+)  test accuracy (0\.\d{4}|1\.0000)  time (\d+\.\d) s")
# 200 images in batches of 24, and a last one of 8.
QUICK = ("--batch_size", 24, "--epochs", 3, "--lr", 0.5, "--root", "clothes")


@pytest.fixture(autouse=True)
def louder_weights(monkeypatch):
    """Ten times the weights of the book, with which it would not train in so few steps."""
    monkeypatch.setattr(
        data_parallel,
        "init_params",
        lambda *arguments, init=data_parallel.init_params: [10 * p for p in init(*arguments)],
    )


def accuracies(out: str) -> list[float]:
    *lines, last = out.splitlines()
    matches = [LINE.fullmatch(line) for line in lines]
    assert all(matches) and [int(match[1]) for match in matches] == list(range(1, len(lines) + 1))
    assert last.startswith("accuracy curve in ")
    return [float(match[2]) for match in matches]


@pytest.mark.slow
def test_a_line_for_each_epoch_and_the_same_accuracies_on_any_number_of_replicas(
    cli, tmp_path, capsys
):
    write_unpacked(tmp_path / "clothes")
    reported = []
    for devices in ("cpu", "cpu, cpu, cpu, cpu"):
        cli("by-hand", "--devices", devices, "--dtype", "float64", *QUICK)
        reported.append(accuracies(capsys.readouterr().out))
    assert reported[0] == reported[1] and len(reported[0]) == 3 and reported[0][-1] > 0.5
    cli("by-hand", "--devices", "cpu,cpu", "--seed", 1, "--dtype", "float64", *QUICK)
    assert accuracies(capsys.readouterr().out) != reported[0]


@pytest.mark.slow
def test_the_curve_is_drawn_after_each_epoch(cli, tmp_path, capsys, monkeypatch):
    write_unpacked(tmp_path / "clothes")
    images, printed = [], print

    def keep(*arguments: object, **options: object) -> None:
        assert options == {"flush": True} or str(arguments[0]).startswith(
            "accuracy"
        )  # a line is seen when its epoch is over
        images.extend([np.asarray(Image.open(path)) for path in tmp_path.rglob("*.png")])
        printed(*arguments, **options)

    monkeypatch.setattr("builtins.print", keep)
    cli("by-hand", "--output", "new/curve.png", *QUICK)
    assert capsys.readouterr().out.endswith("accuracy curve in new/curve.png\n")
    assert len(images) == 3  # none before the first line, one before each later one
    # the line and its points
    blue = [((p[..., 2] > 180) & (p[..., 0] < 60)).sum() for p in images]
    assert images[0].shape == (480, 840, 4) and blue[0] < blue[1] < blue[2]
    assert list(tmp_path.rglob("*.png")) == [tmp_path / "new/curve.png"]


def test_devices_of_an_accelerator(monkeypatch):
    monkeypatch.setattr(
        torch.accelerator, "current_accelerator", lambda check_available: torch.device("cuda")
    )
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 2)
    names = ["cuda", "cuda:1", "cuda:0", "cpu"]
    assert list(map(str, parse_devices(",".join(names)))) == ["cuda:0", "cuda:1", "cuda:0", "cpu"]
    with pytest.raises(ValueError, match="cuda:2.*valid are: cpu, cuda"):
        parse_devices("cuda:0,cuda:2")
