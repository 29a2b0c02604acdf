"""The licence of the weights that a run started from."""

import json
import re

import pytest

from finetune.runs.licence import is_restricted, licence


@pytest.mark.parametrize(
    ("weights", "backbone", "reported"),
    [
        (None, "resnet18", "random weights, which need no licence"),
        (
            "DEFAULT",
            "resnet18",
            "torchvision's DEFAULT weights, trained on ImageNet: .* BSD 3-Clause",
        ),
        (
            "ResNet18_Weights.IMAGENET1K_V1",
            "resnet18",
            "torchvision's ResNet18_Weights.IMAGENET1K_V1 weights, trained",
        ),
        # not BSD
        (
            "IMAGENET1K_SWAG_LINEAR_V1",
            "vit_b_16",
            "have a licence of their own: https://.*SWAG.*LICENSE",
        ),
        (
            "ViT_B_16_Weights.IMAGENET1K_SWAG_E2E_V1",
            "vit_b_16",
            "have a licence of their own: https://.*SWAG",
        ),
        ("IMAGENET1K_V1", "vit_b_16", "trained on ImageNet"),
        ("some.safetensors", "lenet", "the file some.safetensors: licence unknown"),
        ("some.pt", "timm/resnet18", "the file some.pt: licence unknown"),
        (
            "DEFAULT",
            "timm/convnext_nano.in12k_ft_in1k",
            "_nano.in12k_ft_in1k weights, licence apache-2.0$",
        ),
        (
            "DEFAULT",
            "timm/convnextv2_nano.fcmae_ft_in22k_in1k",
            "licence cc-by-nc-4.0: commercial use is not allowed$",
        ),
        (
            "DEFAULT",
            "timm/vit_small_patch16_dinov3.lvd1689m",
            "licence dinov3-license: terms of their own, which you",
        ),
        ("my/folder", "timm/resnet18", "the folder folder: licence unknown"),
        (None, "timm/resnet18", "random weights, which need no licence"),
    ],
)
def test_each_kind_of_weights_has_its_terms(weights, backbone, reported):
    assert re.search(reported, licence(weights, backbone))


def test_what_went_on_from_another_run_has_the_terms_of_that():
    assert licence("DEFAULT", "resnet18", "other.ckpt").startswith(
        "the checkpoint other.ckpt: licence unknown"
    )


@pytest.mark.parametrize("backbone", ["resnet18", "timm/resnet18"])
@pytest.mark.parametrize("name", ["weights.bin", "best.tar", "weights"])
def test_a_file_is_one_whatever_its_name_ends_with(name, backbone):
    reported = f"the file {name}: licence unknown, ask its author for the terms"
    assert licence(name, backbone, is_file=True) == reported


def test_what_is_known_of_a_checkpoint_of_ours_continues_with_it():
    first = licence("DEFAULT", "timm/convnextv2_nano.fcmae_ft_in22k_in1k")
    second = licence("best.ckpt", "timm/convnextv2_nano", known=first)
    assert (
        second
        == f"the file best.ckpt, whose author decides on its licence; its training started from {first}"
    )
    third = licence(None, "timm/convnextv2_nano", "last.ckpt", known=second)
    assert (
        third
        == f"the checkpoint last.ckpt, whose author decides on its licence; its training started from {first}"
    )
    assert is_restricted(second) and is_restricted(third)
    assert "\n" not in licence("best.ckpt", "resnet18", known="somebody's\nlines")
    assert licence("DEFAULT", "resnet18", known=first) == licence("DEFAULT", "resnet18")


def test_a_folder_of_timms_states_its_own(tmp_path):
    reported = {
        "mean": [0.5] * 3,
        "std": [0.5] * 3,
        "input_size": [3, 96, 96],
        "interpolation": "bilinear",
    }
    reported |= {"crop_pct": 1.0, "license": "cc-by-nc-4.0"}
    (tmp_path / "theirs").mkdir()
    (tmp_path / "theirs/config.json").write_text(
        json.dumps({"architecture": "resnet18", "pretrained_cfg": reported})
    )
    text = licence(str(tmp_path / "theirs"), "timm/resnet18")
    assert (
        text
        == "the weights in the folder theirs, licence cc-by-nc-4.0: commercial use is not allowed"
    )


def test_what_should_be_read_first_is_distinguished_from_the_rest():
    free = [
        ("DEFAULT", "resnet18"),
        ("DEFAULT", "timm/resnet18"),
        ("a.pt", "resnet18"),
        (None, "timm/resnet18"),
    ]
    others = [
        ("IMAGENET1K_SWAG_LINEAR_V1", "vit_b_16"),
        ("DEFAULT", "timm/convnextv2_nano.fcmae_ft_in22k_in1k"),
        ("DEFAULT", "timm/vit_small_patch16_dinov3.lvd1689m"),
    ]
    assert not any(is_restricted(licence(*weights)) for weights in free)
    assert all(is_restricted(licence(*weights)) for weights in others)
