"""The data set of the demo is generated if it does not exist."""

from functools import partial

import pytest

from finetune import FashionMNIST, SampleData
from finetune.demo import drawing
from finetune.system.messages import WrongUsage


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


def test_the_network_of_a_sample_can_be_tested_on_a_table(tmp_path, monkeypatch):
    drawing.write_sample(tmp_path, "target", counts={"train": 1, "test": 1})
    paths = sorted((tmp_path / "target").rglob("*.png"))
    rows = [f"{path},{path.parent.name},{path.parent.parent.name}" for path in paths]
    table = tmp_path / "mine.csv"
    table.write_text("\n".join(["path,label,split", *rows]))
    # a table of another name in the working directory is not read
    monkeypatch.chdir(tmp_path)
    (tmp_path / drawing.TABLE).write_text("path,label\n")
    data = SampleData(table=str(table))
    assert {split: len(part) for split, part in data.splits.items()} == {"train": 2, "test": 2}
    with pytest.raises(WrongUsage, match="not for FashionMNIST"):
        FashionMNIST(table=str(table))
