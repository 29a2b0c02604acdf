"""One fit by its plan: it builds its parts, trains, tests the best checkpoint, and reports."""

import json
import logging
import os
import shlex
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from pytorch_lightning import Trainer, seed_everything

from finetune.data.batch_limits import batches_within
from finetune.data.data_place import place_of
from finetune.data.datamodule import ImageDataModule, open_data
from finetune.data.samplers import evaluated_targets
from finetune.data.seen import AllSeenError, continue_record, exclude_seen
from finetune.distributed.signals import Interrupted
from finetune.fitting.build import (
    arguments_in_effect,
    build_model,
    build_trainer,
    closing,
    fit_callbacks,
)
from finetune.fitting.plan import Plan, plan_file
from finetune.fitting.resume import (
    Start,
    check_classes,
    continue_run,
    describe_changes,
    restore_progress,
)
from finetune.models.network_names import is_timm
from finetune.models.weights import read_weights
from finetune.reports.report import page_of
from finetune.runs.checkpoint_io import read_checkpoint
from finetune.runs.folder import Run
from finetune.runs.licence import is_restricted, licence
from finetune.runs.metrics_csv import MetricsCSV
from finetune.runs.model_checkpoint import Checkpoints
from finetune.runs.record import RunRecord, read_run
from finetune.runs.removal import drop_last
from finetune.runs.run_lock import hold
from finetune.system.messages import as_wrong_usage, bytes_text
from finetune.training import overview
from finetune.training.add_familiarity import add_familiarity
from finetune.training.augmented_sheet import write_augmented
from finetune.training.calibration import Calibration, read_calibration
from finetune.training.classifier import Classifier
from finetune.training.first_pass import check_fit
from finetune.training.precision import automatic_precision
from finetune.training.prediction_sets import check_enough

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Parts:
    """The parts of a fit.

    Attributes:
        plan: What it does.
        trainer: As `build_trainer` makes it.
        model: The network that is trained.
        data: Its images.
        run: The run, to whose folder all files are written.
    """

    plan: Plan
    trainer: Trainer
    model: Classifier
    data: ImageDataModule
    run: Run

    @property
    def has_test(self) -> bool:
        """Whether the best checkpoint is to be tested."""
        has_images = "test" in self.data.splits and self.trainer.limit_test_batches != 0
        return has_images and self.plan.settings.test_after_fit


def build(plan: Plan) -> Parts:
    """Build the parts of a fit, and check that it has something to do.

    Raises:
        ValueError: The images, the network and the settings do not go together.
    """
    settings = plan.settings
    seed_everything(settings.seed_everything, workers=True, verbose=False)
    data = plan.data or open_data(settings.data)
    data.read()
    model = build_model(settings.model, data)
    if settings.threshold is not None:
        model.aim = model.task.parse_aim(settings.threshold)
    model.coverage = settings.coverage
    if settings.trainer.precision is None:
        checkpoint = None if plan.start is None else plan.start.content
        precision = automatic_precision(
            settings.trainer.accelerator, checkpoint, True, model.network
        )
        plan = plan.put({"trainer.precision": precision})
    run = Run(settings.trainer.default_root_dir, "fit", name=settings.name)
    run.begins_again = plan.begins_again
    callbacks = fit_callbacks(settings, run)
    trainer = build_trainer(plan.settings.trainer, run, plan.config, callbacks)
    check_fit(trainer, model, data, "fit", settings.test_after_fit)
    return Parts(plan, trainer, model, data, run)


def fit(plan: Plan, end: Callable[[int], Any] | None = None) -> Parts:
    """Train from the start of a plan, then test the best checkpoint and report.

    Args:
        plan: What to do.
        end: As for `carry_out`.
    """
    parts = build(plan)
    if end is not None:
        _checkpoints(parts).signal.end = end
    with closing(parts.trainer, parts.run), _ranks_start_with(parts):
        _fit(parts)
    return parts


def _fit(parts: Parts) -> None:
    finished, changed = _prepare(parts)
    if not finished:
        train(parts, changed)
    else:
        assert parts.plan.start is not None, "a run that has reached a limit has a checkpoint"
        restore_progress(parts.trainer, parts.plan.start)
        parts.data.is_fitted = True  # its test split is the one of the fit
    if finished and _is_complete(parts):
        _print_finished(parts, "; ".join(filter(None, [finished, changed])))
        if parts.trainer.is_global_zero:
            parts.run.continue_upload(only_changes=True)
    else:
        if finished and parts.trainer.is_global_zero:
            _lock_finished(parts)
        _conclude(parts, bool(finished))
    if parts.trainer.is_global_zero:
        _close(parts)


