"""Writes the predictions of `predict` and `test`: one row for each image, in the order of the input.

`predict` works on any number of devices, and holds no rows in memory, except the logits of images with groups. `test`
writes what was gathered to measure it.
"""

import csv
import glob
import io
import logging
import os
import shutil
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from heapq import merge
from operator import itemgetter
from pathlib import Path
from types import SimpleNamespace
from typing import IO, Any, NamedTuple

import numpy as np
import pytorch_lightning as pl
import torch.distributed as dist

from finetune.data.samples import Samples
from finetune.runs.folder import Run
from finetune.runs.prediction_rows import Predicted, Rows, predicted
from finetune.system.files import check_target, remove_dead, replacing
from finetune.system.messages import WrongUsage, counted, shown

log = logging.getLogger(__name__)

FILES = {"predict": "predictions.csv", "test": "test_predictions.csv"}
GROUP_FILE = "test_group_predictions.csv"
_NOT_UTF8 = "surrogateescape"  # a file name that is not UTF-8 is written as its bytes
_ROWS_AT_ONCE = 1024


class _OfRank(NamedTuple):
    """What rank 0 needs of a rank at the end: its counts of predictions, its number of rows, and its last row."""

    counts: Counter[str | None]
    num_rows: int
    last: Predicted | None


def group_file(path: Path) -> Path:
    """Return where the answers of groups are written, next to those of images."""
    return path.with_name(f"group_{path.name}")


