"""What a run's small files say: its record, its row in `finetune runs`, its result and its seconds; damage is named."""

import csv
import json
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from colours import QUICKEST, draw_colours
from labels_folder import drawn, write_labels_run
from promise import promise
from run_folders import write_run
from run_holders import another
from tiny_module import QUIET, Tiny, loader, trainer

from finetune.runs import run_table as run_table_module
from finetune.runs.folder import Run
from finetune.runs.headline import headline
from finetune.runs.metrics_csv import read_metrics
from finetune.runs.record import read_run, validation_outcome
from finetune.runs.result_file import read_result, write_result
from finetune.runs.results import Results
from finetune.runs.run_table import as_json, read_row, run_table
from finetune.runs.statistics import wilson

pytestmark = QUIET
CORRECT = np.eye(3)[[0, 1, 2, 0, 1, 1]]
LABELS = [0, 1, 2, 0, 1, 2]


@pytest.fixture
def run(tmp_path: Path) -> Path:
    run = write_run(tmp_path / "runs/fit/version_0", LABELS, CORRECT)
    (run / "checkpoints").mkdir()
    (run / "checkpoints/best.ckpt").write_bytes(b"x" * 500)
    return run


def validated(run: Path, *accuracies: float, num: int = 40) -> None:
    """Let a run have no test, but these validations of `num` images."""
    (run / "test.json").unlink(missing_ok=True)
    about = json.loads((run / "about.json").read_text())
    about["splits"]["val"] = {"origin": "", "counts": {"a": num // 2, "b": num - num // 2}}
    (run / "about.json").write_text(json.dumps(about))
    for name in ("metrics.csv", "steps.csv"):
        with open(run / name, "w", newline="") as file:
            writer = csv.writer(file, lineterminator="\n")
            writer.writerow(["epoch", "val/accuracy"])
            writer.writerows(enumerate(accuracies, start=int(name == "metrics.csv")))


# The row of a run


def forget_the_interval(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_table_module, "wilson", lambda num_right, num: (0.0, 1.0))


@promise("runs", controls=[forget_the_interval])
def test_a_row_of_a_tested_run(run):
    row = read_row(run)
    assert (row.state, row.split, row.num_images) == ("finished", "test", 6)
    assert row.accuracy == 5 / 6 and row.interval == wilson(5, 6)
    assert (row.data, row.network, row.seconds) == ("photos", "resnet18", 13.5)
    assert row.command == "finetune fit --config a.yaml" and row.damage == ""
    assert row.size == sum(file.stat().st_size for file in run.rglob("*") if file.is_file())


def test_a_row_without_a_test_has_the_validation_of_the_kept_epoch(run):
    # 0.9 is the highest; the last within its standard error, 0.047, is the third
    validated(run, 0.5, 0.9, 0.875, 0.6)
    row = read_row(run)
    assert (row.split, row.num_images, row.accuracy, row.epochs) == ("validation", 40, 0.875, 4)
    assert row.interval == wilson(35, 40)
    assert "87.5 % (35 of 40; 95 % interval 73.9–94.5 %)" in validation_outcome(read_run(run))
    # weights between the start and the end have an accuracy of their own
    candidates = [{"share": at, "loss": 0.5, "accuracy": 0.5 + at / 2} for at in (0, 0.5, 1)]
    kept = {"share": 0.5, "num_images": 40, "candidates": candidates}
    (run / "kept_weights.json").write_text(json.dumps(kept))
    assert read_row(run).accuracy == 0.75 and "(30 of 40;" in validation_outcome(read_run(run))
    validated(run, num=0)
    row = read_row(run)
    assert (row.accuracy, row.interval, row.split) == (None, None, "")


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("about.json", "{"),
        ("test.json", "[]"),
        ("test.json", '{"confusion_matrix": [[-3, 0], [0, 4]]}'),
        ("test.json", '{"test/mAP": 0.5, "label_counts": [[[-2, 1], [1, 2]]]}'),
        ("seconds.json", '{"training": "long"}'),
        ("seconds.json", '{"training": -5}'),
        ("config.yaml", "a: [1"),
        ("metrics.csv", "epoch,val/accuracy\n1,much\n"),
        ("kept_weights.json", '{"share": 0.5}'),
    ],
)
def test_a_damaged_run_is_listed_with_what_is_wrong(run, name, text):
    if name in ("metrics.csv", "kept_weights.json"):
        validated(run, 0.5)
    (run / name).write_text(text)
    row = read_row(run)
    assert row.state == "damaged" and str(run) in row.damage and row.network in ("", "resnet18")


def test_the_states_of_a_run(run):
    (run / "test.json").unlink()
    last = run / "checkpoints/last.ckpt"
    about = json.loads((run / "about.json").read_text())
    assert read_row(run).state == "unfinished"  # killed before its first last.ckpt
    last.touch()
    (run / "about.json").write_text(json.dumps({**about, "ended": "2026-01-01T10:00:00+00:00"}))
    assert read_row(run).state == "finished"
    last.unlink()
    (run / "checkpoints/best.ckpt").unlink()
    assert read_row(run).state == "no checkpoint"
    process = another(run)
    try:
        assert process.stdout is not None and process.stdout.readline() == "held\n"
        assert read_row(run).state == "running"
    finally:
        process.communicate()


def test_the_order_of_runs(tmp_path):
    for i, (seconds, right) in enumerate([(30, 4), (10, 6), (20, 5)]):
        share = np.eye(3)[[0, 1, 2, 0, 1, 2][:right] + [(k + 1) % 3 for k in LABELS[right:]]]
        times = {"began": f"2026-01-0{i + 1}T10:00:00+00:00"}
        run = write_run(tmp_path / f"fit/version_{i}", LABELS, share, **times)
        (run / "seconds.json").write_text(json.dumps({"training": seconds}))
    (tmp_path / "fit/version_3").mkdir()
    (tmp_path / "fit/version_3/.lock").touch()
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
    row = read_row(run)
    assert (row.metric, row.split, row.num_images) == ("mAP", "test", len(labels))
    assert row.accuracy == read_run(run).result["test/mAP"]
    assert row.interval == headline(read_run(run)).bounds
    plain = json.loads(as_json([row]))[0]
    assert plain["mAP"] == row.accuracy and not {"accuracy", "metric"} & plain.keys()
    (run / "test.json").unlink()
    row = read_row(run)
    best = read_run(run).best
    assert (row.split, row.metric, row.num_images) == ("validation", "mAP", len(labels))
    assert row.accuracy == best[1] and best[0] == 2  # 0.7 is more than a standard error below 0.9
    assert row.interval == headline(read_run(run)).bounds
    assert "validation mAP 0.900" in validation_outcome(read_run(run))


# The record of a run


@pytest.mark.parametrize(("limit", "epoch"), [(None, 2), (2, 3), (0.05, 3)])
def test_the_best_epoch_is_by_the_images_that_were_measured(run, limit, epoch):
    """0.7 and 0.68 differ significantly on 4,000 images, and do not on 200."""
    values = (0.5, 0.7, 0.68)
    rows = [{"epoch": str(i), "val/accuracy": str(value)} for i, value in enumerate(values)]
    about = {"splits": {"val": {"counts": {"a": 3000, "b": 1000}}}}
    config = {"trainer": {"limit_val_batches": limit}, "data": {"init_args": {"batch_size": 100}}}
    record = replace(read_run(run), metrics=rows, about=about, config=config)
    assert record.best == (epoch, values[epoch - 1])


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


# seconds.json
