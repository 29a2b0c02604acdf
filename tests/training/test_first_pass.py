"""Errors before training: images that a network cannot take, and batches that batch norm cannot train on."""

from contextlib import nullcontext
from functools import cache
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from colours import QUICK, QUICKEST, draw_colours
from data_files import nowhere
from torch import nn

from finetune import Classifier
from finetune.cli import main
from finetune.data.samples import Samples
from finetune.data.targets import MultiHot
from finetune.models.size_check import check_first_pass
from finetune.system.messages import WrongUsage
from finetune.training.first_pass import check_fit

NAMES = ["blue", "green", "red"]


@pytest.mark.parametrize(
    ("backbone", "size", "reason"),
    [
        pytest.param("alexnet", 32, "Output size is too small", marks=pytest.mark.slow),
        pytest.param("inception_v3", 64, "Kernel size can't be greater", marks=pytest.mark.slow),
        ("timm/test_maxvit", 50, "that of its weights is --data.image_size 160"),
        ("small_cnn", 32, "image_size must be 28"),
    ],
)
def test_a_size_that_a_network_can_not_take_is_reported(
    colours, tmp_path, monkeypatch, capsys, backbone, size, reason
):
    monkeypatch.chdir(tmp_path)
    # of seconds of random numbers
    for draw in ("kaiming_uniform_", "normal_", "trunc_normal_", "xavier_uniform_"):
        monkeypatch.setattr(nn.init, draw, lambda tensor, *_, **__: tensor)
    arguments = [
        "fit",
        "--data.root",
        colours,
        *QUICKEST,
        "--model.backbone",
        backbone,
        "--data.image_size",
        size,
    ]
    with pytest.raises(SystemExit) as caught:
        main([str(argument) for argument in arguments])
    error = capsys.readouterr().err
    assert caught.value.code == 1 and error.count("\n") == 1
    assert error.startswith(
        f"finetune: error: {backbone} does not support images of {size}x{size} pixels: "
    )
    assert reason in error
    assert not list(tmp_path.rglob("*"))  # nothing was begun
    if backbone == "alexnet":
        monkeypatch.setenv("FINETUNE_DEBUG", "1")
        with pytest.raises(SystemExit):
            main([str(argument) for argument in arguments])
        error = capsys.readouterr().err
        assert "RuntimeError" in error and "Traceback" in error  # torch's own, with where it was


@pytest.mark.parametrize("backbone", ["mobilenet_v3_small", "resnet18_small"])
def test_the_first_pass_changes_nothing(backbone):
    model = Classifier(NAMES, backbone=backbone, weights=None, freeze=None)
    model.network.eval()
    next(model.network.children()).train()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    modes = [module.training for module in model.modules()]
    generator = torch.random.get_rng_state()
    check_first_pass(model.image_classifier, backbone, 32)
    assert modes == [module.training for module in model.modules()]
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert torch.equal(torch.random.get_rng_state(), generator)
    assert not any(module._forward_pre_hooks for module in model.network.modules())


@cache
def classifier(backbone: str) -> Classifier:
    return Classifier(NAMES, backbone=backbone, weights=None)


def trainer(**options: Any) -> Any:
    limits = {f"limit_{split}_batches": 1.0 for split in ("train", "val", "test", "predict")}
    numbers = {"max_epochs": 5, "max_steps": -1, "accumulate_grad_batches": 1}
    return SimpleNamespace(**{**numbers, **limits, **options})


def data(num: int, batch_size: int, image_size: int, **more: Any) -> Any:
    splits = {"train": nowhere(num)}
    sizes = {"image_size": image_size, "eval_image_size": image_size, **more}
    fixed = {"hparams": {}, "label_kind": "single", "root": "there"}
    return SimpleNamespace(**fixed, splits=splits, batch_size=batch_size, **sizes)


