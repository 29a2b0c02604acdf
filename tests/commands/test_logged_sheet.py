"""The contact sheet of test images for loggers: its images, its captions, and when there is none."""

from types import SimpleNamespace

import numpy as np
import pytest
from labelled_files import LABELS, LabelledFiles, draw_labelled
from run_folders import write_run
from small_fits import data

from finetune.commands import logged_sheet
from finetune.commands.logged_sheet import log_sheet, prediction_sheet
from finetune.commands.sheet import RIGHT, WRONG
from finetune.data.datamodule import ImageDataModule
from finetune.runs.answers import Answers, LabelAnswers
from finetune.runs.run_logger import RunLogger

NAMES = ["blue", "green", "red"]


def answers(images: ImageDataModule, wrong: dict[int, float]) -> Answers:
    """All test images predicted correctly with 0.5, except these: the next class, with these confidences."""
    split = images.splits["test"]
    labels = np.array(split.targets.labels)
    predicted, confidence = labels.copy(), np.full(len(labels), 0.5)
    for i, value in wrong.items():
        predicted[i], confidence[i] = (labels[i] + 1) % 3, value
    return Answers(NAMES, list(split.paths), labels, predicted, confidence, None, [])


@pytest.fixture
def drawn(monkeypatch) -> list:
    """What is handed to be drawn."""
    calls: list = []
    draw = logged_sheet.draw_sheet
    monkeypatch.setattr(
        logged_sheet, "draw_sheet", lambda *given: calls.append(given) or draw(*given)
    )
    return calls


def test_the_most_confident_mistakes_come_first_then_others(colours, drawn):
    sample_images = data(colours)
    sheet = prediction_sheet(sample_images, answers(sample_images, {3: 0.6, 25: 0.9, 14: 0.7}))
    ((images, captions, *_),) = drawn
    assert captions[:3] == [
        ("blue 90 %, is red", WRONG),
        ("red 70 %, is green", WRONG),
        ("green 60 %, is blue", WRONG),
    ]
    assert len(images) == len(captions) == 24 and {colour for _, colour in captions[3:]} == {RIGHT}
    # in the order of the files
    assert [text for text, _ in captions[3:]] == sorted(text for text, _ in captions[3:])
    # each has the colour that it is named for
    for image, (text, _) in zip(images, captions, strict=True):
        name = text.split(", is ")[-1].split()[0]
        assert NAMES[::-1][image.mean(axis=(0, 1)).argmax()] == name
    assert sheet.width == 8 * 128 + 8 and sheet.height == 3 * 150 + 8


def test_at_most_a_dozen_mistakes_and_few_images_alone(colours, drawn):
    images = data(colours)
    prediction_sheet(images, answers(images, {i: 0.5 + i / 100 for i in range(20)}))
    captions = drawn[0][1]
    assert [colour for _, colour in captions].count(WRONG) >= 12 and captions[0][0].startswith(
        "red 69 %"
    )
    few = answers(images, {0: 0.9})
    one = Answers(
        NAMES, few.paths[:1], few.labels[:1], few.predicted[:1], few.confidence[:1], None, []
    )
    assert prediction_sheet(images, one).width == 128 + 8
    none = Answers(
        NAMES, [], few.labels[:0], few.predicted[:0], few.confidence[:0], None, few.paths
    )
    assert prediction_sheet(images, none) is None


def test_what_fails_is_reported_and_takes_nothing_from_the_run(colours, tmp_path, caplog):
    class Taker(RunLogger):
        name = version = log_metrics = None
        taken: list = []  # noqa: RUF012

        def write_image(self, *given):
            self.taken.append(given)

    trainer = SimpleNamespace(loggers=[Taker()], is_global_zero=True, global_step=7)
    table = write_run(tmp_path / "run", [0], np.eye(3)[:1], names=NAMES) / "test_predictions.csv"
    log_sheet(trainer, data(colours), NAMES, table)  # of images that are none of these
    assert not Taker.taken and "no image of test predictions could be logged" in caplog.text
    caplog.clear()
    path = data(colours).splits["test"].paths[0]
    table.write_text(f"path,label,class,probability,error\n{path},blue,blue,0.9,\n")
    log_sheet(trainer, data(colours), NAMES, table)
    assert [(name, step) for name, _, step in Taker.taken] == [
        ("test_predictions", 7)
    ] and not caplog.text
    log_sheet(SimpleNamespace(loggers=[Taker()], is_global_zero=False), data(colours), NAMES, table)
    assert len(Taker.taken) == 1


def test_several_labels_have_the_surest_wrong_decision_first(tmp_path, drawn):
    images = LabelledFiles(
        str(draw_labelled(tmp_path / "mosaics", train=12, test=10)), image_size=32, num_workers=0
    )
    split = images.splits["test"]
    labels = np.array(split.targets.labels, bool)
    predicted = labels.copy()
    p = np.where(labels, 0.8, 0.1)
    for i, k, value in ((4, 0, 0.7), (7, 1, 0.99), (2, 3, 0.6)):
        predicted[i, k] = ~labels[i, k]
        p[i, k] = value if predicted[i, k] else 1 - value
    found = LabelAnswers(list(LABELS), list(split.paths), labels, predicted, p, [])
    assert prediction_sheet(images, found) is not None
    captions = drawn[0][1]
    assert [colour for _, colour in captions] == [WRONG] * 3 + [RIGHT] * 7
    for (text, _), i in zip(captions, (7, 4, 2), strict=False):
        true = ", ".join(name for name, has in zip(LABELS, labels[i], strict=True) if has)
        assert text.endswith(f", is {true or 'no label'}")
