"""One row for each picture of predict or test, in the order of the input, on any devices; none is kept in memory."""

import csv
import glob
import io
import json
import logging
import os
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import SimpleNamespace
from typing import IO, Any

import pytorch_lightning as pl
import torch.distributed as dist
from torch import Tensor

from finetune.data.samples import Samples
from finetune.runs.folder import Run
from finetune.runs.parquet import check_pyarrow, write_parquet
from finetune.system.files import (
    append_files,
    check_target,
    create_part,
    put_in_place,
    remove_dead,
    replacing,
)
from finetune.system.messages import WrongUsage, shown

log = logging.getLogger(__name__)

_DIGITS = 7
_MOST_PRINTED = 4  # classes of a single image, next to the predicted one
_MANY = 50  # classes: beyond them the rows of `test` hold the five best
FILES = {"predict": "predictions.csv", "test": "test_predictions.csv"}
UNSURE = "unsure"  # instead of a class
SUFFIXES = (".csv", ".jsonl", ".parquet")
# What becomes of a file name that is not UTF-8: its own bytes, JSON's \udcXX for each of them, or question marks.
_NOT_UTF8 = {".csv": "surrogateescape", ".jsonl": "backslashreplace", ".parquet": "replace"}


class PredictionWriter(pl.Callback):
    """Writes predictions as they come: each device its contiguous part of the list, rank 0 then joins the parts.

    Those of `test` have a column `label` besides, the class that each picture is of.

    The parts are files beside the target, save those of `test`, which the other devices send. Where writing fails,
    what this process wrote stays, and the error names it.

    Args:
        run: The run; `predictions.csv`, or `test_predictions.csv`, goes into its folder.
        output: Another file to write, its suffix .csv, .jsonl or .parquet says how.
        top_k: Give the k most probable classes and their probabilities, best first, instead of a column for each class.
        abstain_below: Where the class is less probable than that, say `unsure` instead of it, beside the same numbers.
    """

    def __init__(
        self,
        run: Run,
        output: str | None = None,
        top_k: int | None = None,
        abstain_below: float | None = None,
    ) -> None:
        if output and Path(output).suffix.lower() not in SUFFIXES:
            raise WrongUsage(f"--output {output}: the suffix must be one of {' '.join(SUFFIXES)}")
        if output and Path(output).suffix.lower() == ".parquet":
            check_pyarrow()
        if output:
            check_target(output, "--output")
        if top_k is not None and top_k < 1:
            raise WrongUsage(f"--top_k must be at least 1, got {top_k}")
        if abstain_below is not None and not 0 <= abstain_below <= 1:
            raise WrongUsage(f"--abstain_below must be from 0 to 1, got {abstain_below}")
        self.run = run
        self.output = output
        self.top_k = top_k
        self.abstain_below = abstain_below or 0.0
        self.split = "predict"
        self.counts: Counter[str | None] = Counter()
        self._last: list[dict[str, Any]] = []  # row of this process
        self._part: IO[str] | None = None
        self._has_begun = False

    @property
    def is_kept(self) -> bool:
        """Whether the rows are written: the prediction for a single image is only printed unless a file is named."""
        return self.output is not None or self.run.path is not None

    @property
    def target(self) -> Path:
        return Path(self.output) if self.output else self.run.file(FILES[self.split])

    @property
    def place(self) -> Path:
        """Where the target lies, if it is a symbolic link: the parts lie beside that file."""
        return Path(os.path.realpath(self.target))

    @property
    def suffix(self) -> str:
        return self.target.suffix.lower()

    def on_test_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        names: list[str] = pl_module.class_names  # type: ignore[assignment]
        self.split, self.top_k = "test", 5 if len(names) > _MANY else None
        self._begin(trainer, names)

    def on_predict_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        names: list[str] = pl_module.class_names  # type: ignore[assignment]
        if self.top_k is not None and self.top_k > len(names):
            raise WrongUsage(f"--top_k {self.top_k}: there are only {len(names)} classes")
        if self.abstain_below and UNSURE in names:
            raise ValueError(
                f"--abstain_below would predict {UNSURE}, which is one of the classes: leave it out"
            )
        if trainer.is_global_zero:
            num = len(trainer.datamodule.splits["predict"])  # type: ignore[attr-defined]
            log.info("predicting %d picture%s", num, "s" * (num != 1))
        self._begin(trainer, names)

    def _begin(self, trainer: pl.Trainer, names: list[str]) -> None:
        self._names = names
        extra = [f"p_{name}" for name in names]
        if self.top_k is not None:
            extra = [
                f"{what}_{i}" for i in range(2, self.top_k + 1) for what in ("class", "probability")
            ]
        label = ["label"] if self.split == "test" else []
        self.columns = ["path", *label, "class", "probability", *extra, "error"]
        token = [os.urandom(4).hex()]  # two runs may write one file: that of the last is whole
        if trainer.world_size > 1:
            dist.broadcast_object_list(token)
        self._token = token[0]
        if not self.is_kept:
            self._part = io.StringIO(newline="")
            return
        if trainer.is_global_zero:
            remove_dead(self.place.parent.glob(f".{glob.escape(self.place.name)}.*.part*"))
        if self._is_sent(trainer):
            self._part = io.StringIO(newline="")
            return
        self.place.parent.mkdir(parents=True, exist_ok=True)
        # before the file is there: a signal may come between its birth and the next line
        self._has_begun = True
        part = self._part_path(trainer.global_rank)
        create_part(part, self.place)
        self._part = part.open("w", newline="", encoding="utf-8", errors=_NOT_UTF8[self.suffix])
        if self.suffix == ".csv" and trainer.is_global_zero:
            self._part.write(",".join(map(_quoted, self.columns)) + "\n")

    def on_predict_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, *_: Any
    ) -> None:
        assert self._part is not None
        given = trainer.datamodule.splits[self.split]  # type: ignore[attr-defined]
        rows = list(self._rows(outputs, given, pl_module.class_names))  # type: ignore[arg-type]
        self.counts.update(row["class"] for row in rows)  # None for one that can't be read
        self._last, part = rows[-1:] or self._last, self._part
        if not self.is_kept:
            return
        with self._kept(trainer):
            if self.suffix == ".csv":
                # It quotes a field with a carriage return where rows end in one, and there alone.
                lines: Any = SimpleNamespace(write=lambda row: part.write(f"{row[:-2]}\n"))
                csv.DictWriter(lines, self.columns, lineterminator="\r\n").writerows(rows)
            else:
                self._part.writelines(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)

    on_test_batch_end = on_predict_batch_end  # type: ignore[assignment]

    def on_predict_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        assert self._part is not None
        sent = self._part.getvalue() if isinstance(self._part, io.StringIO) else ""
        with self._kept(trainer):
            self._part.close()
        self._part = None
        mine = self.counts, sent, self._last
        everywhere: list[Any] = [mine] * trainer.world_size
        if trainer.world_size > 1:
            # also the barrier after which all parts are whole
            dist.all_gather_object(everywhere, mine)
        if trainer.is_global_zero and self.is_kept:
            others = [] if self.split == "test" else range(1, trainer.world_size)
            with self._kept(trainer, *others):
                parts = [self._part_path(rank) for rank in (0, *others)]
                with parts[0].open(
                    "a", newline="", encoding="utf-8", errors=_NOT_UTF8[self.suffix]
                ) as part:
                    part.writelines(text for _, text, _ in everywhere)
                self._join(parts)
        if trainer.is_global_zero and self.split == "predict":
            rows = [row for *_, last in everywhere for row in last]
            self._summary(sum((counts for counts, *_ in everywhere), Counter()), rows[-1])

    on_test_end = on_predict_end

    def on_exception(self, trainer: pl.Trainer, *_: Any) -> None:
        if self._part is not None:
            with suppress(OSError):  # a full disk takes the rest of the buffer no better now
                self._part.close()
        if self._has_begun:
            self._part_path(trainer.global_rank).unlink(missing_ok=True)

    @contextmanager
    def _kept(self, trainer: pl.Trainer, *others: int) -> Iterator[None]:
        """Keep what this process, or others, have written so far if more can't be."""
        try:
            yield
        except OSError as error:
            self._has_begun = False  # the part is no longer ours to remove
            parts = " ".join(str(self._part_path(rank)) for rank in (trainer.global_rank, *others))
            told = f"{self.target} could not be written: {error.strerror or error}"
            raise OSError(f"{told}; the rows so far are kept in {parts}") from error

    def _rows(
        self, outputs: dict[str, Any], given: Samples, names: Sequence[str]
    ) -> Iterator[dict[str, Any]]:
        probabilities: Tensor = outputs["probabilities"].cpu()
        order = probabilities.argsort(dim=1, descending=True, stable=True).tolist()
        known = zip(probabilities.tolist(), outputs["class"].tolist(), order, strict=True)
        good = dict(zip(outputs["index"].tolist(), known, strict=True))
        errors = dict(outputs["bad"])
        for index in sorted([*good, *errors]):
            row: dict[str, Any] = dict.fromkeys(self.columns) | {"path": given.paths[index]}
            if self.split == "test":
                row["label"] = names[given.targets[index]]
            if index in errors:
                yield row | {"error": errors[index]}
                continue
            values, said, best = good[index]
            # a threshold may say the less probable one
            best = [said, *(k for k in best if k != said)]
            is_sure = values[said] >= self.abstain_below
            row |= {
                "class": names[said] if is_sure else UNSURE,
                "probability": round(values[said], _DIGITS),
            }
            if self.top_k is None:
                row |= {
                    f"p_{name}": round(value, _DIGITS)
                    for name, value in zip(names, values, strict=True)
                }
            else:
                for i in range(2, self.top_k + 1):
                    k = best[i - 1]
                    row |= {f"class_{i}": names[k], f"probability_{i}": round(values[k], _DIGITS)}
            yield row

    def _join(self, parts: list[Path]) -> None:
        if self.suffix == ".parquet":
            with replacing(self.target) as joined:
                write_parquet(joined, parts, self.columns)
        else:
            append_files(parts[0], parts[1:])
            put_in_place(parts[0], self.target)
        for part in parts:
            part.unlink(missing_ok=True)

    def _summary(self, counts: Counter[str | None], row: dict[str, Any]) -> None:
        told = ", ".join(f"{n} {name or 'unreadable'}" for name, n in counts.most_common())
        if counts.total() == 1:  # `row` is of it
            probability = f", probability {row['probability']:.4f}" if row["class"] else ""
            told = f"{shown(row['path'])}: {row['class'] or 'unreadable'}{probability}"
        print(told if counts.total() == 1 else f"{counts.total()} pictures: {told}")
        if not self.is_kept:
            if row["class"] is None:
                raise ValueError(f"the image cannot be read: {row['error']}")
            if others := self._other_classes(row):
                print(f"other classes: {others}", flush=True)
            return
        print(f"predictions in {self.target}", flush=True)
        if counts.total() == counts[None]:
            raise ValueError(f"none of the pictures can be read; {self.target} says why of each")

    def _other_classes(self, row: dict[str, Any]) -> str:
        """Return the classes next to the predicted one with their probabilities, the most probable first."""
        if self.top_k is None:
            named = {name: row[f"p_{name}"] for name in self._names if name != row["class"]}
            best = sorted(named.items(), key=lambda item: -item[1])[:_MOST_PRINTED]
        else:
            best = [(row[f"class_{i}"], row[f"probability_{i}"]) for i in range(2, self.top_k + 1)]
        return ", ".join(f"{shown(name)} {value:.4f}" for name, value in best)

    def _is_sent(self, trainer: pl.Trainer) -> bool:
        """Return whether this process hands its rows to rank 0: a run's folder may be another machine's to write."""
        return self.split == "test" and not trainer.is_global_zero

    def _part_path(self, rank: int) -> Path:
        return self.place.with_name(f".{self.place.name}.{self._token}.part{rank}")


def _quoted(name: str) -> str:
    return '"' + name.replace('"', '""') + '"' if set(name) & set(',"\n') else name
