"""The data set of the demo is drawn where it is not there yet."""

from functools import partial

import pytest

from finetune import SampleData
from finetune.demo import drawing


def test_an_existing_folder_is_used_whatever_its_origin(colours, monkeypatch):
    monkeypatch.setattr("finetune.demo.sample_data.write_sample", lambda *_: pytest.fail("drawn"))
    assert SampleData(str(colours)).class_names == ["blue", "green", "red"]


@pytest.mark.parametrize(
    ("task", "num_classes", "num_train"), [("source", 8, 2), ("target", 2, 2), ("several", 1, 30)]
)
def test_a_missing_sample_folder_is_drawn(tmp_path, monkeypatch, task, num_classes, num_train):
    counts = {"train": num_train, "val": 1, "test": 1}
    monkeypatch.setattr(
        "finetune.demo.sample_data.write_sample",
        partial(drawing.write_sample, counts=counts),
    )
    data = SampleData(str(tmp_path / task))
    assert {split: len(part) for split, part in data.splits.items()} == {
        split: num * num_classes for split, num in counts.items()
    }
    assert data.label_kind == ("several" if task == "several" else "single")
    with pytest.raises(ValueError, match="called source, target or several"):
        SampleData(str(tmp_path / "other"))
