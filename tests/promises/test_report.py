"""The report of a run and `finetune report`: its numbers are the run's, its links work, and no file name breaks it.

In a browser in full: nightly/test_reports_in_a_browser.py; the page of `finetune serve`: test_serve_in_a_browser.py.
"""

import csv
import json
import re
import shutil
import time
from collections.abc import Sequence
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from browser import dom_after, needs_browser
from colours import NAMES, QUICKEST
from labels_folder import THRESHOLDS, drawn, write_labels_run
from promise import control, promise
from run_folders import write_run
from sklearn import metrics
from tiny_module import trainer

from finetune.inference.image_viewer import ImageViewer
from finetune.reports import test_images
from finetune.reports.class_metrics import class_metrics, matrix
from finetune.reports.live_report import LiveReport
from finetune.reports.report import write_report
from finetune.reports.test_images import highlights, image_sections
from finetune.runs.folder import Run
from finetune.runs.headline import Best, validation_headline
from finetune.runs.predictions_table import Predictions
from finetune.runs.record import read_run
from finetune.runs.run_dir import RunDir

CPU = ("--trainer.accelerator", "cpu", "--workers", 0)
LABELS = [0] * 6 + [1] * 3 + [2] * 3


# The command, and the page that it writes


@promise("report")
@control("report")
@needs_browser
def test_the_report_opens_and_shows_the_accuracy(finished, tmp_path):
    page = (finished / "report.html").read_text("utf-8")
    accuracy = json.loads((finished / "test.json").read_text())["test/accuracy"]
    script = """
        const link = document.querySelector("a[href^='#cell-']"), cell = document.querySelector(link.hash);
        const before = getComputedStyle(cell).display;
        link.click();
        setTimeout(() => document.body.dataset.found = before + " " + getComputedStyle(cell).display, 100);
    """
    dom = dom_after(page, script, tmp_path)
    assert 'data-found="none block"' in dom and f"{100 * accuracy:.1f}" in dom
    # the control: without the click the cell stays closed
    assert 'data-found="none none"' in dom_after(
        page, script.replace("link.click();", ""), tmp_path
    )


