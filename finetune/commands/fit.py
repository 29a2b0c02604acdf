"""`finetune fit`: go on where `--resume` or `--ckpt_path` says, train, then test the best checkpoint."""

import logging
import os
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jsonargparse import Namespace
from pytorch_lightning import Trainer
from pytorch_lightning.callbacks import EarlyStopping

from finetune.commands.fit_checks import check_begun_from, check_has_both_classes, check_validated
from finetune.commands.kept_weights import is_settled, keep_best_weights
from finetune.commands.logged_sheet import log_sheet
from finetune.data.datamodule import ImageDataModule
from finetune.data.seen import continue_record, exclude_seen
from finetune.distributed.signals import Interrupted
from finetune.models.timm_backbones import is_timm
from finetune.models.weights import read_weights
from finetune.runs.checkpoint_io import read_checkpoint
from finetune.runs.folder import Run
from finetune.runs.licence import is_restricted, licence
from finetune.runs.lightning_callbacks import check_averaging
from finetune.runs.live_report import end_page
from finetune.runs.model_checkpoint import Checkpoints
from finetune.runs.record import RunRecord, read_run
from finetune.runs.resume import Changes, beginning, check_changes, go_on, take_up
from finetune.runs.run_lock import hold
from finetune.training import overview
from finetune.training.calibration import Calibration, read_calibration
from finetune.training.classifier import Classifier
from finetune.training.threshold import parse_aim

log = logging.getLogger(__name__)


def fit(
    trainer: Trainer,
    model: Classifier,
    datamodule: ImageDataModule,
    ckpt_path: str | None,
    run: Run,
    options: Namespace,
    typed: str,
    told: Sequence[str] = (),
    changes: Changes | None = None,
    ranking: dict[str, Any] | None = None,
    **kwargs: Any,
) -> None:
    """Train, from where `--resume` or `--ckpt_path` says, then test the best checkpoint.

    Args:
        trainer: As `commands.trainer` makes it.
        model: What learns.
        datamodule: From which pictures.
        ckpt_path: The checkpoint to begin with, if any.
        run: Where all is written.
        options: The flags of `fit`.
        typed: The command, for about.json.
        told: What was decided for the user, each in words; "" where nothing was.
        changes: What the run to go on in was, and the command is; None for a new run.
        ranking: How the network was chosen, if it was, for about.json.
        kwargs: The others of `Trainer.fit`.
    """
    check_averaging(trainer, model, model.backbone)
    is_try = bool(trainer.fast_dev_run)  # type: ignore[attr-defined]
    resumed = Path(options.resume) if options.resume else None
    first, finished = beginning(trainer, resumed, ckpt_path)
    run.path = resumed
    changed = ""
    if changes is not None:
        changed = check_changes(run, datamodule, changes, options.allow_changes, bool(finished))
    for text in filter(None, told if trainer.is_global_zero else ()):
        log.info(text)
    if options.threshold is not None:
        model.calibrator.aim = parse_aim(options.threshold, model.class_names)
    if finished:
        return _finish(
            trainer, model, datamodule, run, options, "; ".join(filter(None, [finished, changed]))
        )
    known = None
    if first is None and model.weights is not None:
        if is_timm(model.backbone) and model.weights == "DEFAULT" and trainer.is_global_zero:
            log.info(
                "looking for the weights of %s here, else on the Hugging Face hub", model.backbone
            )
        # It fails here, before other processes are started.
        known = read_weights(model.weights, model.backbone, model.network_size).licence
    if resumed:
        go_on(trainer, run, changed)
    else:
        if first is not None:
            check_begun_from(first, model)
            known = read_checkpoint(first)["finetune"].get("licence_of_the_weights")
        run.began_from = None if first is None else str(Path(first).resolve())
        file = Path(model.weights or "")
        weights, is_file = (file.name, True) if file.is_file() else (model.weights, False)
        run.licence = licence(
            weights, model.backbone, run.began_from and Path(run.began_from).name, is_file, known
        )
        if trainer.is_global_zero and (is_timm(model.backbone) or is_restricted(run.licence)):
            log.log(
                logging.WARNING if is_restricted(run.licence) else logging.INFO,
                "weights: %s",
                run.licence,
            )
    if options.patience is not None:
        check_validated(trainer, datamodule, "--patience counts validations")
    if options.threshold is not None:
        check_has_both_classes(trainer, datamodule)
    start = {"began_from": run.began_from, "licence_of_the_weights": run.licence}
    run.about = {
        "command": typed,
        "folder": os.getcwd(),
        **start,
        **overview.tell(trainer, model, datamodule, first),
    }
    if ranking is not None:
        run.about["backbone_ranking"] = ranking
    datamodule.is_fitted = True
    if first is not None:
        continue_record(datamodule, read_checkpoint(first), trainer.is_global_zero)
    # as an argument of `fit` it is not yet known in `setup` and `prepare_data`
    trainer.ckpt_path = first
    trainer.fit(model, datamodule=datamodule, **kwargs)
    trainer.ckpt_path = None
    if is_try and trainer.is_global_zero:
        # `--resume` is to go on in the run before, not in a try
        run.checkpoint("last").unlink(missing_ok=True)
    _finish(trainer, model, datamodule, run, options)


