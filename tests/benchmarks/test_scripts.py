"""The benchmark scripts give every tool the same images and weights, and measure nothing twice."""

import csv
import importlib
import json
import subprocess
from pathlib import Path
from typing import NamedTuple

import cv2
import numpy as np
import pytest
import timm
import torch
from safetensors.torch import load_file
from timm.models import save_for_hf
from torchvision import models

from benchmarks.common.driver import Benchmark
from benchmarks.common.records import load
from benchmarks.labels import mosaics
from benchmarks.peers import __main__ as compare
from benchmarks.peers import materials, tools
from benchmarks.quality import commands as quality_commands
from benchmarks.quality import plan as quality


def test_all_tools_get_the_first_images_of_each_class(tmp_path):
    for split, num in (("train", 4), ("test", 3)):
        for name in ("cat", "dog"):
            (tmp_path / "root" / split / name).mkdir(parents=True)
            for i in range(num):
                (tmp_path / "root" / split / name / f"{i}.jpg").write_text(f"{split} {name} {i}")
    folder = materials.write_folder(tmp_path / "root", tmp_path / "small", 2, None)
    files = sorted(str(path.relative_to(folder)) for path in folder.glob("*/*/*"))
    assert files == [f"train/{c}/{i}.jpg" for c in ("cat", "dog") for i in range(2)] + [
        f"val/{c}/{i}.jpg" for c in ("cat", "dog") for i in range(3)
    ]
    assert (folder / "val/dog/2.jpg").read_text() == "test dog 2"
    with pytest.raises(ValueError, match="has 4 images, 5 are needed"):
        materials.write_folder(tmp_path / "root", tmp_path / "large", 5, None)


def test_the_peers_get_the_same_weights(tmp_path):
    net = models.resnet18(num_classes=99).half()
    torch.save(net.state_dict(), tmp_path / "weights.pt")
    forms = materials.write_weights(tmp_path / "weights.pt", tmp_path / "forms")
    for state in (
        torch.load(materials.pretrained(forms)),
        load_file(forms / "hub_model/model.safetensors"),
    ):
        models.resnet18().load_state_dict(state)
        assert torch.equal(state["layer4.1.conv2.weight"], net.layer4[1].conv2.weight.float())
        assert (
            torch.equal(state["fc.weight"][:99], net.fc.weight.float())
            and not state["fc.weight"][99:].any()
        )


def test_the_peers_get_the_same_network_of_timm(tmp_path, monkeypatch):
    """Each peer's way to a pretrained network without its own download gives the features of that network."""
    monkeypatch.syspath_prepend(tools.HERE)
    plain_peer = importlib.import_module("plain_peer")
    folder = tmp_path / "weights"
    torch.manual_seed(0)
    network = timm.create_model("test_efficientnet", num_classes=7).eval()
    network.pretrained_cfg["mean"] = (0.5, 0.5, 0.5)
    save_for_hf(network, str(folder), model_args={"num_classes": 7}, safe_serialization=True)
    x = torch.randn(2, 3, 96, 96)

    def features(**options) -> torch.Tensor:
        net = timm.create_model("test_efficientnet", num_classes=5, **options)
        return net.eval().forward_features(x)

    # The scripts of plain PyTorch and fastai, and timm's --pretrained-path.
    plain = plain_peer.network(str(folder), 5).eval()
    overlay = {"file": str(folder / "model.safetensors")}
    with torch.no_grad():
        expected = network.forward_features(x)
        assert torch.equal(plain.forward_features(x), expected)
        assert plain(x).shape == (2, 5)
        assert torch.equal(features(pretrained=True, pretrained_cfg_overlay=overlay), expected)
        # The control: random weights.
        assert not torch.allclose(features(), expected, rtol=0.1)
    assert plain_peer.normalize(plain).mean == [0.5, 0.5, 0.5]
    # transformers
    materials.write_hub_model(folder, tmp_path / "forms")
    hub = tmp_path / "forms/hub_model"
    config = json.loads((hub / "config.json").read_text("utf-8"))
    assert config["architecture"] == "test_efficientnet" and "model_args" not in config
    state = network.state_dict()
    read = load_file(hub / "model.safetensors")
    assert read.keys() == state.keys()
    assert all(torch.equal(read[name], state[name]) for name in state)