@contextmanager
def _ranks_start_with(parts: Parts) -> Iterator[None]:
    """Let Lightning start the processes of other devices with the plan of this one, which has decided everything."""
    if parts.trainer.world_size == 1:
        yield
        return
    with plan_file(parts.plan) as file:
        sys.argv = [sys.argv[0], "fit", "--decided", str(file)]
        yield


def _conclude(parts: Parts, is_resumed_finished: bool) -> None:
    """Test the weights of best.ckpt and report."""
    _check_stop(parts)
    best = _read_best(parts.run)
    add_familiarity(parts.trainer, parts.model, parts.data, parts.run)
    is_tested = parts.has_test and test(parts, best)
    calibration = parts.model.task.uncalibrated() if best is None else read_calibration(best)
    if parts.trainer.is_global_zero:
        report(parts, calibration, is_tested)
    if parts.plan.settings.threshold is not None and not is_resumed_finished:
        _check_threshold(parts, calibration)


def _read_best(run: Run) -> dict[str, Any] | None:
    """Return the content of best.ckpt without weights and states; None if there is no such file."""
    path = run.checkpoint("best")
    if not path.exists():
        return None
    large = ("state_dict", "optimizer_states", "callbacks")
    return {name: value for name, value in read_checkpoint(path).items() if name not in large}


def _close(parts: Parts) -> None:
    """Record that the run has ended. Without `--keep_last`, delete the files that only resuming needs."""
    run = parts.run
    run.mark_ended()
    if parts.plan.settings.keep_last or run.path is None:
        return
    freed = drop_last(run.dir)
    if freed:
        log.info(
            "deleted the files that only resuming needs: %s freed (--keep_last)", bytes_text(freed)
        )


def _prepare(parts: Parts) -> tuple[str, str]:
    """Check that the fit can follow the plan, and log the decisions.

    Returns:
        Text about the limit that the run to resume has reached, and text about changes since it began; "" for none.
    """
    plan = parts.plan
    finished = _limit_reached(parts)
    parts.run.path = plan.run
    changed = ""
    if plan.run is not None and plan.start is not None:
        allow = plan.settings.allow_changes
        check_classes(plan.start, parts.data)
        has_other_images = (
            plan.start.content["finetune"]["data_fingerprint"] != parts.data.fingerprint
        )
        changed = describe_changes(plan.changes, has_other_images, allow, bool(finished))
    if parts.trainer.is_global_zero:
        for note in plan.notes:
            log.info("%s", note)
    return finished, changed


def _limit_reached(parts: Parts) -> str:
    """Return the limit that the run to resume has reached, in words; "" if training continues.

    Raises:
        ValueError: A new run starts from a checkpoint that has reached it, and has nothing to train.
    """
    start = parts.plan.start
    trainer = parts.trainer
    if start is None:
        return ""
    patience = parts.plan.settings.patience
    finished = limit_reached(start.content, trainer.max_epochs, trainer.max_steps, patience)
    if finished and parts.plan.run is None:
        raise ValueError(
            f"{start.path} has nothing left to train, with {finished}: raise that limit, or measure the checkpoint by "
            f"finetune test {start.path}"
        )
    return finished


def limit_reached(
    checkpoint: Mapping[str, Any], max_epochs: int | None, max_steps: int, patience: int | None
) -> str:
    """Return which limit the run of a last.ckpt has reached, in words; "" if it has more to do.

    Args:
        checkpoint: The content of last.ckpt.
        max_epochs: None or -1 for no limit.
        max_steps: -1 for no limit.
        patience: Validations without improvement after which the fit ends; None for no limit.
    """
    epochs = checkpoint["loops"]["fit_loop"]["epoch_progress"]["current"]["processed"]
    steps = checkpoint["global_step"]
    num_waited = checkpoint["callbacks"].get("Checkpoints", {}).get("num_waited", 0)
    for name, num, most in (("epochs", epochs, max_epochs), ("steps", steps, max_steps)):
        if most is not None and 0 <= most <= num:
            limit = f"trainer.max_{name} {most}"
            return limit if num == most else f"{num:,} {name} trained, more than {limit}"
    if patience is not None and num_waited >= patience:
        return f"early stopping, patience {patience}"
    return ""


