"""Writes the predictions of `predict` and `test`: one row for each image, in the order of the input.

`predict` works on any number of devices, and holds no rows in memory. `test` writes what was gathered to measure it.
"""

import csv
import glob
import io
import logging
import os
from collections import Counter
from collections.abc import Iterator
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
from finetune.runs.prediction_rows import Predicted, Rows, predicted
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
    """What rank 0 needs of a rank at the end: its counts of predictions, its number of rows, and its last row."""

    counts: Counter[str | None]
    num_rows: int
    last: Predicted | None


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
        self._rows = Rows(
            pl_module.class_names,
            _thresholds(pl_module),
            top_k=self.top_k,
            abstain_below=self.abstain_below,
        )
        if trainer.is_global_zero:
            num = len(trainer.datamodule.splits["predict"])  # type: ignore[attr-defined]
            log.info("predicting %s", counted(num, "image"))
        # Two runs that write the same target must not share part files.
        token = [os.urandom(4).hex()]
        if trainer.world_size > 1:
            dist.broadcast_object_list(token)
        self._token = token[0]
        self._part = self._begin(trainer) if self.is_written else io.StringIO(newline="")
        self._csv = _csv_writer(self._part, self._rows)
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
        create_part(part, self.place)
        return part.open("w", newline="", encoding="utf-8", errors=_NOT_UTF8)

    def on_predict_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, *_: Any
    ) -> None:
        samples = trainer.datamodule.splits["predict"]  # type: ignore[attr-defined]
        indices = outputs["index"].tolist()
        paths = [samples.paths[i] for i in indices]
        results = predicted(paths, outputs["probabilities"].cpu(), outputs["class"].cpu())
        of_batch = dict(zip(indices, results, strict=True))
        for i, error in outputs["bad"]:
            of_batch[i] = Predicted(samples.paths[i], error=error)
        in_order = [of_batch[i] for i in sorted(of_batch)]
        counts = self._own.counts
        last = self._own.last
        for one in in_order:
            counts.update(self._rows.counted(one))
            last = one
        self._own = _OfRank(counts, self._own.num_rows + len(in_order), last)
        if self.is_written:
            with self._keep_part_on_error(trainer):
                self._csv.writerows(map(self._rows.cells, in_order))

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
                append_files(parts[0], parts[1:])
                put_in_place(parts[0], self.target)
                for path in parts:
                    path.unlink(missing_ok=True)
        counts = sum((rank.counts for rank in of_ranks), Counter[str | None]())
        last = [rank.last for rank in of_ranks if rank.last is not None]
        self._print_summary(counts, sum(rank.num_rows for rank in of_ranks), last[-1])

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

    Args:
        run: The run.
    """

    def __init__(self, run: Run) -> None:
        self.run = run

    def on_test_end(self, trainer: pl.Trainer, pl_module: Any) -> None:
        if not trainer.is_global_zero:
            return
        samples: Samples = trainer.datamodule.splits["test"]  # type: ignore[attr-defined]
        rows = Rows(pl_module.class_names, _thresholds(pl_module), is_test=True)
        path = self.run.file(FILES["test"])
        path.parent.mkdir(parents=True, exist_ok=True)
        with (
            replacing(path) as temporary,
            temporary.open("w", newline="", encoding="utf-8", errors=_NOT_UTF8) as file,
        ):
            writer = _csv_writer(file, rows)
            writer.writeheader()
            bad = ((i, Predicted(samples.paths[i], error=e)) for i, e in pl_module.outputs.bad)
            good = _tested(pl_module, samples)
            for i, one in merge(good, bad, key=itemgetter(0)):
                target: Any = samples.targets[i]
                several = rows.thresholds is not None
                true = [k for k, is_true in enumerate(target) if is_true] if several else [target]
                writer.writerow(rows.cells(one, true))


def _tested(module: Any, samples: Samples) -> Iterator[tuple[int, Predicted]]:
    """Yield the indices of the test images that were measured, and the predictions for them."""
    columns = (module.outputs.index, module.outputs.logits)
    for index, logits in zip(*(column.split(_ROWS_AT_ONCE) for column in columns), strict=True):
        p = module.calibration.probabilities(logits)
        paths = [samples.paths[i] for i in index.tolist()]
        results = predicted(paths, p, module.calibration.decide(p))
        yield from zip(index.tolist(), results, strict=True)


def _thresholds(module: Any) -> list[float] | None:
    """Return the threshold of each label; None for a network that predicts one class an image."""
    if module.task.label_kind == "single":
        return None
    return list(module.calibration.thresholds)


def _csv_writer(file: IO[str], rows: Rows) -> "csv.DictWriter[str]":
    # csv quotes a field with a carriage return only if rows also end in one. The lambda removes that.
    lines: Any = SimpleNamespace(write=lambda row: file.write(f"{row[:-2]}\n"))
    return csv.DictWriter(lines, rows.columns, lineterminator="\r\n", extrasaction="ignore")
