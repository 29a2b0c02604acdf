"""The row of a run comes from its small files; a damaged file still leaves a row."""

import csv
import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from labels_folder import drawn, write_labels_run
from promise import promise
from run_folders import write_run
from run_holders import another

from finetune.runs import run_table as run_table_module
from finetune.runs.headline import headline
from finetune.runs.record import read_run, validation_outcome
from finetune.runs.run_table import as_json, read_row, run_table, size_of
from finetune.runs.statistics import wilson

CORRECT = np.eye(3)[[0, 1, 2, 0, 1, 1]]
LABELS = [0, 1, 2, 0, 1, 2]


@pytest.fixture
def run(tmp_path) -> Path:
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
            first = int(name == "metrics.csv")
            writer.writerows(enumerate(accuracies, start=first))


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


def test_without_a_test_it_is_the_validation_accuracy_of_the_kept_epoch(run):
    # 0.9 is the highest; the last within its standard error, 0.047, is the third
    validated(run, 0.5, 0.9, 0.875, 0.6)
    row = read_row(run)
    assert (row.split, row.num_images, row.accuracy, row.epochs) == ("validation", 40, 0.875, 4)
    assert row.interval == wilson(35, 40)
    assert validation_outcome(read_run(run)).startswith(
        "validation accuracy 87.5 % (35 of 40; 95 % interval 73.9–94.5 %)"
    )


def test_weights_between_start_and_end_have_an_accuracy_of_their_own(run):
    validated(run, 0.5)
    candidates = [
        {"share": share, "loss": 0.5, "accuracy": 0.5 + share / 2} for share in (0, 0.5, 1)
    ]
    kept = {"share": 0.5, "num_images": 40, "candidates": candidates}
    (run / "kept_weights.json").write_text(json.dumps(kept))
    assert read_row(run).accuracy == 0.75
    assert "(30 of 40;" in validation_outcome(read_run(run))


def test_without_a_validation_there_is_no_accuracy(run):
    validated(run, num=0)
    row = read_row(run)
    assert (row.accuracy, row.interval, row.split) == (None, None, "")
    assert validation_outcome(read_run(run)) == ""


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("about.json", "{"),
        ("test.json", "[]"),
        ("test.json", '{"confusion_matrix": 3}'),
        ("test.json", '{"confusion_matrix": [[1], [2]]}'),
        ("test.json", '{"confusion_matrix": [[-3, 0], [0, 4]]}'),
        ("test.json", '{"confusion_matrix": [[5, -1], [0, 4]]}'),
        ("test.json", '{"test/mAP": -3.0, "label_counts": [[[2, 1], [1, 2]]]}'),
        ("test.json", '{"test/mAP": 0.5, "label_counts": [[[-2, 1], [1, 2]]]}'),
        ("seconds.json", '{"training": "long"}'),
        ("seconds.json", '{"training": -5}'),
        ("metrics.csv", "epoch,val/accuracy\n1,-3\n"),
        ("config.yaml", "a: [1"),
        ("metrics.csv", "epoch,val/accuracy\n1,much\n"),
        ("kept_weights.json", '{"share": 0.5}'),
    ],
)
def test_damaged_runs_are_listed_with_what_is_wrong(run, name, text):
    if name in ("metrics.csv", "kept_weights.json"):
        validated(run, 0.5)
    (run / name).write_text(text)
    row = read_row(run)
    assert row.state == "damaged" and str(run) in row.damage and row.network in ("", "resnet18")


def test_states(run):
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
    assert read_row(run).state == "no checkpoint"


def test_order(tmp_path):
    for i, (seconds, right) in enumerate([(30, 4), (10, 6), (20, 5)]):
        share = np.eye(3)[[0, 1, 2, 0, 1, 2][:right] + [(k + 1) % 3 for k in LABELS[right:]]]
        times = {"began": f"2026-01-0{i + 1}T10:00:00+00:00"}
        run = write_run(tmp_path / f"fit/version_{i}", LABELS, share, **times)
        (run / "seconds.json").write_text(json.dumps({"training": seconds}))
    (tmp_path / "fit/version_3").mkdir()
    (tmp_path / "fit/version_3/.lock").touch()

    def order(key: str) -> str:
        return "".join(row.folder[-1] for row in run_table(tmp_path, key))

    assert order("when") == "3210"
    assert order("accuracy") == "1203"
    assert order("seconds") == "0213"
    assert order("folder") == "0123"


def test_linked_files_count_once_and_not_at_all_if_they_stay_elsewhere(tmp_path):
    (tmp_path / "a").mkdir()
    (tmp_path / "a/best").write_bytes(b"x" * 100)
    (tmp_path / "a/last").hardlink_to(tmp_path / "a/best")
    assert size_of([tmp_path / "a"]) == 100
    (tmp_path / "elsewhere").hardlink_to(tmp_path / "a/best")
    assert size_of([tmp_path / "a"]) == 0
    assert size_of([tmp_path]) == 100


@promise("runs")
def test_nothing_is_written_and_torch_is_not_imported(run):
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


def test_several_labels_have_a_mean_average_precision(tmp_path):
    labels, p = drawn()
    run = write_labels_run(tmp_path / "runs/fit/version_0", labels, p)
    record = read_run(run)
    row = read_row(run)
    assert row.metric == "mAP" and row.split == "test" and row.num_images == len(labels)
    assert row.accuracy == record.result["test/mAP"] and row.interval == headline(record).bounds
    plain = json.loads(as_json([row]))[0]
    assert plain["mAP"] == row.accuracy and not {"accuracy", "metric"} & plain.keys()
    # a validation of one epoch: the latest within one standard error of the best
    (run / "test.json").unlink()
    row = read_row(run)
    best = read_run(run).best
    assert (row.split, row.metric, row.num_images) == ("validation", "mAP", len(labels))
    assert row.accuracy == best[1] and best[0] == 2  # 0.7 is more than a standard error below 0.9
    assert row.interval == headline(read_run(run)).bounds
    text = validation_outcome(read_run(run))
    assert text.startswith("validation mAP 0.900 (95 % interval ")
    for content in ('{"label_counts": [[1]]}', '{"label_counts": 3}'):
        (run / "test.json").write_text(content)
        assert "is damaged: " in read_row(run).damage
