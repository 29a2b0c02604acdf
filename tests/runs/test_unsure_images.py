"""The least certain images of `predict`: which they are, from one device and several, and the content of the files."""

import csv
import json
import math
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


THRESHOLDS = (0.5, 0.2, 0.9)


def module(kind: str = "single"):
    calibration = SimpleNamespace(thresholds=THRESHOLDS)
    task = SimpleNamespace(label_kind=kind)
    return SimpleNamespace(class_names=NAMES, task=task, calibration=calibration)


def decided(probabilities, kind: str):
    if kind == "single":
        return probabilities.argmax(dim=1)
    return probabilities >= torch.tensor(THRESHOLDS)


def trainer(paths, rank=0, world_size=1):
    data = SimpleNamespace(splits={"predict": replace(nowhere(len(paths)), paths=paths)})
    return SimpleNamespace(datamodule=data, world_size=world_size, is_global_zero=rank == 0)


def written(output: Path, probabilities, paths, num: int, rank_of=None, kind: str = "single"):
    """Return the rows of the table, from as many ranks as `rank_of` names."""
    ranks = sorted(set(rank_of)) if rank_of else [0]
    callbacks = {
        rank: UnsureImages(Run(str(output.parent), "predict"), str(output), num) for rank in ranks
    }
    for rank, callback in callbacks.items():
        mine = torch.tensor([i for i in range(len(paths)) if not rank_of or rank_of[i] == rank])
        some = trainer(paths, rank, len(ranks))
        callback.on_predict_start(some, module(kind))
        for batch in mine.split(3):
            own = probabilities[batch]
            outputs = {"index": batch, "probabilities": own, "class": decided(own, kind)}
            callback.on_predict_batch_end(some, module(kind), outputs)
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


@pytest.mark.parametrize("kind", ["single", "several"])
def test_several_devices_write_what_one_does(tmp_path, probabilities, kind):
    probabilities[3:6] = probabilities[3]  # equal ones are in the order of the input
    paths = [f"{i}.png" for i in range(20)]
    one = written(tmp_path / "one.csv", probabilities, paths, 7, kind=kind)
    ranks = [0] * 9 + [1] * 4 + [2] * 7
    several = written(tmp_path / "several.csv", probabilities, paths, 7, ranks, kind)
    assert several == one and len(one) == 7
    of_files = [(tmp_path / f"{name}_unsure.json").read_bytes() for name in ("one", "several")]
    assert of_files[0] == of_files[1]


def test_several_labels_are_in_the_order_of_their_least_certain_label(tmp_path, probabilities):
    paths = [f"{i}.png" for i in range(20)]
    rows = written(tmp_path / "said.csv", probabilities, paths, 20, kind="several")

    def odds_from_threshold(i: int) -> float:
        """The factor between the odds of the least certain label and those of its threshold."""
        factors = [
            p / (1 - p) / (t / (1 - t))
            for p, t in zip(probabilities[i].tolist(), THRESHOLDS, strict=True)
        ]
        return min(max(factor, 1 / factor) for factor in factors)

    expected = sorted(range(20), key=odds_from_threshold)
    assert [row["path"] for row in rows] == [paths[i] for i in expected]
    # the control: the distance of the probabilities themselves would be another order
    distance = (probabilities - torch.tensor(THRESHOLDS)).abs().amin(dim=1)
    assert distance.argsort().tolist() != expected
    # the columns are those of the predictions
    assert list(rows[0]) == ["path", "labels", *(f"p_{name}" for name in NAMES), "error"]
    tasks = json.loads((tmp_path / "said_unsure.json").read_text("utf-8"))
    for row, i, task in zip(rows, expected, tasks, strict=True):
        p = probabilities[i].tolist()
        labels = [name for k, name in enumerate(NAMES) if p[k] >= THRESHOLDS[k]]
        assert row["labels"] == ";".join(labels)
        assert [float(row[f"p_{name}"]) for name in NAMES] == [round(value, 7) for value in p]
        (prediction,) = task["predictions"]
        chosen = [result["value"]["choices"] for result in prediction["result"]]
        assert chosen == ([labels] if labels else [])
        factor = odds_from_threshold(i)
        assert prediction["score"] == pytest.approx(factor / (1 + factor), abs=1e-6)
    assert {"", "cat;dog"} <= {row["labels"] for row in rows}


def test_both_sides_of_a_threshold_count_alike_and_certain_ones_are_finite():
    thresholds = [0.2, 0.8]
    below = torch.tensor([[1 / 13, 1.0]])  # a third of the odds 1/4
    above = torch.tensor([[3 / 7, 0.0]])  # three times as much
    for probabilities in (below, above):
        found = unsure_images.label_certainty(probabilities.double(), thresholds)
        assert float(found[0]) == pytest.approx(0.75, abs=1e-6)
    extreme = unsure_images.label_certainty(torch.tensor([[0.0, 1.0], [0.2, 1.0]]), thresholds)
    assert float(extreme[0]) > 0.999 and float(extreme[1]) == pytest.approx(0.5, abs=1e-6)
    # a threshold may be 0 or 1
    certain = unsure_images.label_certainty(torch.tensor([[1.0, 1.0]]), [0.0, 1.0])
    assert math.isfinite(float(certain[0])) and float(certain[0]) == 0.5


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