def _finish(
    trainer: Trainer,
    model: Classifier,
    data: ImageDataModule,
    run: Run,
    options: Namespace,
    finished: str = "",
) -> None:
    """Test the best checkpoint, unless that was done or there is nothing to test on."""
    try:
        _test(trainer, model, data, run, options, finished)
    finally:
        if trainer.is_global_zero:
            end_page(run)  # that of its training, where no other has taken its place


def _test(
    trainer: Trainer,
    model: Classifier,
    data: ImageDataModule,
    run: Run,
    options: Namespace,
    finished: str,
) -> None:
    if finished:
        take_up(trainer, run)
    test, best = run.file("test.json"), run.checkpoint("best")
    # a prolonged run has another best
    is_tested = test.exists() and best.stat().st_mtime <= test.stat().st_mtime
    has_test = "test" in data.splits and options.test_after_fit and trainer.limit_test_batches != 0
    if finished and (is_tested or not has_test) and is_settled(trainer, data, run):
        what = "the run %s is finished, with %s; a larger limit prolongs it, a fit without --resume starts anew"
        log.info(what, run.path, finished)
        if trainer.is_global_zero:
            print(f"run in {run.path}", flush=True)
        return
    if finished and trainer.is_global_zero:
        hold(run.checkpoint("last").parents[1])  # another process may be at its test
    callbacks: list[Any] = trainer.callbacks  # type: ignore[attr-defined]
    callback = next(c for c in callbacks if isinstance(c, Checkpoints))
    if callback.stopped_by and has_test:
        raise Interrupted(callback.stopped_by)
    # Not `stopped_epoch`, which a run that goes on with more patience has from before.
    waits = (
        c.wait_count
        for c in callbacks
        if isinstance(c, EarlyStopping) and c.monitor == "val/accuracy"
    )
    is_stopped = options.patience is not None and any(wait >= options.patience for wait in waits)
    if is_stopped and trainer.is_global_zero:
        told = "ended after epoch %d: no higher val/accuracy in --patience %d validations"
        log.info(told, trainer.current_epoch, options.patience)
    checkpoint = keep_best_weights(trainer, model, data, run)
    if has_test:
        if checkpoint is None:
            raise ValueError(
                f"nothing was trained in {run.path}: a limit ended it before its first step"
            )
        exclude_seen(data, "test", checkpoint, trainer.is_global_zero)
        trainer.test(model, datamodule=data, ckpt_path=best, verbose=False)
        log_sheet(trainer, data, model.class_names, run.file("test_predictions.csv"))
    calibration = Calibration() if checkpoint is None else read_calibration(checkpoint)
    if trainer.is_global_zero:
        for line in () if has_test else calibration.told(model.class_names):  # a test has said it
            print(line, flush=True)
        record = read_run(best.parents[1])
        if best.exists() and record.best:
            print(f"best.ckpt is {record.why_best}", flush=True)
        print(f"run in {run.path}", flush=True)
        if options.report:
            _report(run, record, data)
        if best.exists():
            print(
                f"next: finetune predict {shlex.quote(str(best.parents[1]))} PICTURES", flush=True
            )
    if options.threshold is not None and not finished:
        if calibration.aim is None:
            raise ValueError(
                f"--threshold {options.threshold}: there was no validation, and so {best} has none"
            )
        if missed := calibration.missed(model.class_names):
            raise ValueError(f"{missed}, so that {best} has none")


def _report(run: Run, record: RunRecord, data: ImageDataModule) -> None:
    """Write the run's page: what fails here takes nothing from the run."""
    # with matplotlib, which takes half a second
    from finetune.commands.report import page_of
    from finetune.runs.data_check import data_check
    from finetune.training.augmented_sheet import write_augmented

    assert run.path is not None
    try:
        write_augmented(data, run.file("augmented.webp"))
        page = page_of(record, check=data_check(record))
        print(f"report in {page}", flush=True)
    except Exception as error:  # of whatever draws or reads: the run itself is whole
        log.warning(
            "the report could not be written: %s; `finetune report %s` tries again", error, run.path
        )
