"""Networks of timm: their facts, which are supported, and at which sizes."""

import json
import math
import sys

import pytest
import timm
import torch
from networks import skeleton
from tiers import sweep
from timm.data import ImageNetInfo, resolve_data_config
from timm_scenarios import FAMILIES

from finetune.models.backbones import build, normalization
from finetune.models.stages import head, head_name
from finetune.models.timm_backbones import describe, timm_name


@pytest.mark.parametrize("family", sweep(FAMILIES, quick=("resnet", "vit")))
def test_the_head_is_timms_classifier_and_xavier(family):
    backbone, image_size = FAMILIES[family]
    network = build(backbone, 3, image_size).eval()
    assert network.get_submodule(timm.get_pretrained_cfg(timm_name(backbone)).classifier) is head(
        network
    )
    bound = (6 / (head(network).in_features + 3)) ** 0.5  # Glorot and Bengio 2010, equation 16
    assert 0.9 * bound < head(network).weight.abs().max() <= bound
    with torch.inference_mode():
        assert network(torch.rand(2, 3, image_size, image_size)).shape == (2, 3)
    theirs = timm.create_model(timm_name(backbone), num_classes=3).state_dict()
    assert list(network.state_dict()) == list(theirs)


@pytest.mark.parametrize(
    "backbone",
    [
        "timm/convnext_nano.in12k_ft_in1k",
        "timm/vit_tiny_patch16_224",
        "timm/vit_small_patch14_dinov2",
        "timm/focalnet_tiny_srf",
        *(name for name, _ in FAMILIES.values()),
    ],
)
def test_the_description_is_what_timm_itself_goes_by(backbone):
    theirs = resolve_data_config(
        pretrained_cfg=timm.get_pretrained_cfg(timm_name(backbone)).to_dict()
    )
    ours = describe(backbone)
    assert (ours.mean, ours.std, ours.crop_share) == (
        theirs["mean"],
        theirs["std"],
        theirs["crop_pct"],
    )
    assert ours.interpolation == theirs["interpolation"]
    assert (3, ours.image_size, ours.image_size) == theirs["input_size"]
    assert ours.resize == {"center": "shorter_side", "squash": "squash"}[theirs["crop_mode"]]
    assert normalization(backbone) == (ours.mean, ours.std)


def test_what_is_squashed_and_not_cropped_is_whole():
    assert describe("timm/coat_lite_medium_384").resize == "whole"
    assert describe("timm/dm_nfnet_f0")[5:7] == (0.9, "squash")


@pytest.mark.parametrize(
    ("backbone", "message"),
    [
        ("timm/resnet81", "no network 'resnet81'; did you mean 'resnet18'"),
        ("timm/resnet18.nowhere", "no weights 'nowhere' of resnet18; valid are .*tv_in1k"),
        ("timm/deit_tiny_distilled_patch16_224", r"it has 2 heads \(head, head_dist\), not one$"),
        ("timm/levit_384_s8", "its head head.linear is not the last of its linear layers$"),
        ("timm/resnet18.", "has no weights '' of resnet18; valid are .*tv_in1k"),
        ("timm/coat_tiny", "several of its modules share weights$"),
        ("timm/dla34", "it ends in a Conv2d, not in a linear head$"),
        ("timm/qwen3_vit_88m_enc", "it has no head, not one$"),
    ],
)
def test_what_is_unsupported_is_reported_in_a_line(backbone, message):
    with pytest.raises(ValueError, match=message) as caught:
        skeleton(backbone)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "name", ["hf-hub:somebody/theirs", "hf_hub:somebody/theirs", "local-dir:/tmp", "/tmp", ""]
)
def test_a_name_is_never_a_place(name, monkeypatch):
    monkeypatch.setattr(timm, "create_model", lambda *_, **__: pytest.fail("made"))
    with pytest.raises(ValueError, match="has no network"):
        build(f"timm/{name}", 3)


def test_without_timm_a_line_says_how_to_get_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "timm", None)
    with pytest.raises(
        ValueError,
        match=r"^timm/resnet18 needs timm: pip install '\.\[timm\]' in a checkout of finetune$",
    ):
        build("timm/resnet18", 3)


def test_positions_are_of_the_images_size():
    backbone = "timm/vit_small_patch16_224"
    with torch.device("meta"):
        assert build(backbone, 3, 48).pos_embed.shape[1] == 1 + 3 * 3
        network = build(backbone, 3)
        assert network.pos_embed.shape[1] == 1 + 14 * 14
        with pytest.raises(AssertionError):  # which is why the size is asked for
            network(torch.rand(1, 3, 48, 48))


def test_a_size_that_does_not_fit_is_reported():
    with pytest.raises(
        ValueError,
        match=r"nest_tiny does not support images of 100x100 pixels: .* image_size 224$",
    ):
        build("timm/nest_tiny", 3, 100)


