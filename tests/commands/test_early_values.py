"""Invalid values are refused before anything is downloaded."""

import re
from unittest.mock import patch

import pytest
from colours import QUICKEST
from lightning_fabric.utilities.exceptions import MisconfigurationException
from tiers import sweep

from finetune.commands.error_lines import exit_code, one_line
from finetune.data.datasets.image_folder import Hotdog

# the first expensive step of a command that needs no image
BUILT = {
    "fit": "finetune.training.classifier.build_image_classifier",
    "test": "finetune.commands.lightning_cli.complete",
}
WRONG = [
    (["--lr", "-1"], r"--lr \(--model.optimizer.lr\): Invalid learning rate: -1.0"),
    (
        ["--class_weights", "cat:2,dog:-1"],
        r"^--class_weights \(--model.class_weights\): the weight of 'dog' must be 0 or a number",
    ),
    (["--epochs", "-3"], r"^--epochs \(--trainer.max_epochs\) must be a non-negative integer"),
    (["--epochs=0"], r"nothing to train: --epochs \(--trainer.max_epochs\) is 0"),
    (
        ["--model.scheduler", "OneCycleLR", "--model.scheduler.max_lr", "1"],
        "OneCycleLR is not supported: take finetune.WarmupCosine",
    ),
    *(
        ([f"--trainer.{name}", value], f"^--trainer.{name} is not supported: remove it")
        for name, value in (
            ("min_epochs", "3"),
            ("max_time", "00:01:00:00"),
            ("fast_dev_run", "1"),
            ("sync_batchnorm", "true"),
        )
    ),
    (
        ["--trainer.callbacks", "EMAWeightAveraging"],
        "EMAWeightAveraging is not supported: remove it",
    ),
    (["--patience", "0"], "^--patience must be at least 1, got 0"),
    (
        ["--trainer.val_check_interval", "0"],
        "^--trainer.val_check_interval must be above 0, got 0",
    ),
    (
        ["--devices", "0,1"],
        r"--devices \(--trainer.devices\) 0,1: there is no GPU on this machine; on a CPU",
    ),
    (
        ["--devices", "5000", "--trainer.accelerator", "cpu"],
        r"^--devices \(--trainer.devices\) 5000: at most \d+ processes on \d+ CPU cores?, 8 for each",
    ),
    (
        ["--threshold", "recall:2"],
        r"^--threshold recall:2: pass accuracy, f1, precision:P or recall:P",
    ),
    (["--weights", "nosuch.pt"], r"^there is no weights file nosuch.pt$"),
    (
        ["--size", "1000000", "--weights", "null"],
        r"^--size \(--data.image_size\) must be at most 8192, got 1000000",
    ),
]
MORE = [
    (
        ["--optimizer", "AdamW", "--model.optimizer.weight_decay", "-1"],
        r"--optimizer \(--model.optimizer\): Invalid weight",
    ),
    (["--members", "99"], r"^--members \(--model.members\) must be a whole number from 1 to 32"),
    (["--model.layer_decay", "2"], "^--model.layer_decay must be above 0"),
    (
        ["--model.scheduler", "WarmupCosine", "--model.scheduler.warmup", "2"],
        "^--model.scheduler: .*warmup must be",
    ),
    (["--checkpoint_every_n_steps", "0"], "^--checkpoint_every_n_steps must be at least 1, got 0"),
    (
        ["--trainer.accumulate_grad_batches", "0"],
        "^--trainer.accumulate_grad_batches must be at least 1",
    ),
    (
        ["--trainer.check_val_every_n_epoch", "0"],
        "^--trainer.check_val_every_n_epoch must be at least 1, got 0",
    ),
    (
        ["--trainer.val_check_interval", "0.0"],
        "^--trainer.val_check_interval must be above 0, got 0.0",
    ),
    (["--trainer.limit_val_batches", "-1"], "limit_val_batches"),
    (["--trainer.gradient_clip_algorithm", "x"], "gradient_clip_algorithm"),
    (
        ["--batch", "0", "--weights", "null"],
        r"^--batch \(--data.batch_size\) must be at least 1, got 0$",
    ),
]


@pytest.mark.parametrize(
    ("wrong", "message"), [*WRONG, *(pytest.param(*row, marks=pytest.mark.slow) for row in MORE)]
)
def test_a_wrong_value_is_refused_before_data_or_weights_are_fetched(cli, tmp_path, wrong, message):
    data = ["--data", "Hotdog", "--data.root", str(tmp_path / "none")]
    at = QUICKEST.index("--model.weights")
    quick = [*QUICKEST[:at], *QUICKEST[at + 2 :]]  # weights would be fetched
    fetched = patch.object(Hotdog, "source_in", side_effect=ValueError("data are fetched"))
    with fetched as download, pytest.raises((ValueError, MisconfigurationException)) as caught:
        cli("fit", *data, *quick, *wrong)
    assert re.search(message, one_line(caught.value) or "")
    assert exit_code(caught.value) == 2 and not download.called


SCHEDULERS = {
    "StepLR": {"step_size": 3},
    "CosineAnnealingLR": {"T_max": 5},
    "MultiStepLR": {"milestones": "[1, 2]"},
    "finetune.WarmupCosine": {"warmup": 0.1},
    "null": {},
}


@pytest.mark.parametrize(
    "name",
    sweep(SCHEDULERS, quick=["StepLR", "null"]),
)
def test_a_right_scheduler_gets_as_far_as_the_data(cli, tmp_path, name):
    arguments = [f"--model.scheduler.{key}={value}" for key, value in SCHEDULERS[name].items()]
    fetched = patch.object(Hotdog, "source_in", side_effect=ValueError("data are fetched"))
    with fetched, pytest.raises(ValueError, match="data are fetched"):
        root = ["--data", "Hotdog", "--data.root", str(tmp_path / "none")]
        cli("fit", *root, *QUICKEST, "--model.scheduler", name, *arguments)


def test_control_right_values_get_as_far_as_the_data(cli, tmp_path):
    fetched = patch.object(Hotdog, "source_in", side_effect=ValueError("data are fetched"))
    with fetched, pytest.raises(ValueError, match="data are fetched"):
        cli(
            "fit",
            "--data",
            "Hotdog",
            "--data.root",
            str(tmp_path / "none"),
            *QUICKEST,
            "--devices",
            "2",
        )


@pytest.mark.parametrize("command", ["fit", "test"])
def test_a_folder_with_wrong_classes_is_refused_before_anything_is_built(
    cli, untested_run, tmp_path, command
):
    (tmp_path / "wrong/train/other").mkdir(parents=True)
    (tmp_path / "wrong/train/other/0.png").touch()
    quick = QUICKEST
    if command == "test":
        quick = ["--ckpt_path", str(untested_run / "checkpoints/last.ckpt")]
    built = patch(BUILT[command], side_effect=ValueError("something is built"))
    with built as build, pytest.raises((OSError, ValueError)) as caught:
        cli(command, "--data.root", str(tmp_path / "wrong"), *quick)
    assert "'other'" in (one_line(caught.value) or "") and exit_code(caught.value) == 1
    assert not build.called
