"""`finetune report` on runs of `finetune fit`."""

import csv
import json
import shutil
from pathlib import Path

import pytest
from colours import QUICKEST
from data_files import write_unpacked
from torchvision.datasets import FashionMNIST as Source

from finetune.cli import main
from finetune.inference.predictor import Predictor

pytestmark = pytest.mark.slow

FIT = [*QUICKEST, "--report", "true"]


@pytest.fixture(scope="module")
def fitted(colours, tmp_path_factory):
    """Two runs of a moment; the first with its page."""
    root = tmp_path_factory.mktemp("report")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(root)
        for seed in ("0", "1"):
            with pytest.raises(SystemExit) as end:
                main(["fit", "--data.root", str(colours), *FIT, "--seed_everything", seed])
            assert end.value.code == 0
    return root


def test_fit_leaves_what_the_page_is_made_of(fitted):
    run = fitted / "runs/fit/version_0"
    names = {path.name for path in run.iterdir()}
    assert {
        "report.html",
        "about.json",
        "seconds.json",
        "test_predictions.csv",
        "augmented.webp",
    } <= names
    about = json.loads((run / "about.json").read_text())
    counts = [sum(about["splits"][split]["counts"].values()) for split in ("train", "val", "test")]
    assert counts == [56, 4, 30] and set(about["splits"]["test"]["counts"].values()) == {10}
    assert about["command"].startswith("finetune fit --data.root") and len(about["lines"]) == 3
    text = (run / "report.html").read_text()
    assert "test accuracy " in text and "data:image/webp" in text and "No heat maps: " in text


def test_rows_are_what_the_checkpoint_says(fitted):
    run = fitted / "runs/fit/version_0"
    with open(run / "test_predictions.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 30 and [row["path"] for row in rows] == sorted(row["path"] for row in rows)
    assert all(row["label"] == row["path"].split("/")[-2] for row in rows)
    right = sum(row["label"] == row["class"] for row in rows)
    result = json.loads((run / "test.json").read_text())
    assert right / 30 == pytest.approx(result["test/accuracy"])
    predictor = Predictor(run / "checkpoints/best.ckpt")
    from finetune.data.decode import decode

    for row, p in zip(rows[:5], predictor([decode(row["path"]) for row in rows[:5]]), strict=True):
        assert [float(row[f"p_{name}"]) for name in ("blue", "green", "red")] == pytest.approx(
            p.tolist(), abs=1e-5
        )


def test_again_and_elsewhere(fitted, cli, capsys, tmp_path):
    moved = tmp_path / "moved"
    shutil.copytree(fitted / "runs/fit/version_0", moved)
    (moved / "report.html").unlink()
    cli("report", moved)
    out = capsys.readouterr().out
    assert " of 30; 95 % interval " in out and out.endswith(f"report in {moved}/report.html\n")
    assert (moved / "report.html").stat().st_size > 20_000


def test_two_runs_side_by_side(fitted, cli, capsys, tmp_path):
    runs = [fitted / f"runs/fit/version_{i}" for i in range(2)]
    cli("compare", *runs, "--output", "new/page.html")
    assert "McNemar's exact test" in capsys.readouterr().out
    assert "seed_everything" in (tmp_path / "new/page.html").read_text()


def test_the_page_of_one_run_goes_where_out_names(fitted, cli, capsys, tmp_path):
    run = fitted / "runs/fit/version_0"
    before = (run / "report.html").read_bytes()
    cli("report", "--output", "new/page.html", run)
    assert capsys.readouterr().out.endswith("report in new/page.html\n")
    assert (tmp_path / "new/page.html").stat().st_size > 20_000 and (
        run / "report.html"
    ).read_bytes() == before


def test_images_are_found_from_another_folder(fitted, cli, colours, monkeypatch, tmp_path):
    monkeypatch.chdir(colours.parent)
    cli(
        "fit",
        "--data.root",
        colours.name,
        *FIT,
        "--report",
        "false",
        "--trainer.default_root_dir",
        tmp_path / "runs",
    )
    monkeypatch.chdir(tmp_path)
    cli("report", "runs/fit/version_0")
    text = Path("runs/fit/version_0/report.html").read_text("utf-8")
    assert text.count("data:image/webp") > 30 and "images are not shown" not in text


def test_a_test_is_reported_from_another_folder(fitted, cli, colours, monkeypatch, tmp_path):
    """There, the same relative paths lead to another checkpoint and other images, or to none."""
    (tmp_path / "a").mkdir()
    monkeypatch.chdir(tmp_path / "a")
    Path("photos").symlink_to(colours)
    shutil.copy(fitted / "runs/fit/version_0/checkpoints/best.ckpt", "some.ckpt")
    cli("test", "some.ckpt", "photos", "--trainer.default_root_dir", "runs")
    run = Path("runs/test/version_0").absolute()
    (tmp_path / "b/photos").mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "b")
    Path("some.ckpt").write_text("another network")
    cli("report", run)
    page = (run / "report.html").read_text("utf-8")
    assert (
        page.count("data:image/webp") > 5
        and "images are not shown" not in page
        and "file not found" not in page
    )
    # A relative path whose folder is unknown.
    result = json.loads((run / "test.json").read_text())
    (run / "test.json").write_text(json.dumps({**result, "checkpoint": "some.ckpt"}))
    cli("report", run)
    assert "the checkpoint that predicted them is missing" in (run / "report.html").read_text(
        "utf-8"
    )


def test_its_help_says_how_runs_are_named(capsys):
    with pytest.raises(SystemExit) as end:
        main(["report", "--help"])
    reported = capsys.readouterr().out
    usage = "usage: finetune report RUN [--out FILE.html]"
    assert end.value.code == 0 and reported.startswith(usage)
    assert "--runs" not in reported


def test_a_page_that_can_not_be_written_takes_nothing_from_the_run(
    cli, colours, monkeypatch, capsys, tmp_path, caplog
):
    def full(*_, **__):
        raise RuntimeError("a library's own")

    monkeypatch.setattr("finetune.commands.report.write_report", full)
    cli("fit", "--data.root", colours, *FIT)
    assert (
        "Try again with finetune report runs/fit/version_0" in caplog.text + capsys.readouterr().err
    )
    assert (tmp_path / "runs/fit/version_0/test.json").exists()


def test_images_of_fashion_mnist_are_on_the_page_until_they_are_gone(cli, monkeypatch, tmp_path):
    write_unpacked(tmp_path / "clothes", 40, 20)
    monkeypatch.setattr(Source, "mirrors", ["file:///nowhere/"])
    cli("fit", "--data", "finetune.FashionMNIST", "--data.root", "clothes", *FIT)
    run = tmp_path / "runs/fit/version_0"
    first = (run / "report.html").read_text("utf-8")
    monkeypatch.chdir(tmp_path / "clothes")  # the root was given from where the run was begun
    cli("report", run)
    again = (run / "report.html").read_text("utf-8")
    assert again.count("data:image/webp") == first.count("data:image/webp") > 20
    shutil.rmtree(tmp_path / "clothes/FashionMNIST/images")
    cli("report", run)
    text = (run / "report.html").read_text("utf-8")
    assert "and others are missing" in text and text.count("data:image/webp") < 5
