"""The least certain images of `predict`, to label them: as a table, and as tasks of Label Studio."""

import csv
import heapq
import json
import os
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import quote

import pytorch_lightning as pl
import torch.distributed as dist

from finetune.runs.folder import Run
from finetune.runs.predictions import FILES
from finetune.system.files import check_target, replace_text, replacing
from finetune.system.messages import WrongUsage, counted

COLUMNS = ("path", "class", "probability")
_DIGITS = 7


class UnsureImage(NamedTuple):
    """The prediction for an image. The least certain one is the smallest, and of equal ones the first."""

    probability: float
    row: int  # in the order of the input
    path: str
    predicted: str


class UnsureImages(pl.Callback):
    """Writes the images whose predicted class is least probable, least certain first.

    The files are next to the predictions: `predictions_unsure.csv` and `predictions_unsure.json`. The second one can be
    imported into Label Studio, where the predicted classes are pre-annotations. The files do not depend on the number
    of devices. Images that cannot be decoded are skipped.

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
        self._least: list[tuple[float, int, UnsureImage]] = []  # a heap, the most certain one first
        if output:
            for suffix in (".csv", ".json"):
                check_target(_target(Path(output), suffix), "--unsure")

    def on_predict_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        module: Any = pl_module
        if module.task.label_kind != "single":
            raise WrongUsage(
                "--unsure needs one class per image, and these images have several labels"
            )

    def on_predict_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, *_: Any
    ) -> None:
        names: Any = pl_module.class_names
        paths = trainer.datamodule.splits["predict"].paths  # type: ignore[attr-defined]
        predicted = outputs["class"].cpu()
        probabilities = outputs["probabilities"].cpu().gather(1, predicted[:, None])[:, 0]
        for index, number, probability in zip(
            outputs["index"].tolist(), predicted.tolist(), probabilities.tolist(), strict=True
        ):
            image = UnsureImage(round(probability, _DIGITS), index, paths[index], names[number])
            heapq.heappush(self._least, (-image.probability, -index, image))
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
        # a set, because without other ranks all parts are the same one
        least = sorted({image for part in gathered for image in part})[: self.num]
        predictions = Path(self.output) if self.output else self.run.file(FILES["predict"])
        table = _target(predictions, ".csv")
        _write_table(table, least)
        replace_text(_target(predictions, ".json"), json.dumps(as_tasks(least), indent=1) + "\n")
        print(f"{counted(len(least), 'least certain image')} in {table}", flush=True)


def _target(predictions: Path, suffix: str) -> Path:
    return predictions.with_name(f"{predictions.stem}_unsure{suffix}")


def _write_table(target: Path, images: list[UnsureImage]) -> None:
    with (
        replacing(target) as temporary,
        temporary.open("w", newline="", encoding="utf-8", errors="surrogateescape") as file,
    ):
        rows = csv.writer(file, lineterminator="\n")
        rows.writerow(COLUMNS)
        rows.writerows((image.path, image.predicted, image.probability) for image in images)


def as_tasks(images: list[UnsureImage]) -> list[dict[str, Any]]:
    """Return images as tasks for the import of Label Studio, which finds local files below its document root.

    The root is expected to be `/` (LABEL_STUDIO_LOCAL_FILES_DOCUMENT_ROOT).
    """
    return [
        {
            "data": {"image": f"/data/local-files/?d={_below_root(image.path)}"},
            "predictions": [
                {
                    "model_version": "finetune",
                    "score": image.probability,
                    "result": [
                        {
                            "from_name": "label",
                            "to_name": "image",
                            "type": "choices",
                            "value": {"choices": [image.predicted]},
                        }
                    ],
                }
            ],
        }
        for image in images
    ]


def _below_root(path: str) -> str:
    return quote(os.fsencode(os.path.abspath(path)).lstrip(b"/"))
