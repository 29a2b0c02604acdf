"""The report of several labels: its numbers are the run's, its links work, and no file name breaks it."""

import re
from pathlib import Path

import numpy as np
import pytest
from browser import needs_browser, scroll_widths
from labels_folder import NAMES, THRESHOLDS, drawn, write_labels_run

from finetune.runs import label_report
from finetune.runs.headline import headline
from finetune.runs.highlights import ImageViewer
from finetune.runs.html_report import write_report
from finetune.runs.label_report import label_highlights, label_sections
from finetune.runs.outcome import label_rows
from finetune.runs.record import read_run


def see(path: str, side: int) -> np.ndarray | None:
    return None if path.endswith("003.png") else np.full((side, side, 3), 99, np.uint8)


def overlay(paths, classes, side):
    return [np.full((side, side, 3), 8 * k, np.uint8) for k in classes]


VIEWER = ImageViewer(see, overlay)
LABELS, PROBABILITIES = drawn()


@pytest.fixture
def run(tmp_path, without_charts, monkeypatch) -> Path:
    monkeypatch.setattr(label_report, "curves", lambda *_, **__: "")
    monkeypatch.setattr(label_report, "reliability_chart", lambda *_: "")
    monkeypatch.setattr(label_report, "reliability_panels", lambda *_: "")
    return write_labels_run(tmp_path / "run", LABELS, PROBABILITIES)


def page_of(run: Path, viewer: ImageViewer | None = VIEWER) -> str:
    return write_report(read_run(run), viewer, {}).read_text("utf-8")


def test_mistakes_are_those_of_the_rows_and_have_their_order(run):
    record = read_run(run)
    sections = label_sections(record, VIEWER)
    predicted = PROBABILITIES >= THRESHOLDS
    found = {one.id: one for one in sections.mistakes}
    for k, metrics in enumerate(sections.metrics):
        missed = LABELS[:, k] & ~predicted[:, k]
        false = predicted[:, k] & ~LABELS[:, k]
        assert (metrics.num_missed, metrics.num_false) == (missed.sum(), false.sum())
        assert missed.any() and false.any()
        for key, chosen, sign in ((f"missed-{k}", missed, 1), (f"false-{k}", false, -1)):
            assert found[key].count == chosen.sum()
            shown = [one.confidence for one in found[key].images]
            assert shown == sorted(PROBABILITIES[chosen, k].tolist(), key=lambda p: sign * p)
        assert metrics.threshold == THRESHOLDS[k]
    together = [[count for count, _ in row] for row in sections.together]
    assert together == (LABELS.T.astype(int) @ LABELS.astype(int)).tolist()


def test_rows_have_the_metrics_of_scikit_learn(run):
    from sklearn import metrics

    predicted = PROBABILITIES >= THRESHOLDS
    for k, (row, found) in enumerate(
        zip(
            label_rows(read_run(run).result),
            label_sections(read_run(run), None).metrics,
            strict=True,
        )
    ):
        y, decided = LABELS[:, k], predicted[:, k]
        assert row.precision[0] == pytest.approx(metrics.precision_score(y, decided))
        assert row.recall[0] == pytest.approx(metrics.recall_score(y, decided))
        assert found.f1 == pytest.approx(metrics.f1_score(y, decided))
        average = metrics.average_precision_score(y, PROBABILITIES[:, k])
        assert row.average_precision[0] == pytest.approx(average)
        for value, low, high in (row.precision, row.recall, row.average_precision):
            assert low <= value <= high + 1e-9


def test_the_most_telling_images_come_first(run):
    record = read_run(run)
    false, missed, close = label_highlights(record, VIEWER)
    predicted = PROBABILITIES >= THRESHOLDS
    wrong = PROBABILITIES[predicted & ~LABELS]
    assert false["images"][0].confidence == wrong.max() and false["count"] == len(wrong)
    lost = PROBABILITIES[LABELS & ~predicted]
    assert missed["images"][0].confidence == lost.min() and missed["count"] == len(lost)
    first = close["images"][0]
    odds = np.log(PROBABILITIES / (1 - PROBABILITIES)) - np.log(
        np.array(THRESHOLDS) / (1 - np.array(THRESHOLDS))
    )
    i, k = np.unravel_index(np.abs(odds).argmin(), odds.shape)
    assert first.subject == NAMES[k] and first.confidence == PROBABILITIES[i, k]
    for kind in (false, missed, close):
        paths = [one.path for one in kind["images"]]
        assert len(set(paths)) == len(paths)  # each image once


