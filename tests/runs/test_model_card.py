"""The model card: results, data and licence."""

import re
from dataclasses import replace

import labels_folder
import numpy as np
import pytest
from run_folders import write_run

from finetune.runs.model_card import model_card, weights_and_licence
from finetune.runs.record import read_run
from finetune.runs.statistics import interval


@pytest.fixture
def run(tmp_path):
    p = np.array([[0.8, 0.2], [0.3, 0.7], [0.1, 0.9]])
    return read_run(write_run(tmp_path / "try", [0, 0, 1], p, ["a", "b"], doubts=["few images"]))


def test_numbers_of_the_run(run):
    card = model_card(run)
    assert card.startswith("# try\n") and "An image classifier of 2 classes: a, b." in card
    assert f"| all (accuracy) | 66.7 % | {interval(2, 3)} |" in card
    assert (
        f"| a | 50.0 % | {interval(1, 2)} |" in card
        and f"| b | 100.0 % | {interval(1, 1)} |" in card
    )
    assert "- few images" in card and "8 images: a 4, b 4" in card and "f00d" in card


@pytest.mark.parametrize(("of_evaluation", "seen"), [(None, 32), (48, 48)])
def test_it_says_what_the_network_sees_where_it_is_used(run, of_evaluation, seen):
    settings = {"image_size": 32, "eval_image_size": of_evaluation}
    config = {
        **run.config,
        "data": {"init_args": settings},
        "model": {"backbone": "resnet18", "weights": None},
    }
    assert f"resnet18, input {seen} x {seen} pixels" in model_card(replace(run, config=config))


def test_it_says_how_many_networks_answer_together(run):
    card = {
        num: model_card(replace(run, config={"model": {"backbone": "resnet18", "members": num}}))
        for num in (1, 3)
    }
    assert "Network: resnet18, input" in card[1] and "Network: 3 × resnet18, input" in card[3]


def test_without_a_test_it_says_so(run):
    assert "No test images" in model_card(replace(run, result={}))


@pytest.mark.parametrize(
    ("weights", "reported"),
    [
        (None, "random weights"),
        ("DEFAULT", "torchvision's DEFAULT weights"),
        ("a/b.safetensors", "the file a/b.saf"),
    ],
)
def test_whose_terms_hold(run, weights, reported):
    assert weights_and_licence(replace(run, config={"model": {"weights": weights}})).startswith(
        reported
    )


def test_several_labels_have_a_row_each(tmp_path):
    labels, p = labels_folder.drawn()
    run = read_run(labels_folder.write_labels_run(tmp_path / "try", labels, p, ["a", "b", "c"]))
    card = model_card(run)
    assert "3 labels, of which an image has several or none: a, b, c" in card
    assert "test mAP 0." in card and "accuracy" not in card
    assert "it gives each of them a probability" in card
    for name, num in zip("abc", labels.sum(axis=0), strict=True):
        assert re.search(rf"\| {name} \| {num} \| [01]\.\d+ \(0\.", card)
    assert f"- {len(labels)} images: a {labels.sum(axis=0)[0]}, " in card