def train(parts: Parts, changed: str) -> None:
    """Train to the end.

    Args:
        parts: The parts of the fit.
        changed: Text about changes since the run began; "" for none.
    """
    trainer = parts.trainer
    run = parts.run
    plan = parts.plan
    licence_of_weights = _read_weights(parts) if plan.start is None else None
    if plan.run is not None:
        assert plan.start is not None, "a run that continues has a checkpoint"
        continue_run(trainer, run, plan.start, changed)
    else:
        _begin(parts, licence_of_weights)
    if parts.plan.settings.patience is not None:
        _check_validated(trainer, parts.data, "--patience counts validations")
    if parts.plan.settings.threshold is not None:
        _check_has_positives(trainer, parts.data)
    if parts.plan.settings.coverage is not None:
        _check_validated(trainer, parts.data, "--coverage is calibrated on validation images")
        of_val = parts.data.splits["val"].targets
        used = evaluated_targets(of_val, trainer.limit_val_batches, parts.data.batch_size)
        num = len(used) if parts.data.label_kind == "single" else int(used.counts().max())
        check_enough(parts.plan.settings.coverage, num, parts.data.label_kind)
    _check_validates_after_steps(trainer, parts.data)
    first = None if plan.start is None else plan.start.path
    run.beginning = {
        "command": plan.command,
        "identity": plan.identity,
        "asked": plan.asked_otherwise,
        "data": place_of(arguments_in_effect(plan.settings.data)),
        "network": plan.settings.model.backbone,
        "folder": os.getcwd(),
        "began_from": run.began_from,
        "licence_of_the_weights": run.licence,
        **overview.log_overview(trainer, parts.model, parts.data, first),
    }
    if plan.ranking is not None:
        run.beginning["backbone_ranking"] = plan.ranking
    parts.data.is_fitted = True
    if plan.start is not None:
        continue_record(parts.data, plan.start.content, trainer.is_global_zero)
    # As an argument of `fit` it would not yet be set in `setup` and `prepare_data`.
    trainer.ckpt_path = first
    trainer.fit(parts.model, datamodule=parts.data)
    trainer.ckpt_path = None


def _check_validated(trainer: Trainer, data: ImageDataModule, what: str) -> None:
    """Make sure that the fit has validation images.

    Args:
        trainer: The Trainer of the fit.
        data: Its images.
        what: The beginning of the error message: what validation is needed for.

    Raises:
        ValueError: It has none.
    """
    if "val" not in data.splits:
        raise ValueError(
            f"{what}, and there is no validation split: --data.val_fraction 0.1 splits one off train"
        )
    if trainer.limit_val_batches == 0:
        raise ValueError(f"{what}, and trainer.limit_val_batches is 0: omit it")


def _check_validates_after_steps(trainer: Trainer, data: ImageDataModule) -> None:
    """Make sure that validations come within epochs, and not between batches whose gradients are accumulated.

    Raises:
        ValueError: One does not.
    """
    num = trainer.accumulate_grad_batches
    batches = batches_within(trainer.limit_train_batches, data.num_batches)
    each = trainer.val_check_interval
    if isinstance(each, float):
        each = max(1, int(batches * each))
    if "val" in data.splits and each > batches and trainer.check_val_every_n_epoch is not None:
        raise ValueError(
            f"trainer.val_check_interval {each} is more than the {batches} batches of an epoch"
        )
    if "val" in data.splits and each < batches and each % num != 0:
        raise ValueError(
            f"trainer.val_check_interval {trainer.val_check_interval} validates every {each} batches, inside a step of "
            f"trainer.accumulate_grad_batches {num}: set a multiple of it"
        )


def _check_has_positives(trainer: Trainer, data: ImageDataModule) -> None:
    """Make sure that the validation images have both classes, which choosing a threshold needs.

    If images have several labels, one with a label and one without are enough: see `training.calibration`.
    """
    _check_validated(trainer, data, "--threshold is chosen on validation images")
    targets = data.splits["val"].targets
    measured = evaluated_targets(targets, trainer.limit_val_batches, data.batch_size)
    num = len(measured)
    counts = measured.counts()
    if data.label_kind == "single" and not counts.all():
        name = data.class_names[int(counts.argmin())]
        left = f" in the {num} that trainer.limit_val_batches leaves" if num < len(targets) else ""
        raise ValueError(
            f"--threshold needs validation images of both classes, there is none of {name}{left}"
        )


