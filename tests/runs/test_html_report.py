"""The page of a run: its numbers are the run's, its links work, and no file name breaks it."""

import json
import re
import shutil
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from browser import dom_after, evaluate, needs_browser, scroll_widths
from promise import promise
from run_folders import write_run

from finetune.runs.comparison import write_comparison
from finetune.runs.headline import headline
from finetune.runs.highlights import ImageViewer
from finetune.runs.html_report import training_charts, write_report
from finetune.runs.record import read_run

LABELS = [0] * 6 + [1] * 3 + [2] * 3


def probabilities_of() -> np.ndarray:
    """Nine of twelve right; two of the first class taken for the second, one of the third for the first."""
    rng = np.random.default_rng(0)
    right = np.eye(3)[[0, 0, 0, 0, 1, 1, 1, 1, 1, 2, 2, 0]]
    mixed = 0.5 * right + 0.5 * rng.dirichlet(np.ones(3) * 5, len(right)) * 0.9
    return mixed / mixed.sum(axis=1, keepdims=True)


def look(side_of_overlay: bool = True) -> ImageViewer:
    def see(path: str, side: int) -> np.ndarray | None:
        return None if path.endswith("011.png") else np.full((side, side, 3), 99, np.uint8)

    def overlay(paths, classes, side):
        if not side_of_overlay:
            return "No heat maps: too coarse."
        return [np.full((side, side, 3), 8 * k, np.uint8) for k in classes]

    return ImageViewer(see, overlay)


VIEWER = look()


def page_of(run: Path, viewer: ImageViewer | None = VIEWER, **options: Any) -> str:
    return write_report(read_run(run), viewer, {}, **options).read_text("utf-8")


class Page(HTMLParser):
    def __init__(self, text: str) -> None:
        super().__init__()
        self.ids = []
        self.links = []
        self.images = []
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        given = dict(attrs)
        self.ids += [given["id"]] if "id" in given else []
        self.links += [given["href"]] if tag == "a" else []
        self.images += [given] if tag == "img" else []


@pytest.fixture
def run(tmp_path):
    return write_run(
        tmp_path / "runs" / "version_0",
        LABELS,
        probabilities_of(),
        images=tmp_path / "photos",
        doubts=["so few"],
    )


@promise("report")
@pytest.mark.slow
def test_the_numbers_are_the_runs(run):
    record = read_run(run)
    assert str(headline(record)) == (
        "test accuracy 75.0 % (9 of 12; 95 % interval 46.8–91.1 %). Always predicting blue <b>: 50.0 %."
    )
    assert record.best == (3, 0.75)  # the later one of two that are equal
    text = write_report(record, look(), {"torch": "2.0"}).read_text("utf-8")
    assert (
        "epoch 3" in text
        and "so few" in text
        and "torch 2.0" in text
        and "finetune fit --config a.yaml" in text
    )
    row = re.search(r"<tr><td>blue &lt;b&gt;</td>.*?</tr>", text, re.DOTALL)[0]
    assert (
        re.findall(r"[\d.]+ %", row)[:1] == ["66.7 %"]
        and "80.0 %" in row
        and "green &amp; red (2)" in row
    )


@pytest.mark.slow
def test_every_link_leads_somewhere(run):
    text = page_of(run)
    page = Page(text)
    assert len(page.ids) == len(set(page.ids)) and "<b>" not in text
    for link in page.links:
        assert link[1:] in page.ids if link.startswith("#") else (run / link).is_file(), link
    assert {f"#cell-{i}-{j}" for i, j in ((0, 0), (0, 1), (1, 1), (2, 2), (2, 0))} <= set(
        page.links
    )
    assert all(
        image["alt"] and image["src"].startswith("data:image/webp;base64,") for image in page.images
    )
    cell = text[text.index('id="cell-0-1"') :]
    assert cell[: cell.index("</section>")].count("<figure") == 2
    assert "file not found" in text  # the one that cannot be read
    assert text.count("heat map of ") > 5
    assert "No heat maps: too coarse." in page_of(run, look(False))


