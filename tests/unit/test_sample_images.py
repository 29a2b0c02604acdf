"""The drawn images of the demo, and the data set that is made of them."""

from pathlib import Path

import numpy as np
import pytest
from data_files import read

from finetune import SampleData
from finetune.demo.drawing import draw, write_sample

COUNTS = {"train": 3, "val": 1, "test": 2}
# Mean colours of the middle of 8 images, coarse enough for other versions of OpenCV and NumPy to agree.
COLOURS = {
    "burger": (170, 126, 70),
    "donut": (191, 159, 141),
    "eclair": (156, 119, 102),
    "fried_egg": (202, 188, 138),
    "ice_cream": (141, 116, 100),
    "pizza": (185, 113, 50),
    "salad_bowl": (133, 121, 78),
    "sandwich": (198, 147, 89),
    "hotdog": (155, 105, 70),
    "not-hotdog": (160, 128, 84),
}


@pytest.mark.parametrize("name", COLOURS)
def test_the_drawing_is_the_one_that_was_measured(name):
    images = np.stack([draw(name, (9, i)) for i in range(8)])
    assert images.shape == (8, 96, 96, 3) and images.dtype == np.uint8
    np.testing.assert_allclose(images[:, 32:64, 32:64].mean((0, 1, 2)), COLOURS[name], atol=3)
    np.testing.assert_array_equal(images[1], draw(name, (9, 1)))
    assert np.abs(images[0].astype(float) - images[1]).mean() > 5


@pytest.mark.parametrize(
    ("task", "counts", "num_classes"),
    [
        ("source", dict.fromkeys(COUNTS, 1), 8),
        ("target", COUNTS, 2),
        ("several", {"train": 10, "val": 3, "test": 3}, 1),
    ],
)
def test_sample_data_has_the_images_that_were_drawn(tmp_path, task, counts, num_classes):
    folder = write_sample(tmp_path / "data", task, counts=counts)
    data = read(SampleData(str(folder)))
    nums = {split: len(samples) for split, samples in data.splits.items() if len(samples)}
    assert nums == {split: num * num_classes for split, num in counts.items()}
    assert data.label_kind == ("several" if task == "several" else "single")
    files = sorted(folder.rglob("*.png"))
    assert len({path.read_bytes() for path in files}) == len(files) == sum(nums.values())
    # a split does not depend on the others, but on the seed
    first = min((folder / "test").rglob("*.png")).relative_to(folder)
    alone = write_sample(tmp_path / "alone", task, counts={"test": 1})
    other = write_sample(tmp_path / "other", task, seed=1, counts={"test": 1})
    content = (folder / first).read_bytes()
    assert content == (alone / first).read_bytes() != (other / first).read_bytes()
    # a folder that is there stays
    before = {path: path.stat().st_mtime_ns for path in files}
    assert write_sample(tmp_path / "data", task, counts=COUNTS) == folder
    assert before == {path: path.stat().st_mtime_ns for path in folder.rglob("*.png")}


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), KeyboardInterrupt()])
def test_an_interrupted_drawing_leaves_nothing(tmp_path, monkeypatch, error):
    write_bytes = Path.write_bytes

    def fail_at_third(path, data):
        if path.name == "0002.png":
            raise error
        return write_bytes(path, data)

    monkeypatch.setattr(Path, "write_bytes", fail_at_third)
    with pytest.raises(type(error)):
        write_sample(tmp_path, "target", counts=COUNTS)
    assert not list(tmp_path.iterdir())