def _check_begun_from(start: Start, model: Classifier) -> None:
    """Make sure that a new run has the class weights and the optimizer of the checkpoint that it starts from."""
    path = start.path
    checkpoint = start.content
    hint = f"use the same, or begin with its weights alone: --weights {path}"
    class_weights = checkpoint["hyper_parameters"].get("class_weights")
    if class_weights != model.class_weights:
        difference = f"model.class_weights {json.dumps(class_weights)}, not {json.dumps(model.class_weights)}"
        raise ValueError(f"{path} was trained, and continues, with {difference}: {hint}")
    with as_wrong_usage("model.optimizer"):
        optimizer = model.optimizer([{"params": [torch.zeros(1, 1, requires_grad=True)]}])
    # Optimizers differ in their numeric settings. Boolean settings differ between versions of torch.
    settings = {
        name for name, value in optimizer.defaults.items() if type(value) in (int, float, tuple)
    }
    groups = [
        group for state in checkpoint.get("optimizer_states", ()) for group in state["param_groups"]
    ]
    if groups and (lacking := sorted(settings - groups[0].keys())):
        difference = f"another optimizer than {type(optimizer).__name__}, one without {lacking[0]}"
        raise ValueError(f"{path} was trained, and continues, with {difference}: {hint}")


def _read_weights(parts: Parts) -> str | None:
    """Read the weights that a fit starts with, so that it fails before other processes are started.

    Returns:
        Their licence, if it is known.
    """
    model = parts.model
    if model.weights is None:
        return None
    if is_timm(model.backbone) and model.weights == "DEFAULT" and parts.trainer.is_global_zero:
        log.info(
            "looking for the weights of %s on this machine, then on the Hugging Face hub",
            model.backbone,
        )
    return read_weights(model.weights, model.backbone, model.network_size).licence


def _begin(parts: Parts, licence_of_weights: str | None) -> None:
    """Record the checkpoint that a new run starts from, and the licence of its weights.

    Args:
        parts: The parts of the fit.
        licence_of_weights: The licence that the weights themselves name.
    """
    model = parts.model
    run = parts.run
    start = parts.plan.start
    if start is not None:
        _check_begun_from(start, model)
        licence_of_weights = start.content["finetune"].get("licence_of_the_weights")
    run.began_from = None if start is None else str(Path(start.path).resolve())
    file = Path(model.weights or "")
    is_file = file.is_file()
    run.licence = licence(
        file.name if is_file else model.weights,
        model.backbone,
        run.began_from and Path(run.began_from).name,
        is_file,
        licence_of_weights,
    )
    restricted = is_restricted(run.licence)
    if parts.trainer.is_global_zero and (is_timm(model.backbone) or restricted):
        log.log(logging.WARNING if restricted else logging.INFO, "weights: %s", run.licence)


def _is_complete(parts: Parts) -> bool:
    """Return whether the best checkpoint of a run that has reached its limit is final, tested and reported."""
    run = parts.run
    has_report = run.file("report.html").exists() or not parts.plan.settings.report
    if not has_report or not run.dir.has_ended:
        return False
    return run.file("test.json").exists() or not parts.has_test


def _lock_finished(parts: Parts) -> None:
    """Lock a run that has reached its limit, which another process may be testing, and forget its last test.

    Raises:
        ValueError: Another process has locked it, or has written its checkpoint.
    """
    assert parts.plan.start is not None, "a run that has reached a limit has a checkpoint"
    hold(parts.run.checkpoint("last").parents[1])
    parts.plan.start.check_unchanged()
    parts.run.continue_upload()
    for logger in parts.trainer.loggers:
        if isinstance(logger, MetricsCSV):
            logger.rewind(parts.plan.start.content["global_step"])
    parts.run.dir.update(ended=None)  # until this test and its report are complete


def _print_finished(parts: Parts, why: str) -> None:
    if not parts.trainer.is_global_zero:
        return
    if parts.model.is_solved:
        to_do = "More epochs would not change its head, which is solved; start a new run without --resume"
    else:
        to_do = "Raise the limit to continue it, or start a new run without --resume"
    log.info("the run %s is finished, with %s. %s", parts.run.place, why, to_do)
    print(f"run in {parts.run.place}", flush=True)


