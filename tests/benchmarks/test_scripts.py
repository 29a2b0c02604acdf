"""The measuring scripts: every tool gets the same images and weights, nothing is measured twice, commands are valid."""

import importlib
import json
import sys

import pytest
import torch
from safetensors.torch import load_file
from torchvision import models

from benchmarks.techniques.__main__ import TECHNIQUES, Run, command
from finetune.commands.lightning_cli import FinetuneCLI

pytestmark = pytest.mark.slow


@pytest.fixture
def compare(tmp_path, monkeypatch):
    """The script, with records of its own."""
    module = importlib.import_module("benchmarks.peers.__main__")
    monkeypatch.setattr(module, "RECORDS", tmp_path / "compare.json")
    return module


def record(experiment, tool, setting="default", repeat=0, **result) -> dict:
    about = {
        "versions": {"torch": "2.15"},
        "commit": "abc1234",
        "machine": "a processor, 2 cores",
        "date": "2026-11-21",
    }
    return {
        "experiment": experiment,
        "tool": tool,
        "setting": setting,
        "repeat": repeat,
        **result,
        **about,
    }


def test_all_tools_get_the_first_pictures_of_each_class(compare, tmp_path):
    for split, num in (("train", 4), ("test", 3)):
        for name in ("cat", "dog"):
            (tmp_path / "root" / split / name).mkdir(parents=True)
            for i in range(num):
                (tmp_path / "root" / split / name / f"{i}.jpg").write_text(f"{split} {name} {i}")
    folder = compare.materials.write_folder(tmp_path / "root", tmp_path / "small", 2, None)
    files = sorted(str(path.relative_to(folder)) for path in folder.glob("*/*/*"))
    assert files == [f"train/{c}/{i}.jpg" for c in ("cat", "dog") for i in range(2)] + [
        f"val/{c}/{i}.jpg" for c in ("cat", "dog") for i in range(3)
    ]
    assert (folder / "val/dog/2.jpg").read_text() == "test dog 2"
    with pytest.raises(ValueError, match="has 4 pictures, 5 are wanted"):
        compare.materials.write_folder(tmp_path / "root", tmp_path / "large", 5, None)


def test_the_peers_get_the_same_weights(compare, tmp_path):
    net = models.resnet18(num_classes=99).half()
    torch.save(net.state_dict(), tmp_path / "weights.pt")
    forms = compare.materials.write_weights(tmp_path / "weights.pt", tmp_path / "forms")
    for state in (
        torch.load(compare.materials.pretrained(forms)),
        load_file(forms / "hub_model/model.safetensors"),
    ):
        models.resnet18().load_state_dict(state)
        assert torch.equal(state["layer4.1.conv2.weight"], net.layer4[1].conv2.weight.float())
        assert (
            torch.equal(state["fc.weight"][:99], net.fc.weight.float())
            and not state["fc.weight"][99:].any()
        )


def test_a_stopped_comparison_goes_on_where_it_was(compare, monkeypatch, tmp_path):
    measured = []

    def measure(bench, run):
        measured.append(run)
        if len(measured) == 3:
            raise KeyboardInterrupt
        if run.tool == "ultralytics":
            return record(*run, failed="ValueError: no")
        speed = {"finetune": 5, "fastai": 7}.get(run.tool, 9)
        return record(*run, seconds=speed + run.repeat, accuracy=0.8, first_step=1, later_rate=50)

    monkeypatch.setattr(compare.Bench, "measure", measure)
    monkeypatch.setattr(compare, "document", lambda: None)

    def go(*arguments):
        command = [
            "benchmarks.peers",
            "--root",
            "x",
            "--weights",
            "y",
            "--only",
            "job",
            "finetune",
            "fastai",
            "ultralytics",
        ]
        monkeypatch.setattr(sys, "argv", [*command, *arguments])
        with pytest.raises(SystemExit) as caught:
            compare.main()
        return caught.value.code

    with pytest.raises(KeyboardInterrupt):
        go()
    assert len(json.loads(compare.RECORDS.read_text())) == 2
    assert go() == 1  # something failed
    # Two rounds have all; in the third, we and the two fastest peers take turns.
    everybody = ["finetune", "fastai", "fastai", "ultralytics", "ultralytics"]
    rounds = [
        *((tool, repeat) for repeat in (0, 1) for tool in everybody),
        *((tool, 2) for tool in everybody[:3]),
    ]
    assert [(r.tool, r.repeat) for r in measured[:2] + measured[3:]] == rounds
    num = len(measured)
    assert go() == 0 and len(measured) == num  # what failed is not tried again by itself
    assert go("--again") == 1 and [r.tool for r in measured[num:]] == 4 * ["ultralytics"]
    assert go("--minutes", "-1") == 0 and len(measured) == num + 4
    assert go("--only", "jobs") == 2


@pytest.mark.filterwarnings("ignore:LightningCLI's args parameter")
@pytest.mark.parametrize("name", TECHNIQUES)
def test_each_command_is_understood_and_changes_what_it_says(name, colours, tmp_path):
    from finetune.commands.command_line import in_full_spelling

    class ParseOnly(FinetuneCLI):
        def before_instantiate_classes(self) -> None: ...
        def instantiate_classes(self) -> None: ...
        def _run_subcommand(self, subcommand: str) -> None: ...

    def parsed(technique):
        words = command(
            Run(technique, colours.name, 1), colours.parent, tmp_path / "w.pt", tmp_path / "out"
        )
        return ParseOnly(in_full_spelling(words[3:])).config["fit"]

    settings, base = parsed(name), parsed("default")
    assert settings.seed_everything == settings.data.init_args.split_seed == 1
    assert settings.data.init_args.val_fraction == 0.3
    differs = any(settings[part] != base[part] for part in ("model", "data", "trainer"))
    assert differs == (name != "default")
