"""Which settings decide how images are prepared for a network of timm."""

import json
from pathlib import Path

import pytest
from command_lines import ParseOnly
from jsonargparse import Namespace

from finetune.commands import dependent_defaults
from finetune.commands.explicit_settings import ExplicitSettings
from finetune.runs import resume

CONVNEXT = ("--model.backbone", "timm/convnext_nano.in12k_ft_in1k")
REPORTED = {
    "image_size": 224,
    "resize": "shorter_side",
    "interpolation": "bicubic",
    "crop_share": 0.95,
}

# run_lightning would silence it; here it is an error.
pytestmark = pytest.mark.filterwarnings("ignore:LightningCLI's args parameter")


@pytest.fixture
def prepared(tmp_path, monkeypatch):
    """The preparation of images that a command line results in, and the message about it."""
    monkeypatch.setenv("PL_GLOBAL_SEED", "0")
    monkeypatch.chdir(tmp_path)
    other = "{class_path: finetune.Hotdog, init_args: {image_size: 96, crop_share: 0.5}}"
    Path("other.yaml").write_text(f"data: {other}")
    Path("own.yaml").write_text(f"data: {other}\nmodel: {{backbone: {CONVNEXT[1]}}}")

    def parse(*arguments: str):
        cli = ParseOnly(["fit", *arguments])
        data = cli.config["fit"].data.init_args
        messages = [text for text in cli.plan.messages if text.startswith("images are prepared")]
        return {name: data[name] for name in REPORTED}, "".join(messages)

    return parse


@pytest.mark.parametrize(
    ("arguments", "changes"),
    [
        (CONVNEXT, {}),
        (("--config", "other.yaml", *CONVNEXT), {"image_size": 96, "crop_share": 0.5}),
        (("--config", "own.yaml"), {"image_size": 96, "crop_share": 0.5}),
        ((*CONVNEXT, "--data.image_size", "160"), {"image_size": 160}),
        ((*CONVNEXT, "--data.init_args.interpolation=bilinear"), {"interpolation": "bilinear"}),
        (
            ("--model.backbone", "timm/vit_small_patch14_dinov2"),
            {"image_size": 518, "crop_share": 1.0},
        ),
        (
            ("--model.backbone", "timm/dm_nfnet_f0"),
            {"image_size": 192, "resize": "squash", "crop_share": 0.9},
        ),
    ],
)
def test_the_preparation_of_the_weights_holds_unless_it_is_set(prepared, arguments, changes):
    values, reported = prepared(*arguments)
    assert values == {**REPORTED, **changes}
    assert reported.startswith("images are prepared as ") and len(reported.splitlines()) == 1
    assert all(
        f"{name} {value}" in reported
        for name, value in values.items()
        if values[name] != changes.get(name)
    )


def test_a_folder_says_it_of_its_own_weights(prepared, tmp_path):
    reported = {
        "mean": [0.5] * 3,
        "std": [0.5] * 3,
        "input_size": [3, 96, 96],
        "interpolation": "bilinear",
    }
    about = {
        "architecture": "resnet18",
        "pretrained_cfg": {**reported, "crop_pct": 1.0, "crop_mode": "squash"},
    }
    Path("weights").mkdir()
    Path("weights/config.json").write_text(json.dumps(about))
    values, output = prepared("--model.backbone", "timm/resnet18", "--model.weights", "./weights")
    assert values == {
        "image_size": 96,
        "resize": "whole",
        "interpolation": "bilinear",
        "crop_share": 1.0,
    }
    assert output.startswith("images are prepared as defined by ./weights: image_size 96")


@pytest.mark.parametrize(
    "how", [("--resume",), ("--ckpt_path", "runs/fit/version_0/checkpoints/last.ckpt")]
)
def test_a_run_that_continues_prepares_them_as_before_whatever_became_of_the_folder(
    prepared, monkeypatch, how
):
    before = {
        "image_size": 96,
        "resize": "whole",
        "interpolation": "bilinear",
        "crop_share": 1.0,
        "root": "there",
    }
    checkpoint = {
        "hyper_parameters": {"backbone": "timm/resnet18"},
        "datamodule_hyper_parameters": before,
        "finetune": {},
        **dict.fromkeys(resume.PROGRESS, 0),
        "optimizer_states": [{}],
    }
    monkeypatch.setattr(resume, "read_checkpoint", lambda path: checkpoint)
    Path("runs/fit/version_0/checkpoints").mkdir(parents=True)
    Path("runs/fit/version_0/checkpoints/last.ckpt").touch()
    resumed_words = ("--model.backbone", "timm/resnet18", "--model.weights", "./gone", *how)
    assert prepared(*resumed_words)[0] == {name: before[name] for name in REPORTED}
    assert prepared(*resumed_words, "--data.image_size", "160")[0]["image_size"] == 160
    assert prepared(*CONVNEXT, *how, "--data.root", ".")[0] == REPORTED  # of another network


def test_other_networks_are_as_they_were(prepared):
    values, reported = prepared("--config", "other.yaml")
    assert values == {
        "image_size": 96,
        "resize": "shorter_side",
        "interpolation": "bilinear",
        "crop_share": 0.5,
    }
    assert reported == ""
    assert prepared()[0] == {**REPORTED, "interpolation": "bilinear", "crop_share": 0.875}


def test_a_class_of_data_that_can_not_prepare_so_is_reported(monkeypatch):
    config = Namespace(
        subcommand="fit", fit=Namespace(model=Namespace(backbone=CONVNEXT[1], weights=None))
    )
    config.fit.data = Namespace(init_args=Namespace(image_size=96))
    config.fit.update(Namespace(resume=False, ckpt_path=None))
    message = dependent_defaults.settle_preparation(config, ExplicitSettings())
    assert vars(config.fit.data.init_args) == {"image_size": 224}
    assert (
        "image_size 224" in message
        and "not interpolation, which its class does not take" in message
    )
