"""Writes the predictions of `predict` and `test`: one row for each image, in the order of the input.

`predict` works on any number of devices, and holds no rows in memory. `test` writes what was gathered to measure it.
"""

import csv
import glob
import io
import logging
import os
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from heapq import merge
from operator import itemgetter
from pathlib import Path
from types import SimpleNamespace
from typing import IO, Any, NamedTuple

import pytorch_lightning as pl
import torch.distributed as dist

from finetune.data.samples import Samples
from finetune.runs.folder import Run
from finetune.runs.prediction_rows import ClassRows, LabelRows, Row
from finetune.system.files import (
    append_files,
    check_target,
    create_part,
    put_in_place,
    remove_dead,
    replacing,
)
from finetune.system.messages import WrongUsage, counted, shown

log = logging.getLogger(__name__)

FILES = {"predict": "predictions.csv", "test": "test_predictions.csv"}
_NOT_UTF8 = "surrogateescape"  # a file name that is not UTF-8 is written as its bytes
_ROWS_AT_ONCE = 1024


class _OfRank(NamedTuple):
    """What rank 0 needs of another rank at the end.

    Attributes:
        counts: Counts of the predicted classes or labels.
        num_rows: Number of rows.
        last: Its last row; empty if it has none.
    """

    counts: Counter[str | None]
    num_rows: int
    last: list[dict[str, Any]]


