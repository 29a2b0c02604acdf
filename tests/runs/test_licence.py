"""Whose terms hold for the weights that a run began with."""

import re

import pytest

from finetune.runs.licence import licence


@pytest.mark.parametrize(
    ("weights", "backbone", "told"),
    [
        (None, "resnet18", "random weights: nobody else's terms hold"),
        ("DEFAULT", "resnet18", "torchvision's DEFAULT weights, learned from ImageNet: .* BSD 3-Clause"),
        ("ResNet18_Weights.IMAGENET1K_V1", "resnet18", "torchvision's ResNet18_Weights.IMAGENET1K_V1 weights, learned"),
        ("IMAGENET1K_SWAG_LINEAR_V1", "vit_b_16", "have a licence of their own: https://.*SWAG.*LICENSE"),  # not BSD
        ("ViT_B_16_Weights.IMAGENET1K_SWAG_E2E_V1", "vit_b_16", "have a licence of their own: https://.*SWAG"),
        ("IMAGENET1K_V1", "vit_b_16", "learned from ImageNet"),
        ("some.safetensors", "lenet", "the file some.safetensors: licence unknown"),
    ],
)
def test_each_kind_of_weights_has_its_terms(weights, backbone, told):
    assert re.search(told, licence(weights, backbone))


def test_what_went_on_from_another_run_has_the_terms_of_that():
    assert licence("DEFAULT", "resnet18", "other.ckpt").startswith("the checkpoint other.ckpt: licence unknown")
