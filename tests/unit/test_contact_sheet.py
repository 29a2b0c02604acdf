"""The contact sheet of predicted images."""

import numpy as np

from finetune.commands.contact_sheet import caption_of, draw_sheet
from finetune.runs.predictions_table import Predictions


def test_images_stand_in_rows_in_their_order():
    images = np.stack([np.full((10, 10, 3), value, np.uint8) for value in (0, 60, 120, 180, 240)])
    paper = np.asarray(draw_sheet(images, [("x", (0, 0, 0))] * 5, columns=3, side=50, gap=10))
    assert paper.shape == (2 * (50 + 22 + 10) + 10, 3 * 60 + 10, 3)
    centres = [
        paper[10 + 25 + row * 82, 10 + 25 + column * 60, 0]
        for row in (0, 1)
        for column in (0, 1, 2)
    ]
    assert centres == [0, 60, 120, 180, 240, 255]


def test_captions_have_the_letters_of_other_languages():
    def drawn(text: str) -> bytes:
        return draw_sheet(
            np.zeros((1, 10, 10, 3), np.uint8), [(text, (0, 0, 0))], columns=1
        ).tobytes()

    # and not all the box for what a font lacks
    assert len({drawn(letter) for letter in "öøłжкшωλ"}) == 8


def test_several_labels_have_a_probability_each():
    p = np.array([[0.91, 0.2, 0.35], [0.1, 0.2, 0.3]])
    decided = p >= [0.5, 0.5, 0.33]
    found = Predictions(["a", "b", "c"], ["1.png", "2.png"], False, decided, decided, p, [])
    assert [caption_of(found, i) for i in (0, 1)] == ["a 91 %, c 35 %", "no label"]