def test_a_run_without_a_test_split_is_described_by_its_validation_and_one_with_nothing_has_a_page(
    run,
):
    (run / "test.json").unlink()
    assert str(headline(read_run(run))).startswith(
        "validation accuracy 75.0 %. Not tested. best.ckpt (epoch 3) was chosen on these images, so"
    )
    for name in ("about.json", "steps.csv", "test_predictions.csv", "seconds.json"):
        (run / name).unlink()
    text = page_of(run, None, is_running=True)
    assert "nothing was validated or tested" in text and 'http-equiv="refresh"' in text


@pytest.mark.parametrize(
    ("share", "weights", "marks"),
    [
        (0, "before training", set()),
        (0.75, "75 % of the way to epoch 3", {"part of best.ckpt"}),
        (1, "epoch 3", {"best.ckpt"}),
    ],
)
def test_the_page_names_the_weights_that_the_validation_chose(run, share, weights, marks):
    candidates = [{"share": at, "loss": 0.5, "accuracy": 0.5} for at in (0, 0.75, 1)]
    kept = {"share": share, "num_images": 40, "candidates": candidates}
    (run / "kept_weights.json").write_text(json.dumps(kept))
    text = page_of(run, None)
    assert f"<dd>{weights}</dd>" in text
    charts = "".join(training_charts(read_run(run)))
    assert set(re.findall(r">\s*((?:part of )?best.ckpt)\s*<", charts)) == marks
    (run / "test.json").unlink()
    assert f"best.ckpt ({weights}) was chosen" in headline(read_run(run)).comment


