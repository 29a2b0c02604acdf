"""One answer for a group of images, such as those of a patient: `test`, `predict`, the report and Python agree."""

import csv
import json
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from colours import NAMES
from labelled_files import LABELS
from promise import control, promise
from scipy.stats import binomtest

from finetune import load
from finetune.training import classifier

QUICK = ("--trainer.accelerator", "cpu", "--workers", "0", "--data.on_bad_image", "skip")
BY_FOLDER = ("--data.group_by", "folder")
ROUNDING = 2e-7  # two units of the last of seven digits: float32 in batches of another order


def rows_of(path: Path | str) -> list[dict[str, str]]:
    with open(path, newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


@pytest.fixture(scope="module")
def items(colours: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Test images of three classes in folders of items: one item is of two classes, others have damaged images."""
    root = tmp_path_factory.mktemp("items")
    for k, name in enumerate(NAMES):
        images = sorted((colours / "test" / name).iterdir())
        other = sorted((colours / "test" / NAMES[k - 1]).iterdir())
        # the last item has more images of another class than of its own, so that its answer is wrong
        parts = {"a": images[:3], "b": images[3:4], "c": [*images[4:6], *other[6:10]]}
        for item, paths in parts.items():
            folder = root / name / f"{item} of {name}"
            folder.mkdir(parents=True)
            for i, path in enumerate(paths):
                # no copy of an image that was seen
                shutil.copy(path, folder / f"{i}.png")
        (root / name / f"a of {name}/torn.png").write_bytes(images[0].read_bytes()[:60])
    for name in NAMES[:2]:
        (root / name / "mixed").mkdir()
        shutil.copy(sorted((colours / "test" / name).iterdir())[9], root / name / "mixed/x.png")
    (root / NAMES[0] / "lost").mkdir()
    (root / NAMES[0] / "lost/torn.png").write_bytes(b"\x89PNG")
    return root


def answers(
    run: Path, root: Path, of_labels: bool = False
) -> Iterator[tuple[str, list[Path], np.ndarray]]:
    """Yield each group with its images and its probabilities, by NumPy from those of the images."""
    model = load(run, "cpu")
    found: dict[str, list[Path]] = {}
    for path in sorted(root.rglob("*.png")):
        found.setdefault(path.parent.name, []).append(path)
    for group, paths in found.items():
        images = model.predict([*map(str, paths)], on_bad_image="skip")
        p = np.array([list(one.probabilities.values()) for one in images])
        if not len(p):
            yield group, paths, p
        elif of_labels:
            yield group, paths, p.max(axis=0)
        else:
            product = np.prod(p ** (1 / len(p)), axis=0)
            yield group, paths, product / product.sum()


def answer_surer_than_the_mean(monkeypatch):
    def surer(outputs, calibration, samples):
        return right(replace(outputs, logits=2 * outputs.logits), calibration, samples)

    right = classifier.group_outputs
    monkeypatch.setattr(classifier, "group_outputs", surer)


@promise("group-answers", controls=[answer_surer_than_the_mean])
def test_group_by_tests_and_predicts_groups_as_numpy_does(fitted_runs, items, cli, capsys):
    run = fitted_runs.single
    cli("test", run, items, *BY_FOLDER, *QUICK)
    printed = capsys.readouterr().out
    rows = {row["group"]: row for row in rows_of("runs/test/version_0/test_group_predictions.csv")}
    result = json.loads(Path("runs/test/version_0/test.json").read_text())["groups"]
    confusion = np.zeros((len(NAMES), len(NAMES)), int)
    expected = list(answers(run, items))
    assert {*rows} == {group for group, _, _ in expected}
    for group, paths, p in expected:
        row = rows[group]
        if group in ("lost", "mixed"):
            assert row["error"] and not row["class"]
            assert row["images"] == str(2 * (group == "mixed"))
            continue
        assert [float(row[f"p_{name}"]) for name in NAMES] == pytest.approx(p, abs=ROUNDING)
        assert row["class"] == NAMES[p.argmax()]
        assert float(row["probability"]) == pytest.approx(p.max(), abs=ROUNDING)
        true = paths[0].parent.parent.name
        assert row["label"] == true
        assert row["images"] == str(sum(path.name != "torn.png" for path in paths))
        confusion[NAMES.index(true), p.argmax()] += 1
    assert result["confusion_matrix"] == confusion.tolist()
    num, right = confusion.sum(), confusion.trace()
    assert 0 < right < num == 9
    assert result["test/accuracy"] == pytest.approx(right / num)
    assert (result["num_mixed"], result["num_unread"]) == (1, 1)
    ends = binomtest(int(right), int(num)).proportion_ci(method="wilson")
    interval = f"{100 * ends.low:.1f}–{100 * ends.high:.1f} %"
    assert f"by group: test accuracy {100 * right / num:.1f} % ({right} of {num} groups" in printed
    assert interval in printed.partition("by group:")[2]
    # the images are listed with their groups
    images = rows_of("runs/test/version_0/test_predictions.csv")
    assert {row["group"] for row in images} == {*rows}
    # the same answers without labels, from folders
    Path("new").mkdir()
    for folder in items.glob("*/*"):
        shutil.copytree(folder, Path("new") / folder.name, dirs_exist_ok=True)
    cli("predict", run, "new", *BY_FOLDER, *QUICK, "--out", "out.csv")
    for row in rows_of("group_out.csv"):
        if row["group"] not in ("lost", "mixed"):
            before = rows[row["group"]]
            assert (row["images"], row["class"]) == (before["images"], before["class"])
            numbers = ("probability", *(f"p_{name}" for name in NAMES))
            now = [float(row[key]) for key in numbers]
            assert now == pytest.approx([float(before[key]) for key in numbers], abs=ROUNDING)
    assert "11 groups" in capsys.readouterr().out
    assert {row["group"] for row in rows_of("out.csv")} == {*rows}


@control("group-answers")
def test_control_the_product_of_probabilities_is_another_answer(fitted_runs, items):
    """A sum of log probabilities, without the mean, would be surer with each image."""
    model = load(fitted_runs.single, "cpu")
    images = model.predict(sorted(map(str, (items / NAMES[0]).glob("a*/[0-9].png"))))
    p = np.array([list(one.probabilities.values()) for one in images])
    mean = np.exp(np.log(p).mean(axis=0))
    product = p.prod(axis=0)
    assert np.abs(mean / mean.sum() - product / product.sum()).max() > 1e-3


@promise("group-answers", controls=[answer_surer_than_the_mean])
def test_a_column_group_gives_labels_that_any_image_has(fitted_runs, cli, capsys):
    """Several labels: the largest probability decides, and the mean is next to it."""
    run = fitted_runs.several
    table = rows_of(fitted_runs.tags / "tags.csv")
    rows = [{**row, "group": f"g{i // 3}"} for i, row in enumerate(table) if row["split"] == "test"]
    for row in rows:
        row["path"] = str(fitted_runs.tags / row["path"])
    write("own.csv", rows)
    cli("test", run, "own.csv", *QUICK)
    cli("predict", run, "own.csv", *QUICK, "--out", "predictions.csv")
    assert "7 groups: " in capsys.readouterr().out  # not the number of their labels
    model = load(run, "cpu")
    images = model.predict([row["path"] for row in rows])
    p = np.array([list(one.probabilities.values()) for one in images])
    of_group = {row["group"]: [] for row in rows}
    for i, row in enumerate(rows):
        of_group[row["group"]].append(i)
    tested = rows_of("runs/test/version_0/test_group_predictions.csv")
    predicted = rows_of("group_predictions.csv")
    thresholds = np.array([*images[0].thresholds.values()])
    counts = np.zeros((len(LABELS), 2, 2), int)
    for row, same, (group, own) in zip(tested, predicted, of_group.items(), strict=True):
        assert row["group"] == same["group"] == group
        true = {label for i in own for label in rows[i]["labels"].split(";") if label}
        assert {*row["labels"].split(";")} - {""} == true
        decided = {
            LABELS[k] for k in np.flatnonzero((p[own] >= thresholds).any(axis=0))
        }  # of any image
        assert {*row["predicted"].split(";")} - {""} == decided
        assert same["labels"] == row["predicted"] and row["images"] == str(len(own))
        for k, name in enumerate(LABELS):
            assert float(row[f"p_{name}"]) == pytest.approx(p[own, k].max(), abs=ROUNDING)
            assert float(row[f"mean_{name}"]) == pytest.approx(p[own, k].mean(), abs=ROUNDING)
            counts[k, int(name in true), int(name in decided)] += 1
    result = json.loads(Path("runs/test/version_0/test.json").read_text())["groups"]
    assert result["label_counts"] == counts.tolist()


def write(path: str, rows: list[dict[str, Any]]) -> None:
    with open(path, "w", newline="") as file:
        writer = csv.DictWriter(file, [*rows[0]])
        writer.writeheader()
        writer.writerows(rows)


def test_groups_of_different_classes_alone_have_no_result(fitted_runs, items, cli, capsys):
    cli("test", fitted_runs.single, items, "--data.group_by", "png", *QUICK)
    assert "by group: no result" in capsys.readouterr().out
    result = json.loads(Path("runs/test/version_0/test.json").read_text())["groups"]
    assert result == {"num_mixed": 1, "num_unread": 0}
    (row,) = rows_of("runs/test/version_0/test_group_predictions.csv")
    assert row["group"] == "png" and row["error"] and not row["label"]
