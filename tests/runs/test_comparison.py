"""Runs side by side: results counted by hand, and only differing settings listed."""

import dataclasses
import re
from pathlib import Path

import labels_folder
import numpy as np
import pytest
from run_folders import write_run

from finetune.runs.comparison import Pair, paired, write_comparison
from finetune.runs.highlights import ImageViewer
from finetune.runs.local_copies import download_place
from finetune.runs.record import read_run

LABELS = [0] * 10 + [1] * 10


def probabilities_of(wrong: list[int]) -> np.ndarray:
    labels = np.array(LABELS)
    labels[wrong] = 1 - labels[wrong]
    return np.where(np.eye(2)[labels] == 1, 0.8, 0.2)


def two(tmp_path, wrong_a: list[int], wrong_b: list[int]):
    images = tmp_path / "photos"
    wrong = {"a": wrong_a, "b": wrong_b}
    return [
        read_run(write_run(tmp_path / k, LABELS, probabilities_of(v), ["x", "y"], images))
        for k, v in wrong.items()
    ]


def look() -> ImageViewer:
    return ImageViewer(
        lambda path, side: np.full((side, side, 3), 9, np.uint8), lambda paths, classes, side: None
    )


def test_images_that_one_alone_gets_right(tmp_path):
    a, b = two(tmp_path, [0, 1], [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11])
    pair = paired(a, b)
    assert isinstance(pair, Pair)
    assert (pair.both, pair.only_a.tolist(), pair.only_b.tolist(), pair.neither) == (
        8,
        list(range(2, 12)),
        [0],
        1,
    )
    # one of eleven, or none, and the same on the other side
    assert pair.p == pytest.approx(2 * 12 / 2**11)
    reported = write_comparison([a, b], look(), tmp_path / "page.html")
    assert reported.endswith("a is better on images like these (McNemar's exact test, p = 0.012).")
    text = (tmp_path / "page.html").read_text()
    assert (
        text.count("<figure class") == 11 and "only a correct" in text and "photos/002.png" in text
    )
    assert "10 images, the most confident predictions of a first." in text
    assert "1 image, the most confident mistakes of a first." in text


@pytest.mark.usefixtures("without_charts")
@pytest.mark.parametrize(
    ("wrong_a", "wrong_b", "expected"),
    [
        # 18 and 9 of 20 are correct
        (
            [0, 1],
            [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11],
            "<strong>45.0 points</strong> more test accuracy with a<",
        ),
        (
            [0, 1, 2],
            [3, 4],
            "<strong>5.0 points</strong> more test accuracy with b, not significant<",
        ),
    ],
)
def test_its_header_has_the_difference(tmp_path, wrong_a, wrong_b, expected):
    a, b = two(tmp_path, wrong_a, wrong_b)
    write_comparison([a, b], None, tmp_path / "page.html")
    text = (tmp_path / "page.html").read_text()
    header = re.search(r"<header>.*?</header>", text, re.S)[0]
    assert expected in header and "a compared with b</h1>" in header
    assert "<dt>test images</dt><dd>20</dd>" in header
    # Three runs: the best one. Here all are of the same images.
    c = read_run(
        write_run(tmp_path / "c", LABELS, probabilities_of([]), ["x", "y"], tmp_path / "photos")
    )
    write_comparison([a, b, c], None, tmp_path / "page.html")
    text = (tmp_path / "page.html").read_text()
    assert (
        "<strong>100.0 %</strong> highest test accuracy, c<" in text
        and "3 runs compared</h1>" in text
    )


@pytest.mark.usefixtures("without_charts")
def test_no_difference_is_reported_as_none(tmp_path):
    a, b = two(tmp_path, [0, 1, 2], [3, 4])
    assert "no significant difference" in write_comparison([a, b], None, tmp_path / "page.html")


@pytest.mark.usefixtures("without_charts")
@pytest.mark.parametrize(
    ("change", "reported"),
    [
        (
            lambda text: text.replace("/003.png", "/other.png"),
            "they were tested on different images: 19 are the same",
        ),
        (
            lambda text: text.replace("003.png,x", "003.png,y"),
            "images of the same name are of different classes",
        ),
        (None, "has no test_predictions.csv"),
    ],
)
def test_what_can_not_be_held_against_each_other(tmp_path, change, reported):
    a, b = two(tmp_path, [0], [1])
    path = b.path / "test_predictions.csv"
    path.write_text(change(path.read_text())) if change else path.unlink()
    assert reported in write_comparison([a, read_run(b.path)], look(), tmp_path / "page.html")


