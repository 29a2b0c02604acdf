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
from collections.abc import Iterator, Sequence
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
from finetune.system.files import check_target, remove_dead, replacing
from finetune.system.messages import WrongUsage, counted, shown
from finetune.training.groups import Groups
from finetune.training.outputs import Outputs
from finetune.training.prediction import DecisionRule, Scores
from finetune.training.prediction_rows import Outcome, Rows

log = logging.getLogger(__name__)

_NOT_UTF8 = "surrogateescape"  # a file name that is not UTF-8 is written as its bytes
_ROWS_AT_ONCE = 1024


class _OfRank(NamedTuple):
    """What rank 0 needs of a rank at the end: its counts of predictions, its number of rows, and its last image."""

    counts: Counter[str | None]
    num_rows: int
    last: tuple[str, Outcome] | None


def group_file(path: Path) -> Path:
    """Return where the answers of groups are written, next to those of images."""
    return path.with_name(f"group_{path.name}")


class PredictionWriter(pl.Callback):
    """Writes the predictions of `predict` batch by batch. Each rank writes its contiguous part; rank 0 joins the parts.

    Those of groups, if images have groups, are in another file next to it, whose name begins with `group_`.

    The parts are files next to the target. If writing fails, the part file of this process is not deleted, and the
    error message names it. `Rows` has all columns.

    Args:
        run: The run. `predictions.csv` is written to its folder.
        rows: The rows to write.
        output: Another .csv file to write.
    """

    def __init__(self, run: Run, rows: Rows, output: str | None = None) -> None:
        if output and Path(output).suffix.lower() != ".csv":
            raise WrongUsage(f"--out {output}: predictions are a .csv")
        if output:
            check_target(output, "--out")
        self.run = run
        self.rows = rows
        self.output = output
        self._own = _OfRank(Counter(), 0, None)
        self._part: IO[str] | None = None
        self._has_begun = False

    @property
    def is_written(self) -> bool:
        """Whether the rows are written: the prediction for a single image is only printed unless a file is named."""
        return self.output is not None or self.run.path is not None

    @property
    def target(self) -> Path:
        return Path(self.output) if self.output else self.run.file("predictions.csv")

    @property
    def place(self) -> Path:
        """The target with symbolic links resolved. The parts lie next to it."""
        return Path(os.path.realpath(self.target))

    def on_predict_start(self, trainer: pl.Trainer, pl_module: Any) -> None:
        samples: Samples = trainer.datamodule.splits["predict"]  # type: ignore[attr-defined]
        if trainer.is_global_zero:
            log.info("predicting %s", counted(len(samples), "image"))
        # Two runs that write the same target must not share part files.
        token = [os.urandom(4).hex()]
        if trainer.world_size > 1:
            dist.broadcast_object_list(token)
        self._token = token[0]
        self._part = self._begin(trainer) if self.is_written else io.StringIO(newline="")
        self._csv = _csv_writer(self._part, self.rows.columns)
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
        self, trainer: pl.Trainer, pl_module: Any, outputs: Any, batch: Any, *_: Any
    ) -> None:
        samples = trainer.datamodule.splits["predict"]  # type: ignore[attr-defined]
        answers = {one.index: one for one in outputs} | dict(batch["bad"])
        in_order = [(i, answers[i]) for i in sorted(answers)]
        counts = self._own.counts
        last = self._own.last
        for i, one in in_order:
            counts.update(self.rows.counted(one))
            last = (samples.paths[i], one)
        self._own = _OfRank(counts, self._own.num_rows + len(in_order), last)
        if self.is_written:
            with self._keep_part_on_error(trainer):
                self._csv.writerows(
                    _name_cells(samples, i) | self.rows.cells(one) for i, one in in_order
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
        if module.groups is not None:
            groups = module.groups
            target = group_file(self.target)
            counts = _write(target, self.rows, groups.samples, groups.outputs, groups)
            print(f"{counted(len(groups.sizes), 'group')}: {self.rows.count_text(counts)}")
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

    def _print_summary(
        self, counts: Counter[str | None], num_rows: int, last: tuple[str, Outcome]
    ) -> None:
        path, one = last
        if num_rows == 1:
            print(f"{shown(path)}: {self.rows.describe(one)}")
        else:
            print(f"{num_rows:,} images: {self.rows.count_text(counts)}")
        if not self.is_written:  # a single image
            if isinstance(one, str):
                raise ValueError(f"the image cannot be read: {one}")
            if others := self.rows.others(one):
                print(others, flush=True)
            return
        print(f"predictions in {self.target}", flush=True)
        if num_rows == counts[None]:
            raise ValueError(
                f"none of the images can be read: {self.target} has the reason for each"
            )

    def _part_path(self, rank: int) -> Path:
        return self.place.with_name(f".{self.place.name}.{self._token}.part{rank}")


class WriteTestPredictions(pl.Callback):
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
        groups = pl_module.groups
        rows = Rows(pl_module.rule, is_test=True, has_groups=groups is not None)
        target = self.run.file("test_predictions.csv")
        _write(target, rows, samples, pl_module.outputs)
        if groups is not None:
            target = self.run.file("test_group_predictions.csv")
            _write(target, rows, groups.samples, groups.outputs, groups)


def _write(
    target: Path, rows: Rows, samples: Samples, outputs: Outputs, groups: Groups | None = None
) -> Counter[str | None]:
    """Write the predictions for images, or for groups, and return what the summary counts of them.

    Args:
        target: The file.
        rows: Its rows.
        samples: The images, or the groups as images.
        outputs: The outputs for them.
        groups: The groups; None for images.
    """
    rule = rows.rule if groups is None else rows.rule.of_groups()
    counts: Counter[str | None] = Counter()
    target.parent.mkdir(parents=True, exist_ok=True)
    with (
        replacing(target) as temporary,
        temporary.open("w", newline="", encoding="utf-8", errors=_NOT_UTF8) as file,
    ):
        table = _csv_writer(file, rows.columns if groups is None else rows.group_columns)
        table.writeheader()
        for i, one in merge(_evaluated(rule, outputs), outputs.bad, key=itemgetter(0)):
            target_of: Any = samples.targets[i]
            is_class = isinstance(target_of, int)
            true = [target_of] if is_class else np.flatnonzero(target_of).tolist()
            row = _name_cells(samples, i)
            means: Sequence[float] = ()
            if groups is not None:
                row["images"] = groups.sizes[i]
                means = groups.means[i].tolist()
            # -1 is unknown
            row |= rows.cells(one, [k for k in true if k >= 0], means)
            table.writerow(row)
            counts.update(rows.counted(one))
    return counts


def _name_cells(samples: Samples, i: int) -> dict[str, Any]:
    return {"path": samples.paths[i], "group": samples.group_name(i)}


def _evaluated(rule: DecisionRule, outputs: Outputs) -> Iterator[tuple[int, Outcome]]:
    """Yield the index of each image that was evaluated, and the prediction for it."""
    for first in range(0, len(outputs.index), _ROWS_AT_ONCE):
        part = slice(first, first + _ROWS_AT_ONCE)
        p = rule.calibration.probabilities(outputs.logits[part])
        index = outputs.index[part].tolist()
        scores = Scores(rule, p, outputs.familiar[part], index)
        yield from zip(index, scores, strict=True)


def _csv_writer(file: IO[str], columns: list[str]) -> "csv.DictWriter[str]":
    # csv quotes a field with a carriage return only if rows also end in one. The lambda removes that.
    lines: Any = SimpleNamespace(write=lambda row: file.write(f"{row[:-2]}\n"))
    return csv.DictWriter(lines, columns, lineterminator="\r\n", extrasaction="ignore")
