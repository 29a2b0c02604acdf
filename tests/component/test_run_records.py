"""What a run's small files say: its record, its row in `finetune runs`, its result and its seconds; damage is named."""

import json
import shutil
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from colours import QUICKEST, draw_colours
from labels_folder import drawn, write_labels_run
from promise import promise
from run_folders import write_run
from run_holders import another
from tiny_module import QUIET, Tiny, loader, trainer

from finetune.runs.facts import Facts
from finetune.runs.folder import Run
from finetune.runs.headline import best_of_epoch
from finetune.runs.intervals import wilson
from finetune.runs.metrics_csv import read_metrics
from finetune.runs.record import read_run
from finetune.runs.result_file import read_result, write_result
from finetune.runs.results import Results
from finetune.runs.run_dir import RunDir
from finetune.runs.run_table import as_json, read_row, run_table

pytestmark = QUIET
CORRECT = np.eye(3)[[0, 1, 2, 0, 1, 1]]
LABELS = [0, 1, 2, 0, 1, 2]


@pytest.fixture
def run(tmp_path: Path) -> Path:
    run = write_run(tmp_path / "runs/fit/version_0", LABELS, CORRECT)
    (run / "checkpoints").mkdir()
    (run / "checkpoints/best.ckpt").write_bytes(b"x" * 500)
    return run


def validated(run: Path, value: float, num: int = 40) -> None:
    """Let a run have no test, but this validation of `num` images."""
    (run / "test.json").unlink(missing_ok=True)
    best = best_of_epoch(3, value, value, "val/accuracy", num_images=num, num_trials=num)
    RunDir(run).update(test=None, best=best)


# The row of a run


def forget_the_interval(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Facts, "result", None)


@promise("runs", controls=[forget_the_interval])
def test_a_row_of_a_tested_run(run):
    RunDir(run).update(ended="2026-01-01T10:00:00+00:00")
    row = read_row(RunDir(run))
    assert row.state == "finished" and row.result is not None
    assert (row.result.split, row.result.num_images) == ("test", 6)
    assert row.result.value == 5 / 6 and (row.result.low, row.result.high) == wilson(5, 6)
    assert (row.data, row.network, row.seconds) == ("photos", "resnet18", 13.5)
    assert row.command == "finetune fit --config a.yaml" and row.damage == ""
    assert row.size == sum(file.stat().st_size for file in run.rglob("*") if file.is_file())


def test_a_row_without_a_test_has_the_validation_of_the_kept_epoch(run):
    validated(run, 0.875)
    row = read_row(RunDir(run))
    assert row.epochs == 3 and row.result == read_run(run).facts.result
    assert row.result.line == "validation accuracy 87.5 % (35 of 40; 95 % interval 73.9–94.5 %)"
    assert "epoch 3" in row.result.comment
    RunDir(run).update(best=None)
    row = read_row(RunDir(run))
    assert row.result is None and row.as_plain()["accuracy"] is None
    assert "nothing was validated" in read_run(run).headline_text


def test_a_damaged_run_is_listed_with_what_is_wrong(run):
    (run / "run.json").write_text('{"finetune": "0.1.0", "seconds": "long"}')
    row = read_row(RunDir(run))
    assert row.state == "damaged" and str(run) in row.damage and "seconds" in row.damage


def test_the_states_of_a_run(run):
    last = run / "checkpoints/last.ckpt"
    assert RunDir(run).state == "unfinished"  # killed before its first last.ckpt
    last.touch()
    RunDir(run).update(ended="2026-01-01T10:00:00+00:00")
    assert RunDir(run).state == "finished"
    last.unlink()
    (run / "checkpoints/best.ckpt").unlink()
    assert RunDir(run).state == "no checkpoint"
    process = another(run)
    try:
        assert process.stdout is not None and process.stdout.readline() == "held\n"
        assert RunDir(run).state == "running"
    finally:
        process.communicate()


def test_the_order_of_runs(tmp_path):
    for i, (seconds, right) in enumerate([(30, 4), (10, 6), (20, 5)]):
        share = np.eye(3)[[0, 1, 2, 0, 1, 2][:right] + [(k + 1) % 3 for k in LABELS[right:]]]
        facts = {"began": f"2026-01-0{i + 1}T10:00:00+00:00", "seconds": seconds}
        write_run(tmp_path / f"fit/version_{i}", LABELS, share, **facts)
    Run(tmp_path, "fit").choose()
    orders = {"when": "3210", "accuracy": "1203", "seconds": "0213", "folder": "0123"}
    for key, expected in orders.items():
        assert "".join(row.folder[-1] for row in run_table(tmp_path, key)) == expected


@promise("runs")
def test_runs_writes_nothing_and_does_not_import_torch(run):
    before = {path: path.stat().st_mtime_ns for path in run.parent.rglob("*")}
    script = (
        "import sys; from finetune.cli import run; run(['runs', sys.argv[1], '--json']);"
        "print([name for name in ('torch', 'pytorch_lightning') if name in sys.modules], file=sys.stderr)"
    )
    result = subprocess.run(
        [sys.executable, "-c", script, run.parents[1]], capture_output=True, text=True, check=True
    )
    assert result.stderr.strip() == "[]"
    assert json.loads(result.stdout) == json.loads(as_json(run_table(run.parents[1])))
    assert {path: path.stat().st_mtime_ns for path in run.parent.rglob("*")} == before