class PredictionWriter(pl.Callback):
    """Writes the predictions of `predict` batch by batch. Each rank writes its contiguous part; rank 0 joins the parts.

    Those of groups, if images have groups, are in another file next to it, whose name begins with `group_`.

    The parts are files next to the target. If writing fails, the part file of this process is not deleted, and the
    error message names it. `prediction_rows` has all columns.

    Args:
        run: The run. `predictions.csv` is written to its folder.
        output: Another .csv file to write.
        top_k: Write the k most probable classes and their probabilities, best first, not a column for each class.
        abstain_below: Predict `unsure` if the predicted class is less probable than that. Probabilities are the same.
        none_below: Predict `none` if the image is less familiar than that.
    """

    def __init__(
        self,
        run: Run,
        output: str | None = None,
        top_k: int | None = None,
        abstain_below: float | None = None,
        none_below: float | None = None,
    ) -> None:
        if output and Path(output).suffix.lower() != ".csv":
            raise WrongUsage(f"--out {output}: predictions are a .csv")
        if output:
            check_target(output, "--out")
        if top_k is not None and top_k < 1:
            raise WrongUsage(f"--top_k must be at least 1, got {top_k}")
        if abstain_below is not None and not 0 <= abstain_below <= 1:
            raise WrongUsage(f"--abstain_below must be from 0 to 1, got {abstain_below}")
        self.run = run
        self.output = output
        self.top_k = top_k
        self.abstain_below = abstain_below or 0.0
        self.none_below = none_below or 0.0
        self._own = _OfRank(Counter(), 0, None)
        self._part: IO[str] | None = None
        self._has_begun = False

    @property
    def is_written(self) -> bool:
        """Whether the rows are written: the prediction for a single image is only printed unless a file is named."""
        return self.output is not None or self.run.path is not None

    @property
    def target(self) -> Path:
        return Path(self.output) if self.output else self.run.file(FILES["predict"])

    @property
    def place(self) -> Path:
        """The target with symbolic links resolved. The parts lie next to it."""
        return Path(os.path.realpath(self.target))

    def on_predict_start(self, trainer: pl.Trainer, pl_module: Any) -> None:
        if pl_module.task.label_kind == "several":
            for name in ("top_k", "abstain_below"):
                if getattr(self, name):
                    raise WrongUsage(
                        f"--{name} is for one class per image, and this network predicts several labels"
                    )
        samples: Samples = trainer.datamodule.splits["predict"]  # type: ignore[attr-defined]
        self._rows = Rows(
            pl_module.class_names,
            _thresholds(pl_module),
            top_k=self.top_k,
            abstain_below=self.abstain_below,
            has_groups=samples.groups is not None,
            has_sets=pl_module.coverage is not None,
            none_below=None if pl_module.familiarity is None else self.none_below,
        )
        if trainer.is_global_zero:
            log.info("predicting %s", counted(len(samples), "image"))
        # Two runs that write the same target must not share part files.
        token = [os.urandom(4).hex()]
        if trainer.world_size > 1:
            dist.broadcast_object_list(token)
        self._token = token[0]
        self._part = self._begin(trainer) if self.is_written else io.StringIO(newline="")
        self._csv = _csv_writer(self._part, self._rows.columns)
        if trainer.is_global_zero:
            self._csv.writeheader()

    def _begin(self, trainer: pl.Trainer) -> IO[str]:
        """Create the part file of this rank, and return it opened."""
        if trainer.is_global_zero:
            remove_dead(self.place.parent.glob(f".{glob.escape(self.place.name)}.????????.part*"))
        self.place.parent.mkdir(parents=True, exist_ok=True)
        # Before the file is created: a signal may arrive right after that.
        self._has_begun = True
        part = self._part_path(trainer.global_rank)
        part.touch(mode=0o600, exist_ok=False)  # the target may be private
        return part.open("w", newline="", encoding="utf-8", errors=_NOT_UTF8)

    def on_predict_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, *_: Any
    ) -> None:
        samples = trainer.datamodule.splits["predict"]  # type: ignore[attr-defined]
        indices = outputs["index"].tolist()
        paths = [samples.paths[i] for i in indices]
        columns = outputs["probabilities"].cpu(), outputs["class"].cpu(), outputs["set"]
        results = predicted(paths, *columns, outputs["familiar"])
        of_batch = dict(zip(indices, results, strict=True))
        for i, error in outputs["bad"]:
            of_batch[i] = Predicted(samples.paths[i], error=error)
        in_order = sorted(of_batch.items())
        counts = self._own.counts
        last = self._own.last
        for _, one in in_order:
            counts.update(self._rows.counted(one))
            last = one
        self._own = _OfRank(counts, self._own.num_rows + len(in_order), last)
        if self.is_written:
            with self._keep_part_on_error(trainer):
                self._csv.writerows(
                    self._rows.cells(one, group=samples.group_name(i)) for i, one in in_order
                )

    def on_predict_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        assert self._part is not None
        with self._keep_part_on_error(trainer):
            self._part.close()
        self._part = None
        of_ranks = [self._own] * trainer.world_size
        if trainer.world_size > 1:
            # This is also a barrier: afterwards all parts are complete.
            dist.all_gather_object(of_ranks, self._own)
        if not trainer.is_global_zero:
            return
        if self.is_written:
            others = range(1, trainer.world_size)
            with self._keep_part_on_error(trainer, *others):
                parts = [self._part_path(rank) for rank in (0, *others)]
                with replacing(self.target) as temporary, temporary.open("wb") as joined:
                    for path in parts:
                        with path.open("rb") as rows:
                            shutil.copyfileobj(rows, joined)
                for path in parts:
                    path.unlink(missing_ok=True)
        counts = sum((rank.counts for rank in of_ranks), Counter[str | None]())
        last = [rank.last for rank in of_ranks if rank.last is not None]
        self._print_summary(counts, sum(rank.num_rows for rank in of_ranks), last[-1])
        if self.is_written:
            self._write_groups(pl_module)

    def _write_groups(self, module: Any) -> None:
        """Write the predictions for groups, if there are any, and print a summary."""
        groups = getattr(module, "groups", None)
        if groups is not None:
            target = group_file(self.target)
            counts = _write(target, self._rows, module, groups.samples, groups.outputs, groups)
            print(f"{counted(len(groups.sizes), 'group')}: {self._rows.count_text(counts)}")
            print(f"predictions of groups in {target}", flush=True)

    def on_exception(self, trainer: pl.Trainer, *_: Any) -> None:
        if self._part is not None:
            with suppress(OSError):  # flushing the buffer fails again on a full disk
                self._part.close()
        if self._has_begun:
            self._part_path(trainer.global_rank).unlink(missing_ok=True)

    @contextmanager
    def _keep_part_on_error(self, trainer: pl.Trainer, *others: int) -> Iterator[None]:
        """Keep the part files of this rank and of others if writing fails, and name them in the error.

        Raises:
            OSError: Writing failed.
        """
        try:
            yield
        except OSError as error:
            self._has_begun = False  # `on_exception` must not remove the part
            parts = " ".join(str(self._part_path(rank)) for rank in (trainer.global_rank, *others))
            message = f"{self.target} could not be written: {error.strerror or error}"
            raise OSError(f"{message}; the rows so far are in {parts}") from error

    def _print_summary(self, counts: Counter[str | None], num_rows: int, last: Predicted) -> None:
        if num_rows == 1:
            print(f"{shown(last.path)}: {self._rows.describe(last)}")
        else:
            print(f"{num_rows:,} images: {self._rows.count_text(counts)}")
        if not self.is_written:  # a single image
            if last.error:
                raise ValueError(f"the image cannot be read: {last.error}")
            if others := self._rows.others(last):
                print(others, flush=True)
            return
        print(f"predictions in {self.target}", flush=True)
        if num_rows == counts[None]:
            raise ValueError(
                f"none of the images can be read: {self.target} has the reason for each"
            )

    def _part_path(self, rank: int) -> Path:
        return self.place.with_name(f".{self.place.name}.{self._token}.part{rank}")