@pytest.mark.parametrize(
    ("backbone", "num", "batch_size", "options", "refused"),
    [
        ("mobilenet_v3_small", 36, 35, {}, True),
        ("mobilenet_v3_small", 56, 11, {}, True),
        ("mobilenet_v3_small", 1, 8, {}, True),
        ("mobilenet_v3_small", 5, 1, {"limit_train_batches": 2}, True),
        ("mobilenet_v3_small", 56, 11, {"limit_train_batches": 6}, True),
        # the last batch is never seen
        ("mobilenet_v3_small", 56, 11, {"limit_train_batches": 5}, False),
        ("mobilenet_v3_small", 56, 11, {"limit_train_batches": 0.9}, False),
        ("mobilenet_v3_small", 56, 11, {"max_steps": 5}, False),
        ("mobilenet_v3_small", 56, 11, {"max_steps": 3, "accumulate_grad_batches": 2}, True),
        ("mobilenet_v3_small", 57, 11, {}, False),
        ("mobilenet_v3_small", 55, 11, {}, False),
        ("resnet18_small", 56, 11, {}, False),  # maps of 4x4
    ],
)
def test_a_batch_on_which_batch_norm_can_not_train_is_found_before(
    backbone, num, batch_size, options, refused
):
    model = classifier(backbone)
    images = data(num, batch_size, 32)
    if refused:
        reported = f"{num} images .* batches of {batch_size}, leave one .* {backbone}"
        with pytest.raises(ValueError, match=reported) as caught:
            check_fit(trainer(**options), model, images)
        assert "--data.batch_size" in str(caught.value) and "--model.freeze_batch_norm true" in str(
            caught.value
        )
        # what would come
        with pytest.raises(ValueError, match="Expected more than 1 value per channel"):
            model.network.train()(torch.zeros(1, 3, 32, 32))
    else:
        check_fit(trainer(**options), model, images)
    # which takes statistics from nowhere else
    check_fit(trainer(**options), model, images, "test")


@pytest.mark.parametrize(
    ("image_size", "options"),
    [(64, {}), (32, {"freeze_batch_norm": True}), (32, {"freeze": "backbone"})],
)
def test_what_that_line_advises_helps(image_size, options):
    model = Classifier(NAMES, backbone="mobilenet_v3_small", weights=None, **options)
    check_fit(trainer(), model, data(36, 35, image_size))


@pytest.mark.parametrize(
    ("size", "of_evaluation", "reported"),
    [
        (32, 64, "cannot train on one at 32 pixels"),
        (128, 32, None),  # evaluation takes statistics from nowhere
        (28, 64, "does not support images of 28x28 pixels"),
        (64, 28, "does not support images of 28x28 pixels"),
    ],
)
def test_the_sizes_of_training_and_of_evaluation_are_looked_at(size, of_evaluation, reported):
    backbone = "alexnet" if "support" in (reported or "") else "mobilenet_v3_small"
    model = classifier(backbone)
    images = data(36, 35, size, eval_image_size=of_evaluation)
    with pytest.raises(ValueError, match=reported) if reported else nullcontext():
        check_fit(trainer(), model, images)


@pytest.mark.slow
def test_it_is_found_by_fit_on_any_devices_before_there_is_a_run(tmp_path, cli):
    root = draw_colours(tmp_path / "few", train=7)
    options = ["--data.root", root, *QUICK, "--data.batch_size", 5, "--data.val_fraction", 0]
    for more in ([], ["--trainer.devices", 2, "--trainer.strategy", "ddp"]):
        with pytest.raises(ValueError, match="21 images to train on, in batches of 5, leave one"):
            cli("fit", *options, *more)
    assert not (tmp_path / "runs").exists()