def test_the_page_shows_labels_and_links_lead_somewhere(run):
    page = page_of(run)
    ids = set(re.findall(r'id="([\w-]+)"', page))
    links = set(re.findall(r'href="#([\w-]+)"', page))
    assert links <= ids and "false-0" in links
    assert "blue &lt;b&gt;" in page and "<b>" not in page.replace("&lt;b&gt;", "")
    assert "labels: " in page and "Metrics of each label" in page
    assert "60 train, 60 val, 60 test" in page  # images, not labels
    answer = headline(read_run(run))
    assert f"<strong>{answer.value}</strong> test mAP" in page
    for text in ("Confusion matrix", "accuracy</p>", "temperature"):
        assert text not in page


def test_without_images_the_numbers_are_there(run):
    page = page_of(run, None)
    assert "the checkpoint that predicted them is missing" in page
    assert "Metrics of each label" in page and "data:image" not in page
    assert "file not found" in page_of(run)  # of the one that is gone
    gone = ImageViewer(lambda path, side: None, overlay)
    assert "test images are not shown" in page_of(run, gone)


def test_many_labels_have_a_list_of_pairs(tmp_path, run):
    labels, probabilities = drawn(60, 40)
    names = [f"label {k}" for k in range(40)]
    other = write_labels_run(tmp_path / "many", labels, probabilities, names, [0.5] * 40)
    sections = label_sections(read_run(other), None)
    assert sections.together is None and len(sections.pairs) == 40
    counts = labels.T.astype(int) @ labels
    np.fill_diagonal(counts, 0)
    first, second, num = sections.pairs[0]
    assert num == counts.max() == counts[names.index(first), names.index(second)]
    page = page_of(other, None)
    assert "Labels that occur together most often" in page
    # the most frequent mistakes have a section each
    mistakes = label_sections(read_run(other), None).mistakes
    predicted = probabilities >= 0.5
    of_labels = [*(labels & ~predicted).sum(axis=0), *(predicted & ~labels).sum(axis=0)]
    assert [one.count for one in mistakes] == sorted(of_labels, reverse=True)[:40]
    links = set(re.findall(r'href="#((?:missed|false)-\d+)"', page))
    assert links == {one.id for one in mistakes}


def test_charts_are_drawn(tmp_path):
    run = write_labels_run(tmp_path / "run", LABELS, PROBABILITIES)
    page = page_of(run)
    assert page.count("<svg") >= 5  # loss, mAP, F1, reliability, precision and recall
    assert "Calibration error 0.040, 0.090 before calibration" in page
    assert "Precision and recall of each label" in page


def test_uncalibrated_probabilities_are_those_before_scale_and_bias(tmp_path, monkeypatch):
    found = {}
    monkeypatch.setattr(label_report, "curves", lambda *_, **__: "")
    monkeypatch.setattr(
        label_report, "reliability_chart", lambda bins, *_: found.update(bins) or ""
    )
    monkeypatch.setattr(label_report, "reliability_panels", lambda *_: "")
    monkeypatch.setattr(label_report, "reliability", lambda p, *_: p)
    run = write_labels_run(tmp_path / "run", LABELS, PROBABILITIES)
    list(label_report.label_charts(read_run(run)))
    calibration = read_run(run).result["calibration"]
    odds = np.log(found["uncalibrated"] / (1 - found["uncalibrated"])).reshape(-1, 3)
    again = odds * calibration["scale"] + calibration["bias"]
    np.testing.assert_allclose(1 / (1 + np.exp(-again)), PROBABILITIES, rtol=1e-6)
    assert np.abs(found["uncalibrated"] - found["calibrated"]).max() > 0.01


def test_the_worst_calibrated_labels_have_a_panel_each(tmp_path, monkeypatch):
    drawings = []
    for name in ("curves", "reliability_chart"):
        monkeypatch.setattr(label_report, name, lambda *_, **__: "")
    monkeypatch.setattr(
        label_report, "reliability_panels", lambda *args: drawings.append(args) or ""
    )
    labels, probabilities = drawn(60, 6)
    names = [f"label {k}" for k in range(6)]
    run = write_labels_run(tmp_path / "run", labels, probabilities, names, [0.5] * 6)
    page = page_of(run, None)
    assert '0.030 <span class="faint nowrap">0.005<' in page
    panels, text, _ = drawings[0]
    assert list(panels) == [f"label {k}" for k in (5, 4, 3, 2)]
    assert "The 4 labels whose" in text and "label 5 0.050, label 4 0.040" in text
    (bins,) = panels["label 5"].values()  # it was not calibrated
    p, share, num = np.array(bins).T
    assert num.sum() == 60
    assert (num * p).sum() == pytest.approx(probabilities[:, 5].sum())
    assert (num * share).sum() == labels[:, 5].sum()


@needs_browser
@pytest.mark.slow
def test_it_does_not_scroll_sideways(tmp_path, run):
    page = page_of(run)
    narrow, wide = scroll_widths([(page, 360), (page, 1280)], tmp_path)
    assert narrow <= 360 and wide <= 1280