@pytest.mark.usefixtures("without_charts")
def test_runs_on_a_copy_of_the_folder_are_compared_by_the_paths_in_it(tmp_path):
    places = [tmp_path / "first", tmp_path / "second"]
    a, b = (
        write_run(
            tmp_path / place.name[0],
            LABELS,
            probabilities_of([k]),
            ["x", "y"],
            place / "photos",
            folder=str(place),
        )
        for k, place in enumerate(places)
    )
    pair = paired(read_run(a), read_run(b))
    assert isinstance(pair, Pair) and pair.both == 18
    sentence = write_comparison([read_run(a), read_run(b)], None, tmp_path / "page.html")
    named = " and ".join(str(place / "photos") for place in places)
    assert f"of 20 test images, which have the same paths in {named}: no" in sentence
    same = write_comparison(two(tmp_path / "same", [0], [1]), None, tmp_path / "page.html")
    assert "which have the same paths" not in same
    path = b / "test_predictions.csv"  # the control
    path.write_text(path.read_text().replace("/003.png", "/other.png"))
    assert paired(read_run(a), read_run(b)) == (
        "they were tested on different images: 19 are the same"
    )


def test_three_runs_have_a_column_each(tmp_path):
    runs = [
        *two(tmp_path, [0], [1]),
        read_run(write_run(tmp_path / "c", LABELS, probabilities_of([]), ["x", "y"])),
    ]
    write_comparison(runs, None, tmp_path / "page.html")
    text = (tmp_path / "page.html").read_text()
    # c was tested on other images, so that no accuracy is the highest
    assert 'class="answer"' not in text and "Not tested on the images of a: c" in text
    assert re.findall(r'<th scope="col">.*?<a href="(.*?)">(.*?)</a></th>', text) == [
        (name, name) for name in "abc"
    ]
    assert "100.0 % (83.9–100.0 %)" in text and "95.0 % (76.4–99.1 %)" in text


def test_runs_of_one_name_are_distinguished_by_where_they_lie(tmp_path):
    folders = [tmp_path / place / "runs/fit/version_0" for place in ("one", "two")]
    runs = [
        read_run(write_run(folder, LABELS, probabilities_of(wrong), ["x", "y"], tmp_path / "p"))
        for folder, wrong in zip(folders, ([0], [1]), strict=True)
    ]
    assert runs[0].name == runs[1].name
    reported = write_comparison(runs, None, tmp_path / "page.html")
    assert all(str(folder) in reported for folder in folders)
    text = (tmp_path / "page.html").read_text()
    assert all(f">{folder}</a>" in text for folder in folders)


def test_a_run_in_object_storage_is_named_by_its_address(tmp_path, monkeypatch):
    monkeypatch.setenv("FINETUNE_CACHE", str(tmp_path / "cache"))
    address = "s3://bucket/runs/fit/version_0"
    folders = [download_place(address), tmp_path / "runs/fit/version_0"]
    runs = [
        read_run(write_run(folder, LABELS, probabilities_of([0]), ["x", "y"], tmp_path / "p"))
        for folder in folders
    ]
    reported = write_comparison(runs, None, tmp_path / "page.html")
    assert address in reported and "cache" not in reported
    assert str(folders[1]) in reported  # control


def test_ten_runs_have_a_row_each_with_a_link_and_a_line_of_their_own(tmp_path):
    runs = []
    for i in range(10):
        folder = write_run(
            tmp_path / f"run_{i}", LABELS, probabilities_of([i]), ["x", "y"], tmp_path / "p"
        )
        if i != 4:
            (folder / "report.html").touch()
        runs.append(read_run(folder))
    write_comparison(runs, None, tmp_path / "page.html")
    text = (tmp_path / "page.html").read_text()
    rows = re.findall(
        r'<tr><th scope="row".*?>(<svg .*?</svg>) <a href="(.*?)">(.*?)</a></th>(.*?)</tr>', text
    )
    assert [name for _, _, name, _ in rows] == [f"run_{i}" for i in range(10)]
    assert [to for _, to, *_ in rows] == [f"run_{i}" + "/report.html" * (i != 4) for i in range(10)]
    assert (
        all("95.0 % (76.4–99.1 %)" in cells for *_, cells in rows)
        and text.count('<th scope="col">') < 10
    )
    # Each line is drawn in the colour and dashes that its row shows, and no two alike.
    samples = [
        re.search(r'stroke="(.*?)".*stroke-dasharray="(.*?)"', sample).groups()
        for sample, *_ in rows
    ]
    assert len(set(samples)) == 10
    chart = re.findall(r'<svg role="img".*?</svg>', text, re.S)[0]
    styles = re.findall(r'style="(fill: none; [^"]*stroke-width: 1\.8[^"]*)"', chart)
    drawn = [
        ("stroke-dasharray" in style, re.search(r"stroke: (\S+);", style)[1]) for style in styles
    ]
    assert [colour for _, colour in drawn] == [colour for colour, _ in samples]
    assert [bool(dashes) for dashes, _ in drawn] == [bool(dashes) for _, dashes in samples]
    assert "run_0" not in re.sub(r'aria-label=".*?"', "", chart)  # no legend over the lines


