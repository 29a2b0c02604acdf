"""The licence of the weights that a run started from, and the model card, which has it beside results and data."""

import json
import re
from pathlib import Path

import labels_folder
import numpy as np
import pytest
from run_folders import write_run

from finetune.reports.model_card import model_card, weights_and_licence
from finetune.runs.intervals import wilson
from finetune.runs.licence import is_restricted, licence
from finetune.runs.record import RunRecord, read_run

NOT_COMMERCIAL = "convnextv2_nano.fcmae_ft_in22k_in1k"


@pytest.mark.parametrize(
    ("weights", "backbone", "words", "is_read_first"),
    [
        (None, "resnet18", "random weights", False),
        ("DEFAULT", "resnet18", "ImageNet.*BSD 3-Clause", False),
        ("IMAGENET1K_V1", "vit_b_16", "trained on ImageNet", False),
        ("ViT_B_16_Weights.IMAGENET1K_SWAG_E2E_V1", "vit_b_16", "https://.*SWAG", True),
        ("some.safetensors", "lenet", "file some.safetensors: licence unknown", False),
        ("my/folder", "timm/resnet18", "folder folder: licence unknown", False),
        ("DEFAULT", "timm/convnext_nano.in12k_ft_in1k", "licence apache-2.0$", False),
        ("DEFAULT", f"timm/{NOT_COMMERCIAL}", "cc-by-nc-4.0: commercial use is not", True),
        ("DEFAULT", "timm/vit_small_patch16_dinov3.lvd1689m", "dinov3-license", True),
    ],
)
def test_weights_of_each_kind_have_their_licence(weights, backbone, words, is_read_first):
    text = licence(weights, backbone)
    assert re.search(words, text) and is_restricted(text) == is_read_first


def test_a_file_of_weights_is_one_whatever_its_name_ends_with():
    for backbone in ("resnet18", "timm/resnet18"):
        text = licence("best.tar", backbone, is_file=True)
        assert text.startswith("the file best.tar: licence unknown")


def test_the_licence_of_a_checkpoint_goes_on_with_it():
    assert "other.ckpt: licence unknown" in licence("DEFAULT", "resnet18", "other.ckpt")
    first = licence("DEFAULT", f"timm/{NOT_COMMERCIAL}")
    second = licence("best.ckpt", "timm/convnextv2_nano", known=first)
    third = licence(None, "timm/convnextv2_nano", "last.ckpt", known=second)
    for text, name in ((second, "file best.ckpt"), (third, "checkpoint last.ckpt")):
        assert text.startswith(f"the {name}, ") and text.endswith(f"started from {first}")
        assert is_restricted(text)
    assert "\n" not in licence("best.ckpt", "resnet18", known="somebody's\nlines")
    assert licence("DEFAULT", "resnet18", known=first) == licence("DEFAULT", "resnet18")


def test_a_folder_of_timm_weights_states_its_own_licence(tmp_path):
    about = {"mean": [0.5] * 3, "std": [0.5] * 3, "input_size": [3, 96, 96], "crop_pct": 1.0}
    about |= {"interpolation": "bilinear", "license": "cc-by-nc-4.0"}
    (tmp_path / "theirs").mkdir()
    config = {"architecture": "resnet18", "pretrained_cfg": about}
    (tmp_path / "theirs/config.json").write_text(json.dumps(config))
    text = licence(str(tmp_path / "theirs"), "timm/resnet18")
    assert "folder theirs, licence cc-by-nc-4.0" in text and is_restricted(text)


# The model card


@pytest.fixture
def run(tmp_path: Path) -> RunRecord:
    p = np.array([[0.8, 0.2], [0.3, 0.7], [0.1, 0.9]])
    return read_run(write_run(tmp_path / "try", [0, 0, 1], p, ["a", "b"], doubts=["few images"]))


def test_a_model_card_has_the_results_the_data_and_the_licence_of_its_run(run):
    weights = weights_and_licence(run)
    card = model_card(run, "photos", weights)
    assert card.startswith("# try\n") and "2 classes: a, b." in card
    assert "test accuracy 66.7 % (2 of 3;" in card
    for name, num_images, num_right in (("a", 2, 1), ("b", 1, 1)):
        low, high = wilson(num_right, num_images)
        recall = f"{num_right / num_images:.3f} ({low:.3f}–{high:.3f})"
        assert f"| {name} | {num_images} | {recall} | " in card
    assert all(words in card for words in ("- few images", "a 4, b 4", "f00d", "random weights"))
    (run.path / "test.json").unlink()
    assert "No test images" in model_card(read_run(run.path), "photos", weights)
    config = run.path / "config.yaml"
    config.write_text(config.read_text().replace("weights: null", "weights: a/b.safetensors"))
    assert "file a/b.saf" in weights_and_licence(read_run(run.path))


def test_the_model_card_of_several_labels_has_a_row_for_each(tmp_path):
    labels, p = labels_folder.drawn()
    run = read_run(labels_folder.write_labels_run(tmp_path / "try", labels, p, ["a", "b", "c|d"]))
    card = model_card(run, "photos", weights_and_licence(run))
    assert "test mAP 0." in card and "accuracy" not in card and "a, b, c|d" in card
    for name, num in zip(["a", "b", r"c\|d"], labels.sum(axis=0), strict=True):
        assert re.search(rf"\| {re.escape(name)} \| {num} \| [01]\.\d+ \(0\.", card)
    assert f"- {len(labels)} images: a {labels.sum(axis=0)[0]}, " in card