def test_each_command_names_the_network_and_its_weights(tmp_path):
    """For a network of timm, and for ResNet-18 as the control."""
    (tmp_path / "data/train/cat").mkdir(parents=True)
    common = {"data": tmp_path / "data", "out": tmp_path / "out", "forms": tmp_path / "forms"}
    common |= {"environments": tmp_path / "environments", "timm": tmp_path / "timm"}
    resnet = tools.Place(weights=tmp_path / "resnet18.pt", **common)
    name = "timm/tf_efficientnet_lite0"
    lite = tools.Place(weights=tmp_path / "lite", backbone=name, **common)

    def words(tool: str, place: tools.Place) -> str:
        run = quality.Run("flowers", tool, "epochs_5", 0, "")
        return place.hidden(" ".join(quality_commands.command(run, place)))

    assert f"--weights WEIGHTS --out OUT --backbone {name}" in words("finetune", lite)
    assert "--model tf_efficientnet_lite0 --pretrained" in words("timm", lite)
    assert words("timm", lite).endswith("--pretrained-path WEIGHTS/model.safetensors")
    for tool in ("plain", "fastai"):
        assert words(tool, lite).endswith("--weights WEIGHTS")
        assert "--weights" not in words(tool, resnet)
    assert words("transformers", lite).endswith("--weights FORMS/hub_model")
    assert "--backbone" not in words("finetune", resnet)
    assert "--model resnet18 --pretrained" in words("timm", resnet)
    assert "resnet18-f37072fd.pth" in words("timm", resnet)


def test_in_the_last_round_we_and_the_two_fastest_peers_take_turns():
    common = {"experiment": "job", "setting": "default", "repeat": 0}
    seconds = {"finetune": 5, "fastai": 7, "timm": 9, "plain": 8}
    records = [{**common, "tool": tool, "seconds": value} for tool, value in seconds.items()]
    rounds = [run for run in compare.plan(records) if run.experiment == "job"]
    everybody = [
        (tool, setting) for tool, (_, settings) in tools.TOOLS.items() for setting in settings
    ]
    assert [run[1:] for run in rounds] == [
        *((*who, repeat) for repeat in (0, 1) for who in everybody),
        *((tool, "default", 2) for tool in ("finetune", "fastai", "plain")),
    ]


class Run(NamedTuple):
    """A run of the benchmark below."""

    tool: str
    repeat: int


class Toy:
    """A benchmark of three tools, of which one fails; its third run is interrupted."""

    def __init__(self, folder: Path) -> None:
        self.runs = [Run(tool, repeat) for repeat in (0, 1) for tool in ("ours", "peer", "broken")]
        self.measured: list[Run] = []
        self.written: list[int] = []
        self.benchmark = Benchmark(
            folder / "toy.json",
            Run,
            lambda records: self.runs,
            lambda records: self.written.append(len(records)),
            ("tool",),
        )

    def measure(self, run: Run) -> dict:
        self.measured.append(run)
        if len(self.measured) == 3:
            raise KeyboardInterrupt
        if run.tool == "broken":
            raise subprocess.CalledProcessError(3, ["/home/somebody/tool"])
        return {"seconds": 1.0}

    def go(self, *arguments: str) -> object:
        """Return the exit code."""
        args = self.benchmark.parser(None).parse_args(arguments)
        with pytest.raises(SystemExit) as caught:
            self.benchmark.main(
                args, self.measure, lambda run: run.repeat == 0 or run.tool != "peer"
            )
        return caught.value.code