class PredictionWriter(pl.Callback):
    """Writes the predictions of `predict` batch by batch. Each rank writes its contiguous part; rank 0 joins the parts.

    The parts are files next to the target. If writing fails, the part file of this process is not deleted, and the
    error message names it. `prediction_rows` has all columns.

    Args:
        run: The run. `predictions.csv` is written to its folder.
        output: Another .csv file to write.
        top_k: Write the k most probable classes and their probabilities, best first, not a column for each class.
        abstain_below: Predict `unsure` if the predicted class is less probable than that. Probabilities are the same.
    """

    def __init__(
        self,
        run: Run,
        output: str | None = None,
        top_k: int | None = None,
        abstain_below: float | None = None,
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
        self.counts: Counter[str | None] = Counter()
        self.num_rows = 0
        self._last: list[dict[str, Any]] = []  # the last row of this process, if there is one
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
        self._row_format = _format(pl_module, "predict", self.top_k, self.abstain_below)
        if trainer.is_global_zero:
            num = len(trainer.datamodule.splits["predict"])  # type: ignore[attr-defined]
            log.info("predicting %s", counted(num, "image"))
        self._begin(trainer)

    def _begin(self, trainer: pl.Trainer) -> None:
        # Two runs that write the same target must not share part files.
        token = [os.urandom(4).hex()]
        if trainer.world_size > 1:
            dist.broadcast_object_list(token)
        self._token = token[0]
        if not self.is_written:
            self._part = io.StringIO(newline="")
            return
        if trainer.is_global_zero:
            remove_dead(self.place.parent.glob(f".{glob.escape(self.place.name)}.????????.part*"))
        self.place.parent.mkdir(parents=True, exist_ok=True)
        # Before the file is created: a signal may arrive right after that.
        self._has_begun = True
        part = self._part_path(trainer.global_rank)
        create_part(part, self.place)
        self._part = part.open("w", newline="", encoding="utf-8", errors=_NOT_UTF8)
        if trainer.is_global_zero:
            _write_header(self._part, self._row_format.columns)

    def on_predict_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, *_: Any
    ) -> None:
        assert self._part is not None
        samples = trainer.datamodule.splits["predict"]  # type: ignore[attr-defined]
        rows = list(_rows(self._row_format, outputs, samples))
        for row in rows:
            self.counts.update(self._row_format.counted(row))
        self.num_rows += len(rows)
        self._last = rows[-1:] or self._last
        if not self.is_written:
            return
        with self._keep_part_on_error(trainer):
            _write_rows(self._part, self._row_format, rows)

    def on_predict_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        assert self._part is not None
        with self._keep_part_on_error(trainer):
            self._part.close()
        self._part = None
        own = _OfRank(self.counts, self.num_rows, self._last)
        of_ranks = [own] * trainer.world_size
        if trainer.world_size > 1:
            # This is also a barrier: afterwards all parts are complete.
            dist.all_gather_object(of_ranks, own)
        if trainer.is_global_zero and self.is_written:
            others = range(1, trainer.world_size)
            with self._keep_part_on_error(trainer, *others):
                parts = [self._part_path(rank) for rank in (0, *others)]
                append_files(parts[0], parts[1:])
                put_in_place(parts[0], self.target)
                for path in parts:
                    path.unlink(missing_ok=True)
        if trainer.is_global_zero:
            counts = sum((rank.counts for rank in of_ranks), Counter[str | None]())
            num_rows = sum(rank.num_rows for rank in of_ranks)
            last_rows = [row for rank in of_ranks for row in rank.last]
            self._print_summary(counts, num_rows, last_rows[-1])

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
        self, counts: Counter[str | None], num_rows: int, row: dict[str, Any]
    ) -> None:
        if num_rows == 1:  # `row` is the row of this image
            print(f"{shown(row['path'])}: {self._row_format.describe(row)}")
        else:
            print(f"{num_rows:,} images: {self._row_format.count_text(counts)}")
        if not self.is_written:
            if row["error"] is not None:
                raise ValueError(f"the image cannot be read: {row['error']}")
            if others := self._row_format.others(row):
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

    Args:
        run: The run.
    """

    def __init__(self, run: Run) -> None:
        self.run = run

    def on_test_end(self, trainer: pl.Trainer, pl_module: Any) -> None:
        if not trainer.is_global_zero:
            return
        samples = trainer.datamodule.splits["test"]  # type: ignore[attr-defined]
        row_format = _format(pl_module, "test")
        path = self.run.file(FILES["test"])
        path.parent.mkdir(parents=True, exist_ok=True)
        with (
            replacing(path) as temporary,
            temporary.open("w", newline="", encoding="utf-8", errors=_NOT_UTF8) as file,
        ):
            _write_header(file, row_format.columns)
            _write_rows(file, row_format, _test_rows(row_format, pl_module, samples))


def _test_rows(row_format: ClassRows | LabelRows, module: Any, samples: Samples) -> Iterator[Row]:
    """Yield the rows of a test, in the order of the images, from the outputs that were measured."""
    outputs = module.outputs

    def good() -> Iterator[tuple[int, Row]]:
        parts = (column.split(_ROWS_AT_ONCE) for column in (outputs.index, outputs.logits))
        for index, logits in zip(*parts, strict=True):
            p = module.calibration.probabilities(logits)
            results = row_format.predictions(p, module.calibration.decide(p))
            yield from zip(index.tolist(), results, strict=True)

    bad = ((index, {"error": error}) for index, error in outputs.bad)
    for index, row in merge(good(), bad, key=itemgetter(0)):
        true = row_format.target(samples.targets[index])  # type: ignore[arg-type]
        yield (dict.fromkeys(row_format.columns) | {"path": samples.paths[index]} | true | row)


def _rows(
    row_format: ClassRows | LabelRows, outputs: dict[str, Any], samples: Samples
) -> Iterator[Row]:
    """Yield the rows of a batch of `predict`, in the order of the input."""
    results = row_format.predictions(outputs["probabilities"].cpu(), outputs["class"].cpu())
    good = dict(zip(outputs["index"].tolist(), results, strict=True))
    errors = dict(outputs["bad"])
    for index in sorted([*good, *errors]):
        row = dict.fromkeys(row_format.columns) | {"path": samples.paths[index]}
        yield row | ({"error": errors[index]} if index in errors else good[index])


def _format(
    module: Any, split: str, top_k: int | None = None, abstain_below: float = 0.0
) -> ClassRows | LabelRows:
    """Return how the rows of a network are written."""
    if module.task.label_kind == "single":
        return ClassRows(module.class_names, split, top_k, abstain_below)
    return LabelRows(module.class_names, split, module.calibration.thresholds)


def _write_header(file: IO[str], columns: Sequence[str]) -> None:
    file.write(",".join(map(_quoted, columns)) + "\n")


def _write_rows(file: IO[str], row_format: ClassRows | LabelRows, rows: Iterable[Row]) -> None:
    # csv quotes a field with a carriage return only if rows also end in one. The lambda removes that.
    lines: Any = SimpleNamespace(write=lambda row: file.write(f"{row[:-2]}\n"))
    writer = csv.DictWriter(lines, row_format.columns, lineterminator="\r\n")
    writer.writerows(map(row_format.as_text, rows))


def _quoted(name: str) -> str:
    return '"' + name.replace('"', '""') + '"' if set(name) & set(',"\n') else name
