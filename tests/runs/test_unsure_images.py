"""The least certain images of `predict`: which they are, from one device and several, and the content of the files."""

import csv
import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from urllib.parse import unquote

import pytest
import torch
from data_files import nowhere

from finetune.runs import unsure_images
from finetune.runs.folder import Run
from finetune.runs.unsure_images import UnsureImages
from finetune.system.messages import WrongUsage

NAMES = ["cat", "dog", "größe, 1"]


def module(kind: str = "single"):
    return SimpleNamespace(class_names=NAMES, task=SimpleNamespace(label_kind=kind))


def trainer(paths, rank=0, world_size=1):
    data = SimpleNamespace(splits={"predict": replace(nowhere(len(paths)), paths=paths)})
    return SimpleNamespace(datamodule=data, world_size=world_size, is_global_zero=rank == 0)


def written(output: Path, probabilities, paths, num: int, rank_of=None):
    """Return the rows of the table, from as many ranks as `rank_of` names."""
    ranks = sorted(set(rank_of)) if rank_of else [0]
    callbacks = {
        rank: UnsureImages(Run(str(output.parent), "predict"), str(output), num) for rank in ranks
    }
    for rank, callback in callbacks.items():
        mine = torch.tensor([i for i in range(len(paths)) if not rank_of or rank_of[i] == rank])
        some = trainer(paths, rank, len(ranks))
        callback.on_predict_start(some, module())
        for batch in mine.split(3):
            own = probabilities[batch]
            outputs = {"index": batch, "probabilities": own, "class": own.argmax(dim=1)}
            callback.on_predict_batch_end(some, module(), outputs)
    if len(ranks) > 1:
        parts = [[image for *_, image in callbacks[rank]._least] for rank in ranks]

        def gather(gathered, mine):
            gathered[:] = parts

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(unsure_images.dist, "all_gather_object", gather)
            callbacks[0].on_predict_end(trainer(paths, 0, len(ranks)), module())
    else:
        callbacks[0].on_predict_end(trainer(paths), module())
    table = output.with_name(f"{output.stem}_unsure.csv")
    with table.open(encoding="utf-8", errors="surrogateescape", newline="") as file:
        return list(csv.DictReader(file))


@pytest.fixture
def probabilities():
    generator = torch.Generator().manual_seed(0)
    return torch.randn(20, 3, generator=generator, dtype=torch.float64).softmax(dim=1)


@pytest.mark.parametrize("num", [1, 5, 50])
def test_the_least_probable_ones_in_order(tmp_path, probabilities, num):
    paths = [f"{i}.png" for i in range(20)]
    rows = written(tmp_path / "said.jsonl", probabilities, paths, num)
    best = probabilities.max(dim=1).values
    expected = best.argsort()[:num].tolist()
    assert [row["path"] for row in rows] == [paths[i] for i in expected]
    assert [float(row["probability"]) for row in rows] == [
        round(float(best[i]), 7) for i in expected
    ]
    assert [row["class"] for row in rows] == [
        NAMES[int(probabilities[i].argmax())] for i in expected
    ]


def test_several_devices_write_what_one_does(tmp_path, probabilities):
    probabilities[3:6] = probabilities[3]  # equal ones are in the order of the input
    paths = [f"{i}.png" for i in range(20)]
    one = written(tmp_path / "one.csv", probabilities, paths, 7)
    ranks = [0] * 9 + [1] * 4 + [2] * 7
    assert written(tmp_path / "several.csv", probabilities, paths, 7, ranks) == one


def test_tasks_of_label_studio_name_the_files_and_the_classes(tmp_path, probabilities):
    paths = [str(tmp_path / name) for name in ("a b.png", "\udcff.png", "c#?.png")]
    rows = written(tmp_path / "said.csv", probabilities[:3], paths, 3)
    tasks = json.loads((tmp_path / "said_unsure.json").read_text("utf-8"))
    found = [unquote(task["data"]["image"], errors="surrogateescape") for task in tasks]
    assert found == [f"/data/local-files/?d={row['path'][1:]}" for row in rows]
    assert all(
        "#" not in task["data"]["image"] and " " not in task["data"]["image"] for task in tasks
    )
    for task, row in zip(tasks, rows, strict=True):
        (prediction,) = task["predictions"]
        (result,) = prediction["result"]
        assert result["type"] == "choices" and result["value"] == {"choices": [row["class"]]}
        assert prediction["score"] == float(row["probability"])


def test_what_makes_no_sense_is_refused(tmp_path):
    run = Run(str(tmp_path), "predict")
    with pytest.raises(WrongUsage, match="--unsure must be at least 1, got 0"):
        UnsureImages(run, None, 0)
    with pytest.raises(WrongUsage, match="several labels"):
        UnsureImages(run, None, 1).on_predict_start(trainer(["a"]), module("several"))