def test_a_network_that_fails_in_its_own_way_is_named():
    class Failing(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            raise KeyError

    model = Classifier(NAMES, backbone="small_cnn", weights=None)
    model.image_classifier.network = Failing()  # type: ignore[assignment]
    with pytest.raises(
        ValueError, match="small_cnn does not support images of 28x28 pixels: KeyError"
    ):
        check_first_pass(model.image_classifier, model.backbone, 28)


@pytest.mark.parametrize("name", ["max_epochs", "max_steps", "limit_train_batches"])
def test_a_fit_without_a_step_is_wrong_usage(name):
    model = classifier("small_cnn")
    with pytest.raises(WrongUsage, match=f"nothing to train: trainer.{name} is 0"):
        check_fit(trainer(**{name: 0}), model, data(8, 4, 28))
    check_fit(trainer(**{name: 0}), model, data(8, 4, 28), "test")


@pytest.mark.parametrize(
    ("command", "split"), [("validate", "val"), ("test", "test"), ("predict", "predict")]
)
@pytest.mark.parametrize("nothing", [0, 0.0])
def test_a_command_without_a_batch_is_wrong_usage(command, split, nothing):
    model = classifier("small_cnn")
    without = trainer(**{f"limit_{split}_batches": nothing})
    with pytest.raises(
        WrongUsage, match=f"nothing to {command}: trainer.limit_{split}_batches is 0"
    ):
        check_fit(without, model, data(8, 4, 28), command)
    check_fit(without, model, data(8, 4, 28))


@pytest.mark.parametrize(
    ("command", "limits", "reported"),
    [
        (
            "fit",
            {"limit_test_batches": 0.1},
            "limit_test_batches 0.1 is less than one batch of test",
        ),
        ("fit", {"limit_val_batches": 0.3}, "limit_val_batches 0.3 is less than one batch of val"),
        (
            "fit",
            {"limit_train_batches": 0.2},
            "limit_train_batches 0.2 is less than one batch of train",
        ),
        # a warning of the loader: the images may still become others
        ("test", {"limit_test_batches": 0.1}, ""),
        ("test", {"limit_val_batches": 0.3}, ""),
        ("fit", {"limit_test_batches": 0.2, "limit_val_batches": 0.4}, ""),
    ],
)
def test_a_share_that_leaves_nothing_is_reported_before_training(command, limits, reported):
    images = data(24, 8, 28)
    images.splits |= {name: nowhere(num) for name, num in (("val", 24), ("test", 40))}
    model = classifier("small_cnn")
    with pytest.raises(ValueError, match=reported) if reported else nullcontext():
        check_fit(trainer(**limits), model, images, command)


@pytest.mark.slow
@pytest.mark.parametrize("length", [["--trainer.max_epochs", "1"], ["--minutes", "1"]])
def test_a_fit_needs_a_training_folder_with_all_classes_that_were_given(tmp_path, cli, length):
    root = draw_colours(tmp_path / "few", test=2)
    short = [option for option in QUICKEST if option not in ("--trainer.max_epochs", "1")]
    fit = ["fit", "--data.root", root, *short, "--data.class_names", "[blue,green,red]", *length]
    with pytest.raises(
        ValueError, match=r"few has no 'train'; put the training images in .*few/train/CLASS$"
    ):
        cli(*fit)
    (root / "test").rename(root / "train")
    for path in (root / "train/green").iterdir():
        path.unlink()
    with pytest.raises(
        ValueError,
        match="few has no images to train on of green: add some, or remove that class",
    ):
        cli(*fit)
    assert not (tmp_path / "runs/fit").exists()


def labelled(labels: np.ndarray) -> Any:
    samples = Samples(["nowhere.png"] * len(labels), MultiHot(labels))
    images = data(len(labels), 4, 28)
    images.label_kind = "several"
    images.splits = {"train": samples, "val": samples}
    return images


def test_labels_of_another_kind_than_those_of_the_network_are_refused():
    single = classifier("small_cnn")
    several = Classifier(NAMES, backbone="small_cnn", weights=None, label_kind="several")
    labels = np.ones((8, 3), np.uint8)
    for command in ("fit", "validate", "test"):
        with pytest.raises(
            ValueError, match="one class per image, and the images of there have se"
        ):
            check_fit(trainer(), single, labelled(labels), command)
        with pytest.raises(ValueError, match="several labels an image, and the images of there ha"):
            check_fit(trainer(), several, data(8, 4, 28), command)
        check_fit(trainer(), several, labelled(labels), command)
    check_fit(trainer(), several, data(8, 4, 28), "predict")


def test_several_labels_of_which_no_image_has_any_are_refused():
    model = Classifier(NAMES, backbone="small_cnn", weights=None, label_kind="several")
    images = labelled(np.ones((8, 3), np.uint8))
    images.splits["val"] = images.splits["val"].take(np.arange(4))
    images.splits["val"].targets.labels[:] = 0
    with pytest.raises(ValueError, match="no image of val in there has a label"):
        check_fit(trainer(), model, images)
    check_fit(trainer(limit_val_batches=0), model, images)
    check_fit(trainer(), model, images, "test")
    images.splits["train"] = images.splits["val"]
    with pytest.raises(ValueError, match="no image of train in there has a label"):
        check_fit(trainer(), model, images)