def test_a_run_without_validation_leaves_the_others_their_lines(tmp_path):
    a, b = two(tmp_path, [0], [1])
    a = dataclasses.replace(a, metrics=[{**row, "val/accuracy": ""} for row in a.metrics])
    write_comparison([a, b], None, tmp_path / "page.html")
    charts = re.findall(r'<svg role="img".*?</svg>', (tmp_path / "page.html").read_text(), re.S)
    assert "validation accuracy of b by epoch" in charts[0]
    assert "--warning" in charts[0] and "--accent" not in charts[0]  # the second one's
    assert "--warning" in charts[1] and "--accent" in charts[1]  # control: both


def test_images_are_the_same_by_whatever_way_they_were_found(tmp_path, monkeypatch):
    """A fit has them from where it was begun, a test from here."""
    a, b = two(tmp_path, [0, 1], [0, 2])
    monkeypatch.chdir(tmp_path)
    for name in ("photos", "x/../photos"):
        (tmp_path / "x").mkdir(exist_ok=True)
        rows = b.path / "test_predictions.csv"
        rows.write_text(
            rows.read_text().replace(f"{tmp_path}/photos", name).replace("photos/", f"{name}/")
        )
        assert isinstance(paired(a, read_run(b.path)), Pair)
        rows.write_text(rows.read_text().replace(name, f"{tmp_path}/photos"))


@pytest.mark.usefixtures("without_charts")
def test_of_more_than_two_it_is_reported_which_were_tested_on_others(tmp_path):
    a, b = two(tmp_path, [0], [1])
    c = read_run(
        write_run(tmp_path / "c", LABELS, probabilities_of([2]), ["x", "y"], tmp_path / "elsewhere")
    )
    assert "Not tested" not in write_comparison([a, b, a], None, tmp_path / "page.html")
    assert write_comparison([a, b, c], None, tmp_path / "page.html").endswith(
        "Not tested on the images of a: c."
    )


def test_images_that_are_links_to_one_file_stay_two(tmp_path):
    a, b = two(tmp_path, [0], [1])
    store = tmp_path / "blob"
    store.touch()
    for path in a.answers.paths:
        Path(path).unlink(missing_ok=True)
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        Path(path).symlink_to(store)
    pair = paired(a, b)
    assert isinstance(pair, Pair) and pair.only_a.tolist() == [1] and pair.only_b.tolist() == [0]


@pytest.mark.usefixtures("without_charts")
def test_a_run_without_a_test_has_no_other_images(tmp_path):
    a, b = two(tmp_path, [0], [1])
    (a.path / "test_predictions.csv").unlink()
    assert "Not tested" not in write_comparison(
        [read_run(a.path), b, b], None, tmp_path / "page.html"
    )


def test_several_labels_are_compared_by_images_with_all_labels_right(tmp_path, without_charts):
    labels, p = labels_folder.drawn()
    better = p + 0.5 * (labels - p)
    a, b = (
        read_run(labels_folder.write_labels_run(tmp_path / name, labels, values))
        for name, values in (("a", p), ("b", better))
    )
    right = [run.label_answers.is_right for run in (a, b)]
    pair = paired(a, b)
    assert (
        pair.both == (right[0] & right[1]).sum() and pair.neither == (~right[0] & ~right[1]).sum()
    )
    assert len(pair.only_b) == (right[1] & ~right[0]).sum() > 0
    sentence = write_comparison([a, b], None, tmp_path / "page.html")
    assert f"b alone on {len(pair.only_b)} of" in sentence
    page = (tmp_path / "page.html").read_text()
    assert "test mAP" in page and "test accuracy" not in page
    single = read_run(write_run(tmp_path / "c", [0, 1, 2], np.eye(3), labels_folder.NAMES))
    assert "one class per image, the other" in paired(single, a)
    write_comparison([a, single], None, tmp_path / "page.html")
    page = (tmp_path / "page.html").read_text()
    assert "test mAP" in page and "test accuracy" in page and "not tested" not in page