class AnswersWriter(pl.Callback):
    """Writes `test_predictions.csv` into the folder of the run, on rank 0. Its rows also have the true class or labels.

    If the images have groups, `test_group_predictions.csv` has a row for each group.

    Args:
        run: The run.
    """

    def __init__(self, run: Run) -> None:
        self.run = run

    def on_test_end(self, trainer: pl.Trainer, pl_module: Any) -> None:
        if not trainer.is_global_zero:
            return
        samples: Samples = trainer.datamodule.splits["test"]  # type: ignore[attr-defined]
        groups = getattr(pl_module, "groups", None)
        rows = Rows(
            pl_module.class_names,
            _thresholds(pl_module),
            is_test=True,
            has_groups=groups is not None,
            has_sets=pl_module.coverage is not None,
        )
        _write(self.run.file(FILES["test"]), rows, pl_module, samples, pl_module.outputs)
        if groups is not None:
            target = self.run.file(GROUP_FILE)
            _write(target, rows, pl_module, groups.samples, groups.outputs, groups)


def _write(
    target: Path, rows: Rows, module: Any, samples: Samples, outputs: Any, groups: Any = None
) -> Counter[str | None]:
    """Write the predictions for images, or for groups, and return what the summary counts of them.

    Args:
        target: The file.
        rows: Its rows.
        module: The network.
        samples: The images, or the groups as images.
        outputs: The `Outputs` for them.
        groups: The `Groups`; None for images.
    """
    counts: Counter[str | None] = Counter()
    target.parent.mkdir(parents=True, exist_ok=True)
    with (
        replacing(target) as temporary,
        temporary.open("w", newline="", encoding="utf-8", errors=_NOT_UTF8) as file,
    ):
        writer = _csv_writer(file, rows.columns if groups is None else rows.group_columns)
        writer.writeheader()
        bad = ((i, Predicted(samples.paths[i], error=error)) for i, error in outputs.bad)
        for i, one in merge(_evaluated(module, samples, outputs), bad, key=itemgetter(0)):
            of_one: Any = samples.targets[i]
            true = [of_one] if isinstance(of_one, int) else np.flatnonzero(of_one).tolist()
            num_images = 1
            if groups is not None:
                num_images = groups.sizes[i]
                one = one._replace(means=groups.means[i])
            true = [k for k in true if k >= 0]  # -1 is unknown
            writer.writerow(rows.cells(one, true, samples.group_name(i), num_images))
            counts.update(rows.counted(one))
    return counts


def _evaluated(module: Any, samples: Samples, outputs: Any) -> Iterator[tuple[int, Predicted]]:
    """Yield the indices of the images that were evaluated, and the predictions for them."""
    columns = (outputs.index, outputs.logits)
    for index, logits in zip(*(column.split(_ROWS_AT_ONCE) for column in columns), strict=True):
        p = module.calibration.probabilities(logits)
        paths = [samples.paths[i] for i in index.tolist()]
        results = predicted(paths, p, module.calibration.decide(p), module.calibration.sets(p))
        yield from zip(index.tolist(), results, strict=True)


def _thresholds(module: Any) -> list[float] | None:
    """Return the threshold of each label; None for a network that predicts one class an image."""
    if module.task.label_kind == "single":
        return None
    return list(module.calibration.thresholds)


def _csv_writer(file: IO[str], columns: list[str]) -> "csv.DictWriter[str]":
    # csv quotes a field with a carriage return only if rows also end in one. The lambda removes that.
    lines: Any = SimpleNamespace(write=lambda row: file.write(f"{row[:-2]}\n"))
    return csv.DictWriter(lines, columns, lineterminator="\r\n", extrasaction="ignore")