def test_a_fit_with_report_leaves_what_the_page_is_made_of(finished, predicted):
    names = {path.name for path in finished.iterdir()}
    assert {"report.html", "run.json", "augmented.webp"} <= names
    facts = RunDir(finished).facts
    assert [facts.splits[split].num for split in ("train", "val", "test")] == [56, 4, 30]
    assert facts.command.startswith("finetune fit ")
    with open(finished / "test_predictions.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    assert [row["path"] for row in rows] == sorted(predicted)
    found = [[float(row[f"p_{name}"]) for name in NAMES] for row in rows]
    np.testing.assert_allclose(found, [predicted[row["path"]] for row in rows], atol=1e-5)
    right = sum(row["label"] == row["class"] == row["path"].split("/")[-2] for row in rows)
    assert json.loads((finished / "test.json").read_text())["test/accuracy"] == right / 30


@pytest.mark.slow
def test_the_same_command_makes_the_files_that_a_kill_during_the_report_prevented(
    finished, cli, colours, tmp_path
):
    run = shutil.copytree(finished, tmp_path / "runs/fit/version_0")
    names = {path.name for path in run.rglob("*")}
    RunDir(run).update(ended=None)  # which is written last
    (run / "test_predictions.csv").unlink()
    (run / "report.html").rename(run / ".report.html.0a1b2c3d.tmp")
    cli("fit", colours, *QUICKEST, "--report", "true", "--trainer.max_epochs", 3, "--resume")
    assert {path.name for path in run.rglob("*")} == names
    assert "of 30; 95 % interval" in (run / "report.html").read_text("utf-8")
    assert RunDir(run).has_ended


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

    monkeypatch.setattr("finetune.reports.report.write_report", fails)
    cli("fit", colours, *QUICKEST, "--report", "true")
    said = caplog.text + capsys.readouterr().err
    assert "finetune report runs/fit/version_0" in said
    assert (tmp_path / "runs/fit/version_0/test.json").exists()


# The page of a drawn run


def probabilities_of() -> np.ndarray:
    """Nine of twelve right; two of the first class taken for the second, one of the third for the first."""
    rng = np.random.default_rng(0)
    right = np.eye(3)[[0, 0, 0, 0, 1, 1, 1, 1, 1, 2, 2, 0]]
    mixed = 0.5 * right + 0.5 * rng.dirichlet(np.ones(3) * 5, len(right)) * 0.9
    return mixed / mixed.sum(axis=1, keepdims=True)


def see(path: str, side: int) -> np.ndarray | None:
    return None if path.endswith("011.png") else np.full((side, side, 3), 99, np.uint8)


def overlay(paths: Sequence[str], classes: Sequence[int], side: int) -> list[np.ndarray]:
    return [np.full((side, side, 3), 8 * k, np.uint8) for k in classes]


VIEWER = ImageViewer(see, overlay)
COARSE = ImageViewer(see, lambda *_: "No heat maps: too coarse.")


def page_of(run: Path, viewer: ImageViewer | None = VIEWER, **options: Any) -> str:
    return write_report(read_run(run), viewer, {"torch": "2.0"}, **options).read_text("utf-8")


class Page(HTMLParser):
    """The words, identifiers, links and images of a page."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.ids: list[str] = []
        self.links: list[str] = []
        self.images: list[dict[str, str | None]] = []
        self.parts: list[str] = []
        self.tags: set[str] = set()
        self.feed(text)
        self.words = re.sub(r"\s+", " ", " ".join(self.parts))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        self.tags.add(tag)
        self.ids += [given["id"] or ""] if "id" in given else []
        self.links += [given["href"] or ""] if tag == "a" else []
        self.images += [given] if tag == "img" else []

    def handle_data(self, data: str) -> None:
        self.parts.append(data)


@pytest.fixture
def run(tmp_path: Path) -> Path:
    folder = tmp_path / "runs/version_0"
    images = tmp_path / "photos"
    return write_run(folder, LABELS, probabilities_of(), images=images, doubts=["so few"])


def forget_a_cell(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(test_images, "max_per_section", lambda counts: 1)


@promise("report", controls=[forget_a_cell])
def test_a_report_has_the_numbers_of_its_run_and_links_that_lead_somewhere(run):
    record = read_run(run)
    assert str(record.facts.result) == (
        "test accuracy 75.0 % (9 of 12; 95 % interval 46.8–91.1 %). Always predicting blue <b>: 50.0 %."
    )
    text = page_of(run)
    page = Page(text)
    assert len(page.ids) == len(set(page.ids)) and "b" not in page.tags  # blue <b>
    for word in ("75.0 %", "epoch 3", "so few", "torch 2.0", "finetune fit --config a.yaml"):
        assert word in page.words, word
    # recall, F1 and where its mistakes went
    row = re.search(r"<tr><td>blue &lt;b&gt;</td>.*?</tr>", text, re.DOTALL)[0]
    assert all(word in row for word in ("66.7 %", "80.0 %", "green &amp; red (2)"))
    for link in page.links:
        assert link[1:] in page.ids if link.startswith("#") else (run / link).is_file(), link
    assert {"#cell-0-0", "#cell-0-1", "#cell-1-1", "#cell-2-2", "#cell-2-0"} <= {*page.links}
    for image in page.images:  # the page opens from a disk
        assert image["alt"] and str(image["src"]).startswith("data:image/webp;base64,")
    assert "http:" not in text.replace("http://www.w3.org/", "") and "<script src" not in text
    cell = text[text.index('id="cell-0-1"') :]
    assert cell[: cell.index("</section>")].count("<figure") == 2
    assert "file not found" in page.words  # the one that cannot be read
    unseen = health(text)  # of data that nothing has looked at
    assert "no record of a check" in unseen and "Not checked" in unseen
    assert "no problems" not in unseen


def test_the_report_of_a_run_without_a_test_or_with_damaged_records(run):
    splits = RunDir(run).facts.splits
    del splits["train"]
    RunDir(run).update(root=None, splits=splits)
    assert "75.0 %" in page_of(run)
    (run / "test.json").unlink()
    RunDir(run).update(test=None)
    assert str(read_run(run).facts.result).startswith("validation accuracy 75.0 %")
    for name in ("config.yaml", "steps.csv", "test_predictions.csv"):
        (run / name).unlink()
    (run / "run.json").write_text('{"finetune": "0.1.0"}')
    text = page_of(run, None, is_running=True)
    assert "nothing was validated or tested" in text and 'http-equiv="refresh"' in text


def test_a_report_names_the_weights_that_the_validation_chose_and_a_checkpoint_that_is_missing(run):
    weights = "before training"
    result = validation_headline("accuracy", 0.5, 40, 40, weights)
    best = Best(epoch=0, weights=weights, why=f"{weights}, the best", result=result)
    RunDir(run).update(best=best)
    text = page_of(run, None)
    assert weights in text
    assert "the checkpoint that predicted them is missing" in text and "heat map of" not in text
    RunDir(run).update(test=None)
    assert f"best.ckpt ({weights}) was chosen" in read_run(run).headline_text


def test_a_report_of_many_classes_lists_pairs_stays_small_and_says_why_heat_maps_are_missing(
    tmp_path,
):
    names = [f"class {i}" for i in range(60)]
    labels = np.arange(2_000) % 60
    predicted = np.where(np.arange(2_000) % 20 == 0, (labels + 1) % 60, labels)
    p = 0.9 * np.eye(60)[predicted] + 0.1 / 60
    run = write_run(tmp_path / "run", labels.tolist(), p, names)
    text = page_of(run, COARSE)
    assert "No heat maps: too coarse." in text and "heat map of" not in text
    assert "class 0 predicted as class 1" in text and 'class="matrix"' not in text
    for cell in re.findall(r'<section class="cell".*?</section>', text, re.DOTALL):
        num = int(re.search(r"predicted as [^:]+: (\d+)</h3>", cell)[1])
        assert cell.count("<figure") == num > 30


def test_the_most_telling_images_come_first():
    labels, decided = (np.eye(2, dtype=bool)[of] for of in ([0, 0, 0, 1, 1, 1], [0, 0, 1, 1, 0, 1]))
    confidence = np.array([[0.9], [0.6], [0.7], [0.8], [0.95], [0.55]])
    p = np.where(decided, confidence, 1 - confidence)
    paths = [f"{i}.png" for i in range(6)]
    found = Predictions(["a", "b"], paths, True, labels, decided, p, [])
    mistakes, uncertain = ([i for i, _ in kind.chosen] for kind in highlights(found, []))
    assert mistakes == [4, 2]  # wrong ones alone, the surest first
    assert uncertain == [5, 1, 2, 3, 0, 4]
    assert found.taken_for(0, 0).tolist() == [0, 1] and found.taken_for(0, 1).tolist() == [2]


FOUND = {
    "kind": "leak_exact",
    "level": "bad",
    "title": "2 sets of files <b>",
    "advice": "",
    "is_judged": True,
    "rows": [{"files": ["train/a.jpg", "test/b.jpg"], "note": "a in train and test", "value": 2.0}],
}


def health(text: str) -> str:
    """Return the words of the section about the data."""
    return Page(text[text.index('id="health"') : text.index('id="reproduce"')]).words


def test_a_report_says_what_was_found_in_the_data(run):
    RunDir(run).update(first_look=[FOUND])
    found = health(write_report(read_run(run), None, {}).read_text("utf-8"))
    assert all(word in found for word in ("files <b>", "test/b.jpg", "finetune check")), found
    assert "no problems" not in found


def test_a_report_is_named_after_the_folder_above_train(run):
    RunDir(run).update(root="photos/train")
    assert "<h1>photos, resnet18</h1>" in page_of(run)


def test_a_line_of_a_report_does_not_break_within_an_option(run):
    RunDir(run).update(doubts=["so few: <b> --data.val_fraction, or more"])
    found = write_report(read_run(run), None, {}).read_text("utf-8")
    assert '&lt;b&gt; <span class="nowrap">--data.val_fraction</span>, or' in found


def test_a_report_shows_how_the_network_was_chosen(tmp_path):
    row = {"accuracy": 0.75, "loss": 0.625, "num_images": 256, "seconds": 3.5}
    other = {"name": "resnet18", **row, "accuracy": 0.5, "num_images": 128}
    ranking = {
        "rows": [{"name": "timm/<b>", **row}, other],
        "seconds": 9.0,
        "unusable": {"resnet50": "not on this machine"},
        "untried": ["convnext_tiny"],
    }
    run = write_run(tmp_path / "run", LABELS, probabilities_of(), backbone_ranking=ranking)
    words = Page(page_of(run)).words
    for word in ("timm/<b>", "0.625", "128", "resnet50 (not on this machine)", "convnext_tiny"):
        assert word in words, word


# Several labels an image

TRUE, PROBABILITIES = drawn()
PREDICTED = PROBABILITIES >= THRESHOLDS


@pytest.fixture
def labels_run(tmp_path: Path) -> Path:
    return write_labels_run(tmp_path / "run", TRUE, PROBABILITIES)


@promise("report")
def test_the_report_of_several_labels_has_the_metrics_of_scikit_learn(labels_run):
    record = read_run(labels_run)
    for k, row in enumerate(class_metrics(record.result)):
        y, decided = TRUE[:, k], PREDICTED[:, k]
        assert row.precision[0] == pytest.approx(metrics.precision_score(y, decided))
        assert row.recall[0] == pytest.approx(metrics.recall_score(y, decided))
        assert row.f1 == pytest.approx(metrics.f1_score(y, decided))
        average = metrics.average_precision_score(y, PROBABILITIES[:, k])
        assert row.average_precision[0] == pytest.approx(average)
        assert (row.num_missed, row.num_false) == ((y & ~decided).sum(), (decided & ~y).sum())
    together = [[count for count, _ in row] for row in matrix(record.result).rows]
    assert together == (TRUE.T.astype(int) @ TRUE.astype(int)).tolist()
    mistakes = {one.id: one for one in image_sections(record.predictions, VIEWER)}
    for k in range(3):
        missed, false = TRUE[:, k] & ~PREDICTED[:, k], PREDICTED[:, k] & ~TRUE[:, k]
        for key, chosen, sign in ((f"missed-{k}", missed, 1), (f"false-{k}", false, -1)):
            shown = [one.confidence for one in mistakes[key].images]
            assert shown == sorted(PROBABILITIES[chosen, k].tolist(), key=lambda p: sign * p)
    first = [kind.chosen[0] for kind in highlights(record.predictions, THRESHOLDS)]
    p = record.predictions.probabilities
    assert p[first[0]] == PROBABILITIES[PREDICTED & ~TRUE].max()
    assert p[first[1]] == PROBABILITIES[TRUE & ~PREDICTED].min()
    text = page_of(labels_run)
    page = Page(text)
    assert {link[1:] for link in page.links if link.startswith("#")} <= {*page.ids}
    assert "b" not in page.tags and f"{read_run(labels_run).facts.result.value_text}" in page.words
    assert "60 train, 60 val, 60 test" in page.words  # images, not labels
    assert text.count("<svg") >= 5  # loss, mAP, F1, reliability, precision and recall
    assert not any(word in page.words for word in ("Confusion matrix", "temperature"))
    assert "Metrics of each label" in page_of(labels_run, None)


# In a notebook, and of a fit that is running


@pytest.fixture
def now(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    return now


def test_the_report_of_a_running_fit_says_so_until_it_is_stopped(run, now, caplog):
    fitting = trainer(run)
    callback = LiveReport(Run(run.parent, "fit", run))
    callback.on_exception(fitting)
    assert not (run / "report.html").exists()  # before its time there is none
    callback.on_train_start(fitting)
    now[0] = 1000.0
    callback.on_train_epoch_start(fitting)
    text = (run / "report.html").read_text("utf-8")
    assert "Still running" in text
    callback.on_exception(fitting)
    assert "Still running" not in (run / "report.html").read_text("utf-8")
    (run / "report.html").unlink()
    (run / "report.html").mkdir()
    now[0] = 9000.0
    callback.on_train_epoch_start(fitting)  # which ends no training
    assert "report.html could not be written" in caplog.text
