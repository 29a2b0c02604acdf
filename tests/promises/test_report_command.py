"""`finetune report` and the files of a fit that it reads; the page itself: test_report_pages.py."""

import csv
import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from colours import NAMES, QUICKEST

CPU = ("--trainer.accelerator", "cpu", "--workers", 0)


def test_a_fit_with_report_leaves_what_the_page_is_made_of(finished, predicted):
    names = {path.name for path in finished.iterdir()}
    assert {"report.html", "seconds.json", "augmented.webp"} <= names
    about = json.loads((finished / "about.json").read_text())
    counts = [sum(about["splits"][split]["counts"].values()) for split in ("train", "val", "test")]
    assert counts == [56, 4, 30] and about["command"].startswith("finetune fit ")
    with open(finished / "test_predictions.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    assert [row["path"] for row in rows] == sorted(predicted)
    found = [[float(row[f"p_{name}"]) for name in NAMES] for row in rows]
    np.testing.assert_allclose(found, [predicted[row["path"]] for row in rows], atol=1e-5)
    right = sum(row["label"] == row["class"] == row["path"].split("/")[-2] for row in rows)
    assert json.loads((finished / "test.json").read_text())["test/accuracy"] == right / 30


def test_report_of_a_run_that_was_copied_and_in_another_file(finished, cli, capsys, tmp_path):
    moved = shutil.copytree(finished, tmp_path / "moved")
    (moved / "report.html").unlink()
    cli("report", moved, "--out", "new/page.html")
    assert not (moved / "report.html").exists()
    cli("report", moved)
    out = capsys.readouterr().out
    assert "of 30; 95 % interval" in out and out.endswith(f"report in {moved}/report.html\n")
    pages = [tmp_path / "new/page.html", moved / "report.html"]
    assert all(page.read_text("utf-8").count("data:image/webp") > 30 for page in pages)


@pytest.mark.slow
def test_report_of_a_fit_with_relative_paths_from_another_folder(
    cli, colours, monkeypatch, tmp_path
):
    monkeypatch.chdir(colours.parent)
    cli("fit", colours.name, *QUICKEST, "--out", tmp_path / "runs")
    monkeypatch.chdir(tmp_path)
    cli("report", "runs/fit/version_0")
    text = Path("runs/fit/version_0/report.html").read_text("utf-8")
    assert text.count("data:image/webp") > 30 and "images are not shown" not in text


@pytest.mark.slow
def test_report_of_a_test_with_relative_paths_from_another_folder(
    finished, cli, colours, monkeypatch, tmp_path
):
    """There, the same relative paths lead to another checkpoint and other images, or to none."""
    (tmp_path / "a").mkdir()
    monkeypatch.chdir(tmp_path / "a")
    Path("photos").symlink_to(colours)
    shutil.copy(finished / "checkpoints/best.ckpt", "some.ckpt")
    cli("test", "some.ckpt", "photos", "--out", "runs", *CPU)
    run = Path("runs/test/version_0").absolute()
    (tmp_path / "b/photos").mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "b")
    Path("some.ckpt").write_text("another network")
    cli("report", run)
    page = (run / "report.html").read_text("utf-8")
    assert page.count("data:image/webp") > 5 and "images are not shown" not in page
    # A relative path whose folder is unknown.
    result = json.loads((run / "test.json").read_text())
    (run / "test.json").write_text(json.dumps({**result, "checkpoint": "some.ckpt"}))
    cli("report", run)
    assert "checkpoint that predicted them is missing" in (run / "report.html").read_text("utf-8")


def test_a_report_that_cannot_be_written_takes_nothing_from_the_run(
    cli, colours, monkeypatch, capsys, tmp_path, caplog
):
    def fails(*_: object, **__: object) -> None:
        raise RuntimeError("a library's own")

    monkeypatch.setattr("finetune.commands.report.write_report", fails)
    cli("fit", colours, *QUICKEST, "--report", "true")
    said = caplog.text + capsys.readouterr().err
    assert "finetune report runs/fit/version_0" in said
    assert (tmp_path / "runs/fit/version_0/test.json").exists()