def _check_stop(parts: Parts) -> None:
    """Stop before the test if a signal has ended training; log that `--patience` has.

    Raises:
        Interrupted: A signal has ended training.
    """
    trainer = parts.trainer
    checkpoints = _checkpoints(parts)
    most = checkpoints.patience
    if checkpoints.stopped_by and parts.has_test:
        raise Interrupted(checkpoints.stopped_by)
    if trainer.is_global_zero and most is not None and checkpoints.num_waited >= most:
        message = "stopped after epoch %d: %s did not improve in --patience %d validations"
        log.info(message, trainer.current_epoch, parts.model.task.monitor, most)


def _checkpoints(parts: Parts) -> Checkpoints:
    """Return the callback that writes the checkpoints of a fit."""
    callbacks: list[Any] = parts.trainer.callbacks  # type: ignore[attr-defined]
    return next(callback for callback in callbacks if isinstance(callback, Checkpoints))


def test(parts: Parts, content: Mapping[str, Any] | None) -> bool:
    """Test the best checkpoint, unless it was trained or validated on all test images, which is logged.

    Args:
        parts: The parts of the fit.
        content: The content of best.ckpt; None if there is none.

    Returns:
        Whether it was tested.

    Raises:
        ValueError: There is no best.ckpt, or one of several fits has seen all its test images.
    """
    run = parts.run
    if content is None:
        raise ValueError(
            f"nothing was trained in {run.path}: a limit ended it before its first step"
        )
    best = run.checkpoint("best")
    try:
        exclude_seen(parts.data, "test", content, parts.trainer.is_global_zero)
    except AllSeenError as error:
        if parts.plan.is_part:  # whose result is needed for that of all
            raise
        if parts.trainer.is_global_zero:
            log.warning("not tested: %s", error)
        return False
    parts.trainer.test(parts.model, datamodule=parts.data, ckpt_path=best, verbose=False)
    return True


def report(parts: Parts, calibration: Calibration, is_tested: bool) -> None:
    """Print the summary of the run, and write its report."""
    run = parts.run
    has_best = run.checkpoint("best").exists()
    folder = run.checkpoint("best").parents[1]
    record = read_run(folder)
    if not is_tested:  # else `Results` has printed it after the test
        _print_lines(record.headline_text, *calibration.describe(parts.model.class_names))
    best = record.facts.best
    if has_best and best is not None:
        _print_lines(f"best.ckpt: {best.why}")
    print_end(record, run.place, parts.plan.settings.report, parts.data)
    if has_best and not parts.plan.is_part:  # its network is used with those of the others
        print_next(run.place)


def print_end(
    record: RunRecord, place: str, has_report: bool, data: ImageDataModule | None = None
) -> None:
    """Print where a run is, and write its report; a report that fails does not harm the run.

    Args:
        record: The run.
        place: Its folder or address.
        has_report: Whether it has a report.
        data: The images whose augmentation the report shows; None for none.
    """
    _print_lines(f"run in {place}")
    if not has_report:
        return
    try:
        if data is not None:
            write_augmented(data, record.path / "augmented.webp")
        _print_lines(f"report in {page_of(record)}")
    except Exception as error:  # of whatever draws or reads: the run itself is complete
        hint = f"Try again with finetune report {record.path}"
        log.warning("cannot write the report: %s. %s", error, hint)


def print_next(place: str) -> None:
    _print_lines(f"next: finetune predict {shlex.quote(place)} IMAGES")


def _print_lines(*lines: str) -> None:
    for line in filter(None, lines):
        print(line, flush=True)


def _check_threshold(parts: Parts, calibration: Calibration) -> None:
    """Make sure that best.ckpt has the threshold that `--threshold` asks for.

    One of several fits may have none, because the threshold for new images is chosen for all together.

    Raises:
        ValueError: It has none.
    """
    best = parts.run.checkpoint("best")
    if calibration.aim is None:
        raise ValueError(
            f"--threshold {parts.plan.settings.threshold}: nothing was validated, so {best} has no threshold"
        )
    missed = calibration.describe_unreached_aim(parts.model.class_names)
    if missed and not parts.plan.is_part:
        is_single = parts.model.task.label_kind == "single"
        result = "no threshold" if is_single else "another threshold there"
        raise ValueError(f"{missed}; {best} has {result}")