def test_a_stopped_benchmark_continues_and_measures_nothing_twice(tmp_path):
    toy = Toy(tmp_path)
    with pytest.raises(KeyboardInterrupt):
        toy.go()
    assert [r["tool"] for r in load(toy.benchmark.records)] == ["ours", "peer"] and not toy.written
    assert toy.go() is True  # a run failed
    # all but the one that is not possible
    assert toy.measured[3:] == [run for run in toy.runs[2:] if run != ("peer", 1)]
    failed = [r for r in load(toy.benchmark.records) if "failed" in r]
    assert [r["failed"] for r in failed] == 2 * ["exit code 3"]
    num = len(toy.measured)
    assert toy.go() is False and len(toy.measured) == num  # a failed run is not repeated
    assert toy.go("--document", "--again") is False and len(toy.measured) == num
    assert toy.written == [5, 5, 5]


def test_failed_runs_are_repeated_on_request_and_only_the_selected_ones(tmp_path):
    toy = Toy(tmp_path)
    toy.measured = [Run("none", 0)] * 3  # no interruption
    assert toy.go("--only", "ours", "broken") is True
    assert toy.measured[3:] == [run for run in toy.runs if run.tool != "peer"]
    assert toy.go("--again", "--only", "ours") is False and len(toy.measured) == 7
    assert toy.go("--again", "--minutes", "-1") is False and len(toy.measured) == 7
    assert [r["tool"] for r in load(toy.benchmark.records)] == ["ours", "ours"]
    assert toy.go("--only", "broken") is True
    assert toy.measured[7:] == [Run("broken", 0), Run("broken", 1)]
    assert toy.go("--only", "our") == "--only: our: none of broken, ours, peer"


def test_mosaics_have_the_labels_of_their_images_and_none_of_another_split(tmp_path, monkeypatch):
    """Each class has its blue, and each image of a class its green."""
    blues = {"a": 0, "b": 60, "c": 120, "d": 180, "e": 240}
    for split, first in (("train", 0), ("test", 8)):
        for name, blue in blues.items():
            folder = tmp_path / "set" / split / name
            folder.mkdir(parents=True)
            for i in range(8):
                image = np.full((20, 30, 3), (blue, 15 * (first + i), 99), np.uint8)
                cv2.imwrite(str(folder / f"{i}.png"), image)
    monkeypatch.setattr(mosaics, "NUM_MOSAICS", {"train": 40, "val": 10, "test": 20})
    table = mosaics.write_mosaics(tmp_path / "set", tmp_path / "out", 0)
    used = {"train": set(), "val": set(), "test": set()}
    for row in csv.DictReader(table.read_text("utf-8").splitlines()):
        image = cv2.imread(str(tmp_path / "out" / row["path"]))
        assert image.shape == (2 * mosaics.TILE, 2 * mosaics.TILE, 3)
        middle = mosaics.TILE // 2
        tiles = image[middle :: mosaics.TILE, middle :: mosaics.TILE].reshape(4, 3).astype(int)
        nearest = (np.abs(tiles[:, :1] - [*blues.values()])).argmin(axis=1)
        names = [[*blues][k] for k in nearest]
        assert row["labels"].split(";") == sorted(set(names)) and len(set(names)) == 4
        greens = (tiles[:, 1] / 15).round().astype(int).tolist()
        used[row["split"]] |= {*zip(names, greens, strict=True)}
    assert {green for _, green in used["test"]} == {*range(8, 16)}
    assert {green for _, green in used["train"] | used["val"]} == {*range(8)}
    assert not used["train"] & used["val"]
    other = mosaics.write_mosaics(tmp_path / "set", tmp_path / "other", 1)
    assert table.read_text() != other.read_text()
    again = mosaics.write_mosaics(tmp_path / "set", tmp_path / "again", 0)
    assert table.read_text() == again.read_text()
