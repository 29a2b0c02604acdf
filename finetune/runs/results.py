"""Results of a run, in files and on the terminal: test.json or val.json, and skipped.txt."""

import logging
import math
import os
from typing import Any

import msgspec
import pytorch_lightning as pl
import torch.distributed as dist

from finetune.runs.folder import Run
from finetune.runs.headline import headline_of, headline_of_groups
from finetune.runs.result_file import write_result
from finetune.system.files import replace_text
from finetune.system.messages import counted

log = logging.getLogger(__name__)

# The metrics that are printed and compared, in this order. An evaluation has some of them.
METRICS = (
    "accuracy",
    "mAP",
    "loss",
    "f1",
    "f1_macro",
    "f1_micro",
    "exact_match",
    "hamming_distance",
    "calibration_error_before_scaling",
    "calibration_error",
)


class Results(pl.Callback):
    """Writes the result of `test` and `validate` into the folder of the run, and prints it.

    Args:
        run: The run.
    """

    def __init__(self, run: Run) -> None:
        self.run = run

    def on_test_end(self, trainer: pl.Trainer, pl_module: Any) -> None:
        self._report(trainer, pl_module, "test")

    def on_validation_end(self, trainer: pl.Trainer, pl_module: Any) -> None:
        if trainer.state.fn == "validate":
            self._report(trainer, pl_module, "val")

    def _report(self, trainer: pl.Trainer, pl_module: Any, split: str) -> None:
        if not trainer.is_global_zero:
            return
        logged = {
            name: float(v)
            for name, v in trainer.callback_metrics.items()
            if name.startswith(f"{split}/")
        }
        # JSON has no NaN
        values = {name: None if math.isnan(value) else value for name, value in logged.items()}
        file = self.run.file(f"{split}.json")
        details = {
            # From the run's folder: both may be moved, or seen from another folder than this.
            "checkpoint": os.path.relpath(
                os.path.realpath(trainer.ckpt_path), os.path.realpath(file.parent)
            )
            if trainer.ckpt_path
            else None,
            "folder": os.getcwd(),  # to which relative paths of images refer
            "class_names": pl_module.class_names,
            **pl_module.counts,
            "calibration": msgspec.structs.replace(pl_module.calibration, scores=()).as_plain(),
        }
        # without a data module there are no corrections
        scanned = getattr(getattr(trainer, "datamodule", None), "scanned", None)
        if scanned is not None:
            details["image_folder"] = scanned.folder
            if scanned.corrections is not None:
                details["corrections"] = scanned.corrections.plain()
        result = {**values, **details}
        write_result(file, result)
        headline = headline_of(result, split)
        by_group = headline_of_groups(result, split)
        if split == "test":
            self.run.dir.update(test=headline, test_by_group=by_group)
        for name in (f"{split}/{metric}" for metric in METRICS):
            if name in values:
                print(f"{name} {values[name]:.4f}", flush=True)
        if headline is not None:
            print(headline, flush=True)
        if by_group is not None:
            print(f"by group: {by_group}", flush=True)
        elif "groups" in result:
            print(
                "by group: no result, since no group has readable images of one class", flush=True
            )
        if "sets" in result:
            print(result["sets"]["line"], flush=True)
        coverage = pl_module.coverage if split == "test" else None
        for line in pl_module.calibration.describe(pl_module.class_names, coverage):
            print(line, flush=True)


class Skipped(pl.Callback):
    """Lists the images that could not be decoded, and were skipped, in `skipped.txt` of the run's folder."""

    def __init__(self, run: Run) -> None:
        self.run = run
        self.errors: set[str] = set()

    def _on_batch_end(
        self, trainer: pl.Trainer, pl_module: Any, outputs: Any, batch: Any, *_: Any
    ) -> None:
        self.errors.update(error for _, error in batch["bad"])

    on_train_batch_end = on_validation_batch_end = on_test_batch_end = _on_batch_end  # type: ignore[assignment]

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: Any) -> None:
        self._list(trainer)

    def _report(self, trainer: pl.Trainer, pl_module: Any) -> None:
        if trainer.state.fn == "fit" and trainer.validating:
            return
        num = self._list(trainer)
        if num and trainer.is_global_zero:
            verb = "was" if num == 1 else "were"
            images = f"{counted(num, 'image')} could not be decoded and {verb} skipped"
            print(f"{images}: see {self.run.file('skipped.txt')}", flush=True)
        self.errors.clear()

    on_train_end = on_test_end = on_validation_end = _report

    def on_exception(self, trainer: pl.Trainer, *_: Any) -> None:
        # Without a collective call: the other ranks may have failed.
        if self.run.path is not None and trainer.is_global_zero:
            try:
                self._write(self.errors)
            except OSError as error:  # must not hide the exception, nor stop other callbacks
                log.warning("skipped.txt is incomplete: %s", error)

    def _list(self, trainer: pl.Trainer) -> int:
        of_ranks = [self.errors] * trainer.world_size
        if trainer.world_size > 1:
            dist.all_gather_object(of_ranks, self.errors)
        errors = set().union(*of_ranks)
        if trainer.is_global_zero:
            scanned = getattr(trainer.datamodule, "scanned", None)  # type: ignore[attr-defined]
            faults = () if scanned is None else scanned.faults
            self._write(errors | {fault.line() for fault in faults})
        return len(errors)

    def _write(self, lines: set[str]) -> None:
        if not lines:
            return
        path = self.run.file("skipped.txt")
        own_bytes = "surrogateescape"  # of file names that are not UTF-8
        if path.exists():  # a run that was resumed has listed some before
            lines = lines | set(path.read_text("utf-8", own_bytes).splitlines())
        replace_text(path, "".join(f"{line}\n" for line in sorted(lines)), own_bytes)
