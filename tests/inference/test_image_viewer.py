"""Images as a network sees them, and class activation maps over them."""

import cv2
import numpy as np
import pytest

from finetune.inference import image_viewer as module
from finetune.inference.image_viewer import image_viewer


class Eyes:
    """A predictor that only uses the centre of an image, and predicts a class from its upper left."""

    has_maps = True
    cells = 5

    def prepare(self, image: np.ndarray, side: int = 32) -> np.ndarray:
        return cv2.resize(image, (side, side))

    def activation(self, images: np.ndarray, classes) -> np.ndarray | None:
        assert images.shape[1:] == (32, 32, 3) and len(images) == len(classes)
        spoken = np.zeros((len(images), self.cells, self.cells))
        spoken[:, 0, 0] = 1
        return spoken if self.has_maps else None


@pytest.fixture
def image(tmp_path) -> str:
    path = str(tmp_path / "x.png")
    cv2.imwrite(path, np.full((300, 400, 3), (10, 120, 240), np.uint8))
    return path


def test_an_image_in_the_size_asked_for(image, tmp_path):
    look = image_viewer(Eyes())
    seen = look.see(image, 48)
    assert seen.shape == (48, 48, 3) and (seen == (240, 120, 10)).all()  # RGB
    (tmp_path / "no.png").write_bytes(b"<html>")
    assert look.see(str(tmp_path / "no.png"), 48) is None and look.see("gone.png", 48) is None


def test_colour_where_it_spoke_and_grey_elsewhere(image):
    (over,) = image_viewer(Eyes()).overlay([image], [1], 64)
    corner, rest = over[2, 2].astype(int), over[48:, 48:].astype(int)
    assert np.ptp(corner) > 40 and (np.ptp(rest, axis=2) == 0).all()
    deaf = Eyes()
    deaf.has_maps = False
    assert "does not average" in image_viewer(deaf).overlay([image], [1], 64)


def test_a_coarse_map_is_not_shown_and_the_reason_is(image):
    eyes = Eyes()
    assert (
        len(image_viewer(eyes).overlay([image], [1], 64)) == 1
    )  # negative control: 5 x 5 is enough
    eyes.cells = 4
    assert "only 4 x 4 cells" in image_viewer(eyes).overlay([image], [1], 64)


def test_few_at_once_are_the_same_as_one_by_one(image, monkeypatch):
    full = image_viewer(Eyes()).overlay([image] * 5, [0] * 5, 40)
    monkeypatch.setattr(module, "_BATCH_SIZE", 2)
    np.testing.assert_array_equal(image_viewer(Eyes()).overlay([image] * 5, [0] * 5, 40), full)
