"""The message about weights that do not fit has one action."""

import pytest
import timm
import torch
from networks import skeleton

from finetune.models.backbones import build
from finetune.models.misfits import advice
from finetune.models.weight_files import Pretrained
from finetune.models.weights import load_weights, read_weights

LITE = "timm/tf_efficientnet_lite0"
TORCHVISION = "efficientnet_b0"
TIMM = "timm/efficientnet_b0"


def names(backbone: str) -> list[str]:
    return list(skeleton(backbone).state_dict())


def unconverted(backbone: str) -> list[str]:
    """Names as the original code of EfficientNet has them."""
    renamed = (
        name.replace("conv_stem", "_conv_stem").replace("blocks.", "_blocks.")
        for name in names(backbone)
    )
    return [
        name.replace("bn1", "_bn0").replace("conv_head", "_conv_head").replace("bn2", "_bn1")
        for name in renamed
    ]


@pytest.mark.parametrize(
    ("given", "backbone", "reported"),
    [
        (
            lambda: names(TORCHVISION),
            TIMM,
            "It is of efficientnet_b0: pass --backbone efficientnet_b0",
        ),
        (
            lambda: names(TIMM),
            TORCHVISION,
            "It is of timm/efficientnet_b0: pass --backbone timm/efficientnet_b0",
        ),
        (
            lambda: names(TORCHVISION),
            f"{TIMM}.ra_in1k",
            "It is of efficientnet_b0: pass --backbone efficientnet_b0",
        ),
        (
            lambda: names("resnet34"),
            "resnet18",
            "It is of another network: pass its name as --backbone",
        ),
        (
            lambda: names("timm/tf_efficientnet_lite1"),
            LITE,
            "It is of another network: pass its name as --backbone",
        ),
        (
            lambda: unconverted(LITE),
            LITE,
            "Its parameters have the names of other code (_blocks.0.0._bn0.bias, where ",
        ),
        (
            lambda: unconverted(LITE),
            LITE,
            "): pass the file that timm publishes, or rename them",
        ),
        (
            lambda: unconverted(LITE),
            "resnet18",
            "): pass the file that torchvision publishes, or rename them",
        ),
        (
            lambda: [name for name in names(LITE) if name != "blocks.3.0.bn1.weight"],
            LITE,
            "The file is incomplete: get it again",
        ),
        # all of them, so shapes differ
        (lambda: names(LITE), LITE, "It is of another network: "),
        # a smaller network with the same names
        (lambda: names("resnet18"), "resnet34", "It is of another network: "),
        # a network of ours has no twin
        (lambda: ["layers.0.weight"], "lenet", "): pass the file that "),
    ],
)
def test_there_is_one_thing_to_do(given, backbone, reported):
    assert reported in advice(given(), backbone)


@pytest.mark.slow
def test_it_is_reported_with_what_does_not_fit(tmp_path):
    torch.save(
        timm.create_model("tf_efficientnet_lite1", num_classes=2).state_dict(),
        tmp_path / "lite1.pth",
    )
    missing = timm.create_model("tf_efficientnet_lite0", num_classes=2).state_dict()
    del missing["blocks.3.0.bn1.weight"]
    torch.save(missing, tmp_path / "missing.pth")
    torch.save(dict.fromkeys(unconverted(LITE), torch.ones(1)), tmp_path / "unconverted.pth")
    for name, reported in (
        ("lite1", "It is of another network: "),
        (
            "missing",
            'Missing key.s. in state_dict: "blocks.3.0.bn1.weight". The file is incomplete',
        ),
        ("unconverted", "have the names of other code"),
    ):
        with pytest.raises(
            ValueError, match=f"{name}.pth does not fit {LITE}: .*{reported}"
        ) as caught:
            read_weights(str(tmp_path / f"{name}.pth"), LITE)
        assert "\n" not in str(caught.value)


def test_weights_of_torchvision_report_it_too():
    state = {name: torch.ones(1) for name in names("resnet34")}
    with pytest.raises(
        ValueError,
        match=r"the file does not fit this network; .*It is of another network: pass its name",
    ):
        load_weights(build("resnet18", 2), Pretrained(state, None, "the file"), "resnet18")
    good = build("resnet18", 2).state_dict()
    good["conv1.weight"][0] = torch.nan  # the right network, whose numbers are broken
    with pytest.raises(ValueError, match="NaN or infinite, in conv1.weight: pass other weights"):
        load_weights(build("resnet18", 2), Pretrained(good, None, "the file"), "resnet18")
