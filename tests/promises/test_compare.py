"""`finetune compare`: runs side by side, with results that are counted by hand, and only what can be compared."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import labels_folder
import numpy as np
import pytest
from run_folders import write_run

from finetune.inference.image_viewer import ImageViewer
from finetune.reports.comparison import Pair, paired, write_comparison
from finetune.runs.local_copies import download_place
from finetune.runs.record import RunRecord, read_run

LABELS = [0] * 10 + [1] * 10
VIEWER = ImageViewer(
    lambda path, side: np.full((side, side, 3), 9, np.uint8), lambda paths, classes, side: None
)


@pytest.fixture
def run(tmp_path: Path) -> Callable[..., RunRecord]:
    """Writes a run whose predictions of these of 20 images are wrong."""

    def write(name: str, *wrong: int, photos: str = "photos", **settings: Any) -> RunRecord:
        labels = np.array(LABELS)
        labels[list(wrong)] = 1 - labels[list(wrong)]
        p = np.where(np.eye(2)[labels] == 1, 0.8, 0.2)
        return read_run(
            write_run(tmp_path / name, LABELS, p, ["x", "y"], tmp_path / photos, **settings)
        )

    return write


@pytest.fixture
def compare(tmp_path: Path) -> Callable[..., tuple[str, str]]:
    """Compares runs, and returns the sentence and the page."""

    def write(*runs: RunRecord, viewer: ImageViewer | None = None) -> tuple[str, str]:
        target = tmp_path / "page.html"
        return write_comparison(runs, viewer, target), target.read_text("utf-8")

    return write


def test_compare_counts_the_images_that_one_run_alone_gets_right(run, compare):
    a, b = run("a", 0, 1), run("b", 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11)
    pair = paired(a, b)
    assert isinstance(pair, Pair) and (pair.both, pair.neither) == (8, 1)
    assert (pair.only_a.tolist(), pair.only_b.tolist()) == ([*range(2, 12)], [0])
    # one of eleven, or none, and the same on the other side
    assert pair.p == pytest.approx(2 * 12 / 2**11)
    sentence, page = compare(a, b, viewer=VIEWER)
    assert "a is better on images like these" in sentence and "p = 0.012" in sentence
    assert page.count("<figure class") == 11 and "photos/002.png" in page
    header = re.search(r"<header>.*?</header>", page, re.S)[0]
    assert "45.0 points" in header and "a compared with b" in header


@pytest.mark.parametrize(
    ("change", "reported"),
    [
        (lambda text: text.replace("/003.png", "/other.png"), "19 are the same"),
        (lambda text: text.replace("003.png,x", "003.png,y"), "of different classes"),
        (None, "test_predictions.csv"),
    ],
)
def test_compare_says_what_cannot_be_compared(run, compare, change, reported):
    a, b = run("a", 0), run("b", 1)
    path = b.path / "test_predictions.csv"
    if change:
        path.write_text(change(path.read_text()))
    else:
        path.unlink()
    assert reported in compare(a, read_run(b.path), viewer=VIEWER)[0]


def test_compare_takes_images_on_a_copy_of_the_folder_for_the_same(run, compare, tmp_path):
    a, b = (
        run(name, k, photos=f"{name}_data/photos", folder=str(tmp_path / f"{name}_data"))
        for k, name in enumerate("ab")
    )
    pair = paired(a, b)
    assert isinstance(pair, Pair) and pair.both == 18
    sentence, _ = compare(a, b)
    assert "same paths" in sentence and str(tmp_path / "a_data/photos") in sentence
    assert "same paths" not in compare(run("c", 0), run("d", 1))[0]


def test_compare_knows_an_image_by_any_way_to_it_and_links_to_one_file_as_two(
    run, tmp_path, monkeypatch
):
    a, b = run("a", 0, 1), run("b", 0, 2)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "x").mkdir()
    rows = b.path / "test_predictions.csv"
    content = rows.read_text()
    for name in ("photos", "x/../photos"):
        rows.write_text(content.replace(f"{tmp_path}/photos", name))
        assert isinstance(paired(a, read_run(b.path)), Pair)
    (tmp_path / "blob").touch()
    for path in a.predictions.paths:
        Path(path).unlink()
        Path(path).symlink_to(tmp_path / "blob")
    pair = paired(a, b)
    assert isinstance(pair, Pair) and pair.only_a.tolist() == [2] and pair.only_b.tolist() == [1]


def test_compare_of_three_runs_says_which_was_tested_on_other_images(run, compare):
    a, b = run("a", 0), run("b", 1)
    c = run("c", 2, photos="elsewhere")
    sentence, page = compare(a, b, c)
    assert sentence.endswith("Not tested on the images of a: c.")
    assert "95.0 % (76.4–99.1 %)" in page
    (a.path / "test_predictions.csv").unlink()
    assert "Not tested" not in compare(read_run(a.path), b, b)[0]


def test_compare_names_runs_of_one_name_by_their_place(run, compare, tmp_path, monkeypatch):
    monkeypatch.setenv("FINETUNE_CACHE", str(tmp_path / "cache"))
    address = "s3://bucket/runs/fit/version_0"
    copy = download_place(address).relative_to(tmp_path)
    places = ["one/runs/fit/version_0", "two/runs/fit/version_0", str(copy)]
    runs = [run(place, i) for i, place in enumerate(places)]
    sentence, page = compare(*runs[:2])
    for place in places[:2]:
        assert str(tmp_path / place) in sentence and f">{tmp_path / place}</a>" in page
    sentence, _ = compare(runs[0], runs[2])
    assert address in sentence and "cache" not in sentence


def test_compare_of_several_labels_counts_images_with_all_labels_right(compare, tmp_path):
    labels, p = labels_folder.drawn()
    better = p + 0.5 * (labels - p)
    a, b = (
        read_run(labels_folder.write_labels_run(tmp_path / name, labels, values))
        for name, values in (("a", p), ("b", better))
    )
    right_a, right_b = (run.predictions.is_right for run in (a, b))
    pair = paired(a, b)
    assert isinstance(pair, Pair) and pair.both == (right_a & right_b).sum()
    assert len(pair.only_b) == (right_b & ~right_a).sum() > 0
    sentence, page = compare(a, b)
    assert f"b alone on {len(pair.only_b)} of" in sentence
    assert "test mAP" in page and "test accuracy" not in page
    single = read_run(write_run(tmp_path / "c", [0, 1, 2], np.eye(3), labels_folder.NAMES))
    assert "one class per image" in paired(single, a)
    _, page = compare(a, single)
    assert "test mAP" in page and "test accuracy" in page
