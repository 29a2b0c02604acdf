"""The join of an ensemble: its networks as one checkpoint, calibrated and tested together."""

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pytorch_lightning import Trainer

from finetune.data.datamodule import ImageDataModule
from finetune.data.loader import end_workers
from finetune.data.seen import AllSeenError, exclude_seen
from finetune.fitting.build import build_trainer
from finetune.fitting.command_process import closing
from finetune.fitting.plan import Plan
from finetune.inference.joined_checkpoint import join_checkpoints, network_of
from finetune.runs.best_epoch import num_trials_of_labels
from finetune.runs.checkpoint_io import AtomicCheckpointIO, read_checkpoint
from finetune.runs.clock import Clock
from finetune.runs.folder import Run
from finetune.runs.headline import Best, validation_headline
from finetune.runs.predictions import AnswersWriter
from finetune.runs.record import RunRecord
from finetune.settings.layers import replaced
from finetune.settings.schema import TrainerSettings
from finetune.training.calibration import Calibration
from finetune.training.calibration_fit import fit_calibration
from finetune.training.checkpoint_settings import model_settings
from finetune.training.classifier import Classifier
from finetune.training.outputs import Outputs, collect
from finetune.training.precision import automatic_precision

log = logging.getLogger(__name__)

# What run.json of an ensemble takes from its first member: all of them have the same images.
_OF_IMAGES = ("root", "splits", "lines", "doubts", "first_look", "licence_of_the_weights")


def join_members(
    folder: Path, plan: Plan, runs: Sequence[RunRecord], data: ImageDataModule
) -> tuple[Calibration, dict[str, Any]]:
    """Write the checkpoint of an ensemble, and test it, on one device.

    Args:
        folder: The folder of the ensemble.
        plan: Its plan.
        runs: The runs of its members.
        data: Their images.

    Returns:
        The calibration of the mean of the members, fitted on their validation images, and facts for run.json.

    Raises:
        ValueError: The images have changed since the members were trained.
    """
    checkpoints = [read_checkpoint(run.path / "checkpoints" / "best.ckpt") for run in runs]
    if any(one["finetune"]["data_fingerprint"] != data.fingerprint for one in checkpoints):
        raise ValueError(
            f"the images of {data.root} have changed since the members were trained: restore them, or begin a new fit"
        )
    unfitted = Calibration.unfitted(data.label_kind, len(data.class_names))
    networks = [network_of(one) for one in checkpoints]
    joined = join_checkpoints(checkpoints, networks, unfitted, data.fingerprint)
    model = Classifier(**model_settings(joined))
    model.load_state_dict(joined["state_dict"])
    if plan.settings.threshold is not None:
        model.aim = model.task.parse_aim(plan.settings.threshold)
    run = Run(plan.settings.trainer.default_root_dir, "fit", folder)
    trainer = build_trainer(
        one_device(plan.settings.trainer, checkpoints[0]),
        run,
        plan.config,
        [Clock(run), AnswersWriter(run)],
    )
    calibration = unfitted
    facts = {name: getattr(runs[0].facts, name) for name in _OF_IMAGES}
    with closing(trainer, run):
        if "val" in data.splits and trainer.limit_val_batches != 0:
            outputs = _validation_outputs(trainer, model, data)
            calibration = fit_calibration(outputs.logits, outputs.labels, model.aim)
            epoch = 1 + max(one["epoch"] for one in checkpoints)
            facts["best"] = _best_of(model, outputs, len(runs), epoch)
        joined["finetune"]["calibration"] = calibration.as_plain()
        AtomicCheckpointIO().save_checkpoint(joined, run.checkpoint("best"), run.forget_best)
        has_test = "test" in data.splits and trainer.limit_test_batches != 0
        if has_test and plan.settings.test_after_fit:
            _test(trainer, model, data, joined, run)
    return calibration, facts


def _test(
    trainer: Trainer, model: Classifier, data: ImageDataModule, joined: dict[str, Any], run: Run
) -> None:
    """Test the joined checkpoint, unless its members have seen all test images, which is logged."""
    try:
        exclude_seen(data, "test", joined, is_logged=True)
    except AllSeenError as error:
        log.warning("not tested: %s", error)
        return
    trainer.test(model, datamodule=data, ckpt_path=run.checkpoint("best"), verbose=False)


def _best_of(model: Classifier, outputs: Outputs, num_members: int, epoch: int) -> Best:
    """Return the record of the joined checkpoint, and print its result on the validation images.

    Args:
        model: The ensemble.
        outputs: Its outputs for the validation images.
        num_members: The number of its members.
        epoch: The latest epoch of a member, counted from one.
    """
    num = len(outputs.labels)
    is_single = outputs.labels.ndim == 1
    trials = num if is_single else num_trials_of_labels(outputs.labels.sum(0).numpy())
    score = model.task.score(outputs.logits, outputs.labels)
    weights = f"{num_members} members"
    metric = model.task.monitor.partition("/")[2]
    result = validation_headline(metric, score, num, trials, weights)
    print(f"all members together: {result.line}", flush=True)
    why = f"the mean of the {weights}"
    return Best(epoch=epoch, weights=weights, why=why, result=result)


def one_device(trainer: TrainerSettings, checkpoint: dict[str, Any]) -> TrainerSettings:
    """Return the settings of a Trainer for the first of its devices, without loggers, to evaluate a checkpoint."""
    devices = str(trainer.devices).strip("[]").split(",")
    precision = trainer.precision or automatic_precision(trainer.accelerator, checkpoint, False)
    values = {
        "devices": 1 if len(devices) == 1 else [int(devices[0])],
        "strategy": "auto",
        "logger": None,
        "precision": precision,
    }
    return replaced(trainer, values)


def _validation_outputs(trainer: Trainer, model: Classifier, data: ImageDataModule) -> Outputs:
    """Return the logits of the members together for the validation images."""
    model.to(trainer.strategy.root_device).eval()
    trainer.precision_plugin.convert_module(model)
    data.trainer = trainer
    data.setup("validate")
    try:
        return collect(trainer, model, data.loader("val", is_limited=True)).own()
    finally:
        end_workers()