def test_a_row_of_several_labels_has_a_mean_average_precision(tmp_path):
    labels, p = drawn()
    run = write_labels_run(tmp_path / "runs/fit/version_0", labels, p)
    row = read_row(RunDir(run))
    record = read_run(run)
    assert row.result == record.facts.result and row.result.metric == "mAP"
    assert (row.result.split, row.result.num_images) == ("test", len(labels))
    assert row.result.value == record.result["test/mAP"]
    plain = json.loads(as_json([row]))[0]
    assert plain["mAP"] == row.result.value and not {"accuracy", "metric"} & plain.keys()
    RunDir(run).update(test=None)
    result = read_row(RunDir(run)).result
    assert str(result).startswith("validation mAP 0.900") and result.num_images == len(labels)


def test_the_table_of_200_runs_is_read_at_once(tmp_path):
    first = write_run(tmp_path / "fit/version_0", LABELS, CORRECT)
    for i in range(1, 200):
        shutil.copytree(first, tmp_path / f"fit/version_{i}")
    began = time.monotonic()
    assert len(run_table(tmp_path)) == 200
    assert time.monotonic() - began < 2


# Results


@pytest.mark.parametrize(("split", "accuracy"), [("test", 0.9375), ("val", 0.75)])
def test_a_result_is_printed_and_written(tmp_path, capsys, split, accuracy):
    run = Run(tmp_path, split)
    run.choose()
    measure = trainer(tmp_path, Results(run))
    (measure.test if split == "test" else measure.validate)(Tiny(), loader(), verbose=False)
    output = capsys.readouterr().out
    assert f"{split}/accuracy {accuracy:.4f}\n" in output and "87.5 % (7 of 8; " in output
    written = json.loads(run.file(f"{split}.json").read_text())
    assert written[f"{split}/accuracy"] == pytest.approx(accuracy)
    assert written["class_names"] == ["a", "b"] and written["confusion_matrix"] == [[3, 1], [0, 4]]


def test_the_result_of_many_classes_does_not_grow_with_their_square(tmp_path):
    matrix = np.zeros((1200, 1200), int)
    rng = np.random.default_rng(0)
    np.add.at(matrix, (rng.integers(1200, size=6000), rng.integers(1200, size=6000)), 1)
    names = [f"c{i}" for i in range(1200)]
    result = {"test/accuracy": 0.5, "class_names": names, "confusion_matrix": matrix.tolist()}
    path = tmp_path / "test.json"
    write_result(path, {**result, "test_folder": {"cooccurrence": matrix.tolist()}})
    assert path.stat().st_size < 1_000_000
    read = read_result(path)
    assert read.pop("test_folder")["cooccurrence"] == matrix.tolist() and read == result
    few = {"class_names": ["a", "b"], "confusion_matrix": [[1, 2], [3, 4]]}
    write_result(path, few)
    assert json.loads(path.read_text()) == few == read_result(path)


@pytest.mark.parametrize(
    "table",
    [
        *({"confusion_matrix": [[1, 2]]}, {"confusion_matrix": [[1, 2], [3]]}),
        *({"confusion_matrix": [[1, 2], [3, -4]]}, {"confusion_cells": [[0, 7, 1]]}),
        *({"label_counts": [[1, 2], [3, 4]]}, {"label_counts": [[[1, 2], [3, 4]]]}),
        *({"calibration": {"scale": "x"}}, {"test/accuracy": "high"}),
        *({"test/average_precision/a": 1.5}, {"test/mAP": -0.1}, {"mAP_interval": [0, 7]}),
        *({"folds": [{"num_images": 2, "num_right": 3}]}, {"folds": [{"mAP": 1.5}]}),
        *({"class_names": 2}, {"test_folder": {"confusion_matrix": [[1]]}}, {"test_folder": 1}),
    ],
    ids=str,
)
def test_a_damaged_result_is_named(tmp_path, table):
    path = tmp_path / "test.json"
    path.write_text(json.dumps({"class_names": ["a", "b"], **table}))
    with pytest.raises(ValueError, match=r"test\.json is damaged"):
        read_result(path)


def test_numbers_of_a_class_without_images_are_null_and_empty(cli, tmp_path):
    images = draw_colours(tmp_path / "data", train=20, val=10, test=10)
    for split in ("val", "test"):
        shutil.rmtree(images / split / "green")
    cli("fit", images, *QUICKEST)
    folder = tmp_path / "runs/fit/version_0"
    text = (folder / "test.json").read_text()
    result = json.loads(text, parse_constant=lambda name: pytest.fail(name))
    matrix = np.array(result["confusion_matrix"])
    assert matrix.sum(axis=1).tolist() == [10, 0, 10] and result["test/recall/green"] is None
    with np.errstate(invalid="ignore"):
        f1 = 2 * matrix.diagonal() / (matrix.sum(axis=0) + matrix.sum(axis=1))
    assert result["test/f1"] == pytest.approx(f1[[0, 2]].mean())
    for name, num_predicted in zip(("blue", "green", "red"), matrix.sum(axis=0), strict=True):
        assert (result[f"test/precision/{name}"] is None) == (num_predicted == 0)
    for row in read_metrics(folder / "metrics.csv"):
        assert row["val/recall/green"] == "" and float(row["val/recall/red"]) >= 0
    assert "nan" not in (folder / "steps.csv").read_text()
