"""The least certain images of `predict`, to label them: as a table, and as tasks of Label Studio."""

import csv
import heapq
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import quote

import pytorch_lightning as pl
import torch.distributed as dist
from torch import Tensor

from finetune.runs.folder import Run
from finetune.runs.prediction_rows import DIGITS, LabelRows, Row
from finetune.runs.predictions import FILES
from finetune.system.files import check_target, replace_text, replacing
from finetune.system.messages import WrongUsage, counted

COLUMNS = ("path", "class", "probability")  # of images with one class
_TINY = 1e-12

# Shapes: B images, K classes.


class UnsureImage(NamedTuple):
    """The prediction for an image.

    Attributes:
        certainty: The probability of the predicted class; of several labels the result of `label_certainty`.
        position: Index of the image in the input.
        row: Its row in the table.
    """

    certainty: float
    position: int
    row: Row

    @property
    def predicted(self) -> list[str]:
        """The predicted labels, or the only predicted class."""
        return self.row["labels"] if "labels" in self.row else [self.row["class"]]


class UnsureImages(pl.Callback):
    """Writes the images whose predicted class, or whose least certain label, is least certain, in this order.

    The files are next to the predictions: `predictions_unsure.csv` and `predictions_unsure.json`. The second one can be
    imported into Label Studio, where the predicted classes or labels are pre-annotations. The files do not depend on
    the number of devices. Images that cannot be decoded are skipped.

    Args:
        run: The run.
        output: The file of the predictions, if it is not in the folder of the run.
        num: Number of images.
    """

    def __init__(self, run: Run, output: str | None, num: int) -> None:
        if num < 1:
            raise WrongUsage(f"--unsure must be at least 1, got {num}")
        self.run = run
        self.output = output
        self.num = num
        self._rows_of: LabelRows | None = None  # None for one class per image
        # a heap, the most certain one first
        self._least: list[tuple[float, int, UnsureImage]] = []
        if output:
            for suffix in (".csv", ".json"):
                check_target(_target(Path(output), suffix), "--unsure")

    def on_predict_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        module: Any = pl_module
        if module.task.label_kind == "several":
            self._rows_of = LabelRows(module.class_names, "predict", module.calibration.thresholds)

    def on_predict_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, *_: Any
    ) -> None:
        names: Any = pl_module.class_names
        paths = trainer.datamodule.splits["predict"].paths  # type: ignore[attr-defined]
        decided = outputs["class"].cpu()
        probabilities = outputs["probabilities"].cpu()
        if self._rows_of is None:
            certainty = probabilities.gather(1, decided[:, None])[:, 0]
        else:
            thresholds = list(self._rows_of.thresholds.values())
            certainty = label_certainty(probabilities, thresholds)
        for i, index in enumerate(outputs["index"].tolist()):
            value = round(float(certainty[i]), DIGITS)
            if len(self._least) == self.num and (-value, -index) < self._least[0][:2]:
                continue
            row: Row = {"path": paths[index]}
            if self._rows_of is None:
                row |= {"class": names[int(decided[i])], "probability": value}
            else:
                row |= self._rows_of.predictions(probabilities[[i]], decided[[i]])[0]
            heapq.heappush(self._least, (-value, -index, UnsureImage(value, index, row)))
            if len(self._least) > self.num:
                heapq.heappop(self._least)

    def on_predict_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        mine = [image for *_, image in self._least]
        gathered: list[Any] = [mine] * trainer.world_size
        if trainer.world_size > 1:
            dist.all_gather_object(gathered, mine)
        is_kept = self.output is not None or self.run.path is not None
        if not trainer.is_global_zero or not is_kept:
            return
        # by index, because without other ranks all parts are the same one
        images = {image.position: image for part in gathered for image in part}
        least = sorted(images.values(), key=lambda image: image[:2])[: self.num]
        predictions = Path(self.output) if self.output else self.run.file(FILES["predict"])
        table = _target(predictions, ".csv")
        self._write_table(table, least)
        replace_text(_target(predictions, ".json"), json.dumps(as_tasks(least), indent=1) + "\n")
        print(f"{counted(len(least), 'least certain image')} in {table}", flush=True)

    def _write_table(self, target: Path, images: list[UnsureImage]) -> None:
        columns = COLUMNS if self._rows_of is None else self._rows_of.columns
        with (
            replacing(target) as temporary,
            temporary.open("w", newline="", encoding="utf-8", errors="surrogateescape") as file,
        ):
            table = csv.DictWriter(file, columns, lineterminator="\n")
            table.writeheader()
            for image in images:
                table.writerow(self._rows_of.as_text(image.row) if self._rows_of else image.row)


def _target(predictions: Path, suffix: str) -> Path:
    return predictions.with_name(f"{predictions.stem}_unsure{suffix}")


def label_certainty(probabilities: Tensor, thresholds: Sequence[float]) -> Tensor:
    """Return how certain the least certain label of each image is, from 1/2 to 1, (B,) in float64.

    The distance of a probability from its threshold is the difference of their log odds, so that both sides of the
    threshold count alike. The certainty is the sigmoid of this distance: 1/2 at the threshold. With a threshold of 1/2
    it is the probability that the decision is right.

    Args:
        probabilities: Calibrated probability of each label, (B, K).
        thresholds: The probability from which an image has a label, K.
    """
    p = probabilities.double()
    distance = (p.logit(_TINY) - p.new_tensor(thresholds).logit(_TINY)).abs()
    return distance.amin(dim=1).sigmoid()


def as_tasks(images: list[UnsureImage]) -> list[dict[str, Any]]:
    """Return images as tasks for the import of Label Studio, which finds local files below its document root.

    The root is expected to be `/` (LABEL_STUDIO_LOCAL_FILES_DOCUMENT_ROOT).
    """
    return [
        {
            "data": {"image": f"/data/local-files/?d={_below_root(image.row['path'])}"},
            "predictions": [
                {
                    "model_version": "finetune",
                    "score": image.certainty,
                    "result": _choices(image.predicted),
                }
            ],
        }
        for image in images
    ]


def _choices(predicted: list[str]) -> list[dict[str, Any]]:
    """Return the choices of an image as Label Studio's result: an empty one if nothing is chosen."""
    if not predicted:
        return []
    return [
        {
            "from_name": "label",
            "to_name": "image",
            "type": "choices",
            "value": {"choices": predicted},
        }
    ]


def _below_root(path: str) -> str:
    return quote(os.fsencode(os.path.abspath(path)).lstrip(b"/"))