def config(**changes):
    description = {
        "mean": [0.5] * 3,
        "std": [0.25] * 3,
        "input_size": [3, 96, 96],
        "interpolation": "bilinear",
    }
    description |= {"crop_pct": 0.9, "crop_mode": "center", "license": "cc-by-nc-4.0"}
    above = {"architecture": "resnet18", "num_classes": 2, "label_names": ["a", "b"]}
    return {**above, **changes, "pretrained_cfg": description | changes.get("pretrained_cfg", {})}


def test_a_folder_describes_itself(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(config(label_descriptions={"a": "an ape"})))
    description = describe("timm/resnet18.tv_in1k", tmp_path)
    assert description[1:5] == ((0.5,) * 3, (0.25,) * 3, 96, "bilinear")
    assert description[5:] == (0.9, "shorter_side", "cc-by-nc-4.0", 2, ["an ape", "b"])
    for unnamed in (
        {"label_names": 2},
        {"label_descriptions": ["an ape", "b"]},
        {"num_classes": None},
    ):
        (tmp_path / "config.json").write_text(json.dumps(config(model_args=None, **unnamed)))
        assert describe("timm/resnet18.tv_in1k", tmp_path).class_names is None


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            json.dumps(config(architecture="resnet34")),
            "is of resnet34, not of resnet18: .*--model.backbone timm/resnet34",
        ),
        (json.dumps(config(model_args={"act_layer": "gelu"})), "with other arguments .*gelu"),
        (json.dumps(config(model_args={"in_chans": 1})), "with other arguments .*in_chans"),
        (
            json.dumps(config(pretrained_cfg={"crop_mode": "border"})),
            "needs an unsupported preparation of images: .*crop border",
        ),
        (
            json.dumps(config(pretrained_cfg={"interpolation": "lanczos"})),
            "needs an unsupported preparation of images",
        ),
        (
            json.dumps(config(pretrained_cfg={"input_size": [3, 96, 64]})),
            "only square RGB images are supported",
        ),
        (
            json.dumps(config(pretrained_cfg={"mean": None})),
            "does not define how images are prepared",
        ),
        (
            json.dumps(config(pretrained_cfg={"input_size": "abb"})),
            "only square RGB images are supported",
        ),
        (
            json.dumps(config(pretrained_cfg={"std": [0.5, 0, 0.5]})),
            r"deviation \(0.5, 0.0, 0.5\), which is not supported",
        ),
        (json.dumps(config(pretrained_cfg={"mean": [0.5]})), r"mean \(0.5,\) .*not supported"),
        (
            json.dumps(config(pretrained_cfg={"mean": [math.nan] * 3})),
            r"mean \(nan, nan, nan\) .*not supported",
        ),
        (
            json.dumps({**config(), "pretrained_cfg": None}),
            "is damaged, or not written by timm: its pretrained_cfg",
        ),
        (json.dumps(config(model_args=[1])), "is damaged, or not written by timm: its model_args"),
        ("{}", "is damaged, or not written by timm"),
        ("[]", "is damaged, or not written by timm"),
        ("no json", "is damaged, or not written by timm"),
        (None, "has no config.json"),
    ],
)
def test_a_folder_that_does_not_do_says_why(tmp_path, text, message):
    if text is not None:
        (tmp_path / "config.json").write_text(text)
    with pytest.raises(ValueError, match=message) as caught:
        describe("timm/resnet18", tmp_path)
    assert "\n" not in str(caught.value)


def test_names():
    assert head_name(skeleton("timm/mobilenetv4_conv_small")) == "classifier"
    assert timm_name("timm/convnext_nano.in12k_ft_in1k") == "convnext_nano.in12k_ft_in1k"


@pytest.mark.parametrize(
    "tag", ["in1k", "ra_in1k", "fb_in22k_ft_in1k_384", "in12k", "in21k", "x_in1kk", None]
)
def test_rows_of_imagenet_have_its_names_without_a_list(tag, tmp_path):
    about = {**timm.get_pretrained_cfg("resnet18").to_dict(), "tag": tag}
    description = {"architecture": "resnet18", "num_classes": 1000, "pretrained_cfg": about}
    (tmp_path / "config.json").write_text(json.dumps(description))
    names = describe("timm/resnet18", tmp_path).class_names
    if tag is None or "in1k" not in tag.split("_"):
        assert names is None
        return
    info = ImageNetInfo("imagenet-1k")  # timm's own order of the rows, in WordNet's words
    assert names[934] == "hotdog" and len(names) == 1000
    same = [name.lower() in info.index_to_description(i).lower() for i, name in enumerate(names)]
    assert sum(same) == 998  # "crane bird" and "maillot tank suit" are written otherwise
    # it was trained further on others
    (tmp_path / "config.json").write_text(json.dumps({**description, "num_classes": 3}))
    assert describe("timm/resnet18", tmp_path).class_names is None