@pytest.mark.usefixtures("without_charts")
def test_very_many_classes_have_a_list_of_pairs(tmp_path):
    names = [f"class {i}" for i in range(30)]
    p = np.full((60, 30), 0.01)
    p[np.arange(60), np.arange(60) // 2] = 0.7
    p[0] = 0.01
    p[0, 29] = 0.7
    run = write_run(tmp_path / "run", [i // 2 for i in range(60)], p, names)
    text = page_of(run)
    assert "class 0 predicted as class 29: 1" in text and 'class="matrix"' not in text


@pytest.mark.usefixtures("without_charts")
def test_very_many_classes_show_all_that_fit_of_the_cells_that_are_listed(tmp_path):
    names, num = [f"class {i}" for i in range(60)], 2_000
    labels = np.arange(num) % 60
    predicted = np.where(np.arange(num) % 20 == 0, (labels + 1) % 60, labels)
    p = 0.9 * np.eye(60)[predicted] + 0.1 / 60
    run = write_run(tmp_path / "run", labels.tolist(), p, names)
    text = page_of(run, look(False))
    for cell in re.findall(r'<section class="cell".*?</section>', text, re.DOTALL):
        assert (
            cell.count("<figure") == int(re.search(r"predicted as [^:]+: (\d+)</h3>", cell)[1]) > 30
        )


@pytest.mark.usefixtures("without_charts")
def test_why_no_image_is_shown_is_reported_once(run):
    gone = ImageViewer(lambda path, side: None, lambda *_: None)
    text = page_of(run, gone)
    assert "The test images are not shown: " in text and "file not found" not in text
    assert "No heat maps" not in text  # that would be said of the network
    text = page_of(run, None)
    assert "the checkpoint that predicted them is missing" in text
    assert "images are not shown" not in page_of(run)


@pytest.mark.usefixtures("without_charts")
def test_a_page_elsewhere_finds_the_images(run, tmp_path):
    target = tmp_path / "far" / "away.html"
    target.parent.mkdir()
    assert (
        write_report(read_run(run), look(), {}, target=target) == target
        and not (run / "report.html").exists()
    )
    links = [link for link in Page(target.read_text("utf-8")).links if not link.startswith("#")]
    assert links and all((target.parent / link).is_file() for link in links)


@pytest.mark.slow
@needs_browser
def test_a_cell_opens_its_images_in_a_browser(run, tmp_path):
    text = page_of(run)
    script = """
        const cell = document.getElementById("cell-0-1"), before = getComputedStyle(cell).display;
        document.querySelector("a[href='#cell-0-1']").click();
        setTimeout(() => document.body.dataset.found = before + " " + getComputedStyle(cell).display, 100);
    """
    assert 'data-found="none block"' in dom_after(text, script, tmp_path)


def test_the_head_has_data_set_network_answer_and_date(run):
    record = read_run(run)
    record = replace(record, about=record.about | {"began": "2026-01-02T03:04:00"})
    text = write_report(record, None, {}).read_text("utf-8")
    head = text[text.index("<header>") : text.index("</header>")]
    assert "<h1>photos, resnet18</h1>" in head and "version_0</h1>" not in head
    assert "<title>photos, resnet18: report</title>" in text
    assert "<strong>75.0 %</strong> test accuracy" in head
    assert "9 of 12 test images" in head and "95 % interval 46.8–91.1 %" in head
    assert "2026-01-02 03:04" in head
    assert re.search(r"<dt>date</dt><dd>20\d\d-", page_of(run, None))  # of a run that recorded none
    for damaged in ("yesterday", 5, None):
        damaged_record = replace(record, about=record.about | {"began": damaged})
        assert re.fullmatch(r"20\d\d-\d\d-\d\d \d\d:\d\d", damaged_record.date)


@pytest.mark.usefixtures("without_charts")
def test_heat_maps_are_hidden_if_they_are_too_coarse_and_the_page_says_why(run):
    maps = page_of(run)
    assert "heat map of blue" in maps and "No heat maps" not in maps  # negative control
    text = page_of(run, look(False))
    assert text.count("No heat maps: too coarse.") == 1 and "heat map of" not in text


@pytest.mark.slow
@needs_browser
@pytest.mark.usefixtures("without_charts")
def test_a_heat_map_is_next_to_its_image_on_a_phone(run, tmp_path):
    places = """Array.from(document.querySelectorAll(".looked-at .picture"), figure =>
        Array.from(figure.querySelectorAll("img"), image => [image.offsetTop, image.offsetWidth]))"""
    pairs = [pair for pair in evaluate(page_of(run), places, tmp_path, 390) if len(pair) == 2]
    assert len(pairs) > 5
    assert all(image[0] == heat_map[0] and image[1] > 120 for image, heat_map in pairs)
    # control: one above the other in a narrow column
    narrow = page_of(run).replace("minmax(min(100%, 17rem), 1fr)", "4rem")
    pairs = [pair for pair in evaluate(narrow, places, tmp_path, 390) if len(pair) == 2]
    assert all(image[0] < heat_map[0] for image, heat_map in pairs)


@pytest.mark.slow
@needs_browser
@pytest.mark.usefixtures("without_charts")
def test_in_print_a_heading_is_on_the_page_of_its_images(run, tmp_path):
    breaks = """Array.from(document.querySelectorAll("h3, h3 + p"), element =>
        getComputedStyle(element).breakAfter)"""
    assert set(evaluate(page_of(run), breaks, tmp_path, 800, "print")) == {"avoid"}
    assert "auto" in evaluate(page_of(run), breaks, tmp_path, 800)  # control: on a screen


@pytest.mark.slow
@needs_browser
def test_a_thousand_classes_need_no_sideways_scrolling(tmp_path):
    names = [f"class {i} {'of_a_long_name' * (i % 4)}" for i in range(1_000)]
    # few test images: a probability of each class is written for each, and read three times
    labels = np.arange(200)
    p = np.full((200, 1_000), 0.1 / 999)
    p[labels, np.where(labels % 5, labels, 0)] = 0.9
    counts = dict.fromkeys(names, 1)
    splits = {name: {"origin": "", "counts": counts} for name in ("train", "val", "test")}
    run = write_run(tmp_path / "run", labels.tolist(), p, names, splits=splits)
    other = shutil.copytree(run, tmp_path / f"run_{'of_a_long_name' * 4}")
    page = page_of(run, look(False))
    target = tmp_path / "comparison.html"
    write_comparison([read_run(run), read_run(other)], None, target)
    comparison = target.read_text("utf-8")
    wide = page.replace("<main>", '<main><div style="width: 1490px">x</div>')
    pages = [(page, 375), (comparison, 375), (page, 1440), (wide, 1440)]
    widths = scroll_widths(pages, tmp_path)
    assert widths[0] <= 375 and widths[1] <= 375 and widths[2] <= 1440
    assert widths[3] > 1440  # negative control


FOUND = {
    "kind": "leak_exact",
    "level": "bad",
    "title": "2 sets of files <b>",
    "advice": "",
    "is_judged": True,
    "rows": [{"files": ["train/a.jpg", "test/b.jpg"], "note": "a in train and test", "value": 2.0}],
}


def part(text: str) -> str:
    """The part of the page about findings in the data."""
    return text[text.index('id="health"') : text.index('id="reproduce"')]


def looked(run, num_files: int, num_opened: int, findings: list) -> str:
    look = {"num_files": num_files, "num_opened": num_opened, "findings": findings}
    record = replace(read_run(run), about=read_run(run).about | {"first_look": look})
    return part(write_report(record, None, {}).read_text("utf-8"))


@pytest.mark.usefixtures("without_charts")
def test_what_was_found_before_training_is_reported_and_what_was_not_looked_at(run):
    text = looked(run, 2800, 2800, [FOUND])
    assert "2 sets of files &lt;b&gt;" in text and "train/a.jpg = test/b.jpg" in text
    assert "no problems" not in text
    assert "2,800 files" in text and "the first bytes of all" in text
    assert "Not checked: damaged" in text and "finetune check photos" in text
    assert "It found no problems" in looked(run, 90, 90, [])
    assert "the first bytes of 20,000" in looked(run, 50_000, 20_000, [])


@pytest.mark.usefixtures("without_charts")
def test_nothing_is_reported_as_sound_that_was_not_checked(run):
    text = part(page_of(run, None))  # without a first look
    assert (
        "no record of a check before training" in text
        and "no problems" not in text
        and "Not checked" in text
    )
    assert "the images are not separate files" in looked(
        run, 0, 0, []
    ) and "finetune check" not in looked(run, 0, 0, [])


def test_it_shows_how_the_network_was_chosen(tmp_path):
    row = {"accuracy": 0.75, "loss": 0.625, "num_images": 256, "seconds": 3.5}
    ranking = {
        "rows": [
            {"name": "timm/<b>", **row},
            {"name": "resnet18", **row, "accuracy": 0.5, "num_images": 128},
        ],
        "seconds": 9.0,
        "unusable": {"resnet50": "not on this machine"},
        "untried": ["convnext_tiny"],
    }
    run = write_run(tmp_path / "run", LABELS, probabilities_of(), backbone_ranking=ranking)
    text = page_of(run)
    assert "Which network was chosen" in text and "<strong>timm/&lt;b&gt;</strong>" in text
    assert "75.0 %" in text and "0.625" in text and ">128<" in text
    assert (
        "Not ranked: resnet50 (not on this machine)." in text
        and "for lack of time: convnext_tiny." in text
    )
    other = page_of(write_run(tmp_path / "other", LABELS, probabilities_of()))
    assert "Which network was chosen" not in other


def test_a_report_shows_what_is_left_of_about_json(run):
    about = json.loads((run / "about.json").read_text())
    del about["root"], about["splits"]["train"], about["splits"]["test"]["origin"]
    (run / "about.json").write_text(json.dumps(about))
    assert f'<td class="number">{about["splits"]["test"]["counts"]["ünder"]}</td>' in page_of(run)
