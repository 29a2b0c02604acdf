"""Runs stopped by a signal or a limit at any point and resumed in this process equal uninterrupted runs."""

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from colours import draw_colours
from promise import promise

from finetune.distributed.signals import Interrupted, SignalFlag
from finetune.runs.folder import versions
from finetune.training.classifier import Classifier

pytestmark = pytest.mark.slow

# Where a signal comes or is noticed, and at which of 3 x 5 steps: inside an epoch, inside a validation, between epochs.
ACCUMULATED = ("--trainer.accumulate_grad_batches", "2")  # 3 steps an epoch
# 2 steps an epoch
GATHERING = ("--trainer.accumulate_grad_batches", "3", "--trainer.val_check_interval", "2")
OFTEN_VALIDATED = ("--trainer.val_check_interval", "2")


@pytest.fixture(scope="module")
def colours(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Half as many images as elsewhere, for 5 steps an epoch all the same."""
    return draw_colours(tmp_path_factory.mktemp("data") / "colours", train=10, test=2)


def component(path: str, **options: Any) -> str:
    return json.dumps({"class_path": path, "init_args": options})


def callback(name: str, **options: Any) -> tuple[str, str]:
    return "--trainer.callbacks", f"[{component(f'pytorch_lightning.callbacks.{name}', **options)}]"


POINTS = [
    (("on_train_batch_end", 2), ()),
    (("on_validation_batch_end", 10), ()),
    (("on_train_epoch_start", 10), ()),
    (("on_train_epoch_start", 10), ("--trainer.max_steps", "13")),
    (("on_train_batch_end", 4), ACCUMULATED),
    (("validation_step", 2), GATHERING),
    (("on_train_batch_end", 3), OFTEN_VALIDATED),
    (("on_validation_batch_end", 2), OFTEN_VALIDATED),
    (("on_train_epoch_start", 5), ("--trainer.check_val_every_n_epoch", "2")),
    (("on_train_batch_end", 7), ("--model.members", "2")),
]


def trained(
    cli: Callable[..., None], data: Path, root: Path, stop: Any = None, *extra: str
) -> list[Any]:
    """Fit with a signal at `stop`, and return (epoch, batch, images) of each step."""
    seen = []
    received = []
    step, validation_step = Classifier.training_step, Classifier.validation_step

    def traced(self: Classifier, batch: dict, batch_idx: int) -> Any:
        seen.append((self.trainer.current_epoch, batch_idx, batch["index"].tolist()))
        return step(self, batch, batch_idx)

    def validated(self: Classifier, batch: dict, batch_idx: int) -> None:
        if stop == ("validation_step", self.trainer.global_step):
            received.append(15)
        validation_step(self, batch, batch_idx)

    def agreed(self: SignalFlag, trainer: Any) -> int:
        return (
            15 if received or stop == (sys._getframe(1).f_code.co_name, trainer.global_step) else 0
        )

    with (
        patch.object(Classifier, "training_step", traced),
        patch.object(Classifier, "validation_step", validated),
        patch.object(SignalFlag, "agreed", agreed),
    ):
        options = [
            "--data.root",
            data,
            "--data.image_size",
            28,
            "--data.batch_size",
            6,
            "--data.num_workers",
            0,
        ]
        options += [
            "--model.weights",
            "null",
            "--model.backbone",
            "small_cnn",
            "--trainer.max_epochs",
            3,
        ]
        options += ["--trainer.accelerator", "cpu", "--trainer.log_every_n_steps", 1]
        options += ["--test_after_fit", "false", "--report", "false"]
        cli(
            "fit",
            *options,
            "--trainer.default_root_dir",
            root,
            "--trainer.enable_progress_bar",
            "false",
            *extra,
        )
    return seen


def last(root: Path) -> tuple[dict[str, Any], str]:
    (run,) = versions(root, "fit")
    return torch.load(run / "checkpoints/last.ckpt", weights_only=True), (
        run / "steps.csv"
    ).read_text()


def same_weights(a: dict[str, Any], b: dict[str, Any]) -> bool:
    return all(
        torch.equal(a["state_dict"][name], b["state_dict"][name]) for name in a["state_dict"]
    )


@pytest.fixture
def full(cli, colours, tmp_path_factory) -> Callable[..., tuple[Path, list[Any]]]:
    """Runs that nothing stops, and their steps; each kind is trained once."""

    def run(*extra: str) -> tuple[Path, list[Any]]:
        if extra not in WHOLE:
            root = tmp_path_factory.mktemp("whole")
            WHOLE[extra] = root, trained(cli, colours, root, None, *extra)
        return WHOLE[extra]

    return run


WHOLE: dict[tuple[str, ...], tuple[Path, list[Any]]] = {}


def stopped_and_resumed(
    cli: Callable[..., None], data: Path, root: Path, stop: Any, *extra: str
) -> list[Any]:
    with pytest.raises(Interrupted) as caught:
        trained(cli, data, root, stop, *extra)
    assert caught.value.exit_code == 143
    return trained(cli, data, root, None, *extra, "--resume")


@promise("resume")
@pytest.mark.parametrize(("stop", "extra"), POINTS)
def test_wherever_a_signal_is_noticed(cli, colours, tmp_path, full, stop, extra):
    root, steps = full(*extra)
    after = stopped_and_resumed(cli, colours, tmp_path, stop, *extra)
    assert after == steps[len(steps) - len(after) :]
    if extra not in (ACCUMULATED, GATHERING):
        assert len(steps) - len(after) == stop[1]
    (a, metrics_a), (b, metrics_b) = last(root), last(tmp_path)
    assert same_weights(a, b)
    assert a["loops"] == b["loops"]
    assert metrics_a == metrics_b
    rates = [
        [group["lr"] for group in checkpoint["optimizer_states"][0]["param_groups"]]
        for checkpoint in (a, b)
    ]
    assert rates[0] == rates[1]


def stopping_early(patience: int) -> tuple[str, ...]:
    return callback("EarlyStopping", monitor="val/loss", min_delta=100.0, patience=patience)


@pytest.mark.parametrize(
    ("extra", "limit", "larger", "message"),
    [
        ((), ("--trainer.max_steps", "7"), ("--trainer.max_steps", "-1"), "trainer.max_steps 7"),
        ((), ("--trainer.max_epochs", "2"), (), "trainer.max_epochs 2"),
        (OFTEN_VALIDATED, stopping_early(2), stopping_early(9), "early stopping, patience 2"),
    ],
    ids=["steps", "epochs", "patience"],
)
def test_a_run_that_a_limit_ended_continues_with_a_larger_one(  # noqa: PLR0913
    cli, colours, tmp_path, full, caplog, extra, limit, larger, message
):
    """It ends as a run whose only limit is that of epochs. With the same limit it is finished."""
    extra = (*extra, "--model.scheduler", "null")  # else the rate would fall with the first length
    trained(cli, colours, tmp_path, None, *extra, *limit)
    ended = last(tmp_path)[0]
    assert trained(cli, colours, tmp_path, None, *extra, *limit, "--resume") == []
    assert f"is finished, with {message}" in caplog.text
    assert same_weights(last(tmp_path)[0], ended)
    root, steps = full(*extra)
    after = trained(cli, colours, tmp_path, None, *extra, *larger, "--resume")
    assert 0 < len(after) < len(steps) and after == steps[len(steps) - len(after) :]
    a, b = last(root)[0], last(tmp_path)[0]
    assert same_weights(a, b)
    assert a["loops"] == b["loops"]


def test_control_with_the_patience_of_the_checkpoint_it_stops_at_the_next_validation(
    cli, colours, tmp_path
):
    trained(cli, colours, tmp_path, None, *OFTEN_VALIDATED, *stopping_early(2))
    with patch("finetune.runs.model_checkpoint.keep_patience", lambda *_: None):
        limit = stopping_early(9)
        after = trained(cli, colours, tmp_path, None, *OFTEN_VALIDATED, *limit, "--resume")
    assert len(after) == 2  # batches, between two validations
