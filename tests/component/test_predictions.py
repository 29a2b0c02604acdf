"""predictions.csv and test_predictions.csv: a row for each image in the order of the input, read back as written."""

import csv
import os
import resource
import tempfile
from collections.abc import Mapping
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import pytorch_lightning as pl
import torch
from data_files import nowhere
from hypothesis import example, given
from hypothesis import strategies as st
from promise import promise
from tiny_module import QUIET, trainer
from torch import Tensor
from torch.utils.data import DataLoader

from finetune.data.targets import ClassIndex, MultiHot
from finetune.runs.folder import Run
from finetune.runs.predictions_table import Predictions
from finetune.training import prediction_files
from finetune.training.calibration import Calibration
from finetune.training.outputs import Outputs
from finetune.training.prediction import DecisionRule, Scores
from finetune.training.prediction_files import PredictionWriter, WriteTestPredictions
from finetune.training.prediction_rows import Rows

pytestmark = QUIET
NAMES = ["hot dog", 'the "other", one', "größe", "=1+1"]  # as folders may be called
THRESHOLDS = (0.6, 0.3, 0.5, 0.2)


def rule(
    names: list[str] = NAMES, thresholds: tuple[float, ...] = (), **options: float
) -> DecisionRule:
    calibration = Calibration.unfitted("several" if thresholds else "single", len(names))
    calibration = msgspec.structs.replace(calibration, thresholds=thresholds)
    return DecisionRule(names, calibration, **options)


def scores(rule: DecisionRule, p: Tensor, index: list[int] | None = None) -> Scores:
    return Scores(rule, p, torch.empty(0), index)


class Network(pl.LightningModule):
    """Says what it is given of each image."""

    def __init__(
        self,
        probabilities: Tensor,
        names: list[str],
        thresholds: tuple[float, ...] = (),
        bad: Mapping[int, str] | None = None,
    ) -> None:
        super().__init__()
        self.groups = None
        self.given = probabilities
        self.rule = rule(names, thresholds)
        self.decided = probabilities.argmax(1)
        if thresholds:
            self.decided = probabilities >= torch.tensor(thresholds)
        bad = bad or {}
        index = torch.tensor([i for i in range(len(probabilities)) if i not in bad])
        logits = probabilities.logit() if thresholds else probabilities.log()
        self.outputs = Outputs(
            index.long(), logits[index.long()], torch.empty(0), sorted(bad.items())
        )

    def predict_step(self, batch: dict[str, Any], _: int) -> Scores:
        return scores(self.rule, self.given[batch["index"]], batch["index"])

    def test_step(self, batch: dict[str, Any], _: int) -> None:
        pass


class Images(pl.LightningDataModule):
    """Images that are nowhere, by their paths and targets."""

    def __init__(
        self,
        paths: list[str],
        targets: ClassIndex | MultiHot | None = None,
        bad: Mapping[int, str] | None = None,
    ) -> None:
        super().__init__()
        self.bad = bad or {}
        samples = replace(nowhere(len(paths)), paths=paths)
        self.splits = {"predict": samples}
        if targets is not None:
            self.splits["test"] = replace(samples, targets=targets)

    def predict_dataloader(self) -> DataLoader:
        indices = range(len(self.splits["predict"]))
        return DataLoader(indices, batch_size=3, collate_fn=self.collate)

    def collate(self, indices: list[int]) -> dict[str, Any]:
        good = [i for i in indices if i not in self.bad]
        return {"index": good, "bad": [(i, self.bad[i]) for i in indices if i in self.bad]}

    test_dataloader = predict_dataloader


def drawn(num: int, num_classes: int = len(NAMES)) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(num, num_classes, generator=generator, dtype=torch.float64).softmax(dim=1)


def predict(
    run: Run,
    probabilities: Tensor,
    paths: list[str] | None = None,
    names: list[str] = NAMES,
    thresholds: tuple[float, ...] = (),
    bad: Mapping[int, str] | None = None,
    output: str | None = None,
) -> Path:
    paths = paths or [f"{i}.png" for i in range(len(probabilities))]
    network = Network(probabilities, names, thresholds, bad)
    writer = PredictionWriter(run, Rows(network.rule), output)
    images = Images(paths, bad=bad)
    trainer(run.root, writer).predict(network, images, return_predictions=False)
    return writer.target if run.path else Path()


@pytest.fixture
def run(tmp_path: Path) -> Run:
    run = Run(tmp_path, "predict")
    run.choose()
    return run


def read(path: Path) -> list[dict[str, str]]:
    with open(path, newline="", encoding="utf-8", errors="surrogateescape") as file:
        return list(csv.DictReader(file, strict=True))


FILES = st.binary(min_size=1, max_size=9).filter(lambda name: 0 not in name).map(os.fsdecode)
FILES |= st.sampled_from(["b.png", "with, comma.png", 'a "b".png', "line\nbreak.png", "\r", "=2"])
LABELS = st.text(
    st.characters(codec="utf-8", exclude_categories=["C", "Z"]) | st.sampled_from(",\";|= '"),
    min_size=1,
    max_size=6,
)


def write_damaged_images_last(monkeypatch):
    monkeypatch.setattr(prediction_files, "merge", lambda good, bad, key: chain(good, bad))


@promise("each-image-once", controls=[write_damaged_images_last])
@given(
    paths=st.lists(FILES, min_size=1, max_size=8),
    names=st.lists(LABELS, min_size=2, max_size=4, unique=True),
    num_bad=st.integers(0, 2),
    has_several=st.booleans(),
    seed=st.integers(0, 99),
)
@example(
    paths=["b.png", "a.png", "b.png"], names=["a;b", "c|d"], num_bad=1, has_several=True, seed=0
)
def test_test_predictions_csv_is_read_as_it_was_written(paths, names, num_bad, has_several, seed):
    rng = np.random.default_rng(seed)
    num, num_classes = len(paths), len(names)
    thresholds = tuple(rng.random(num_classes).round(2).tolist()) if has_several else ()
    probabilities = rng.random((num, num_classes))
    probabilities /= probabilities.sum(axis=1, keepdims=True)
    bad = dict.fromkeys(rng.permutation(num)[:num_bad].tolist(), "torn: a, b")
    network = Network(torch.from_numpy(probabilities), names, thresholds, bad)
    if has_several:
        labels = rng.integers(0, 2, (num, num_classes)).astype(np.uint8)
        targets = MultiHot(labels)
    else:
        labels = rng.integers(0, num_classes, num)
        targets = ClassIndex(labels, num_classes)
    with tempfile.TemporaryDirectory() as folder:
        run = Run(folder, "test", Path(folder))
        writer = WriteTestPredictions(run)
        trainer(Path(folder), writer).test(network, Images(paths, targets), verbose=False)
        target = Path(folder) / "test_predictions.csv"
        assert [row["path"] for row in read(target)] == paths
        found = Predictions.read(target, names, is_single=not has_several)
    good = [i for i in range(num) if i not in bad]
    assert found.paths == [paths[i] for i in good]
    assert found.unread == [paths[i] for i in sorted(bad)]
    decided = network.decided.numpy()
    if not has_several:
        labels, decided = (np.eye(num_classes, dtype=bool)[of] for of in (labels, decided))
    np.testing.assert_array_equal(found.labels, labels[good])
    np.testing.assert_array_equal(found.decided, decided[good])
    np.testing.assert_allclose(
        found.probabilities, probabilities[good].reshape(-1, num_classes), atol=5.1e-8
    )
    np.testing.assert_array_equal(found.is_right, (labels == decided)[good].all(axis=1))


def test_test_predictions_of_very_many_classes_have_the_best_five(tmp_path):
    names = [f"class {i}" for i in range(60)]
    writer = WriteTestPredictions(Run(tmp_path, "test", tmp_path))
    targets = ClassIndex(np.array([7]), 60)
    p = drawn(1, 60)
    network = Network(p, names)
    trainer(tmp_path, writer).test(network, Images(["x.png"], targets), verbose=False)
    target = tmp_path / "test_predictions.csv"
    (row,) = read(target)
    assert "class_5" in row and "class_6" not in row and "p_class 1" not in row
    found = Predictions.read(target, names, is_single=True)
    best = p[0].argsort(descending=True)[:5]
    np.testing.assert_allclose(found.probabilities[0, best], p[0, best], atol=5.1e-8)
    assert (found.probabilities > 0).sum() == 5


# The columns of predictions


@given(top_k=st.integers(1, 4), values=st.lists(st.integers(0, 3), min_size=4, max_size=4))
def test_top_k_has_the_most_probable_classes_best_first(top_k, values):
    p = torch.tensor([values], dtype=torch.float64) / 10
    (one,) = scores(rule(), p)
    row = Rows(rule(), top_k=top_k).cells(one)
    # of equal ones the first
    best = sorted(zip(p[0].tolist(), NAMES, strict=True), key=lambda pair: -pair[0])[:top_k]
    keys = [("probability", "class")]
    keys += [(f"probability_{i}", f"class_{i}") for i in range(2, top_k + 1)]
    assert [(row[value], row[name]) for value, name in keys] == best


@given(limit=st.floats(0, 1), top_k=st.sampled_from([None, 2]))
def test_abstain_below_says_unsure_and_keeps_the_numbers(limit, top_k):
    p = drawn(9)
    plain = rule()
    careful = rule(abstain_below=limit)
    rows = Rows(plain, top_k=top_k)
    both = zip(scores(plain, p), scores(careful, p), strict=True)
    for i, (sure, one) in enumerate(both):
        is_unsure = float(p[i].max()) < limit
        other = rows.cells(sure)
        assert rows.cells(one) == (other | {"class": "unsure"} if is_unsure else other)
        assert sure.label == one.labels[0] == NAMES[int(p[i].argmax())]


def test_abstain_below_with_a_class_called_unsure_is_refused():
    names = ["sure", "unsure"]
    with pytest.raises(ValueError, match="unsure"):
        rule(names, abstain_below=0.9)
    (one,) = scores(rule(names), torch.tensor([[0.4, 0.6]]))
    assert one.label == "unsure" and not one.abstention


def test_predicted_labels_are_those_above_their_thresholds(run, capsys):
    p = torch.tensor([[0.7, 0.25, 0.51, 0.1], [0.0, 0.1, 0.2, 0.1], [0.9] * 4]).double()
    rows = read(predict(run, p, thresholds=THRESHOLDS, bad={2: "torn"}))
    assert [row["labels"] for row in rows] == ["hot dog;größe", "", ""]
    assert [row["error"] for row in rows] == ["", "", "torn"]
    summary = capsys.readouterr().out.splitlines()[0]
    assert all(part in summary for part in ("1 größe", "1 without labels", "1 unreadable"))


# The file


def test_an_error_in_predict_keeps_the_file_of_before(run):
    target = predict(run, drawn(2))
    before = target.read_bytes()
    with pytest.raises(IndexError):  # there are fewer probabilities than images
        predict(run, drawn(4), [f"{i}.png" for i in range(9)])
    assert {path.name for path in run.path.iterdir()} == {"predictions.csv", "run.json"}
    assert target.read_bytes() == before


def test_predict_on_a_full_disk_keeps_the_rows_so_far_and_names_them(run):
    output = run.root / "out.csv"
    predict(run, drawn(2), output=str(output))
    before = output.read_bytes()
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, limit[1]))
    try:
        with pytest.raises(OSError, match="could not be written") as caught:
            predict(run, drawn(1000), output=str(output))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)
    (part,) = run.root.glob(".out.csv.*.part0")
    assert str(part) in str(caught.value) and part.stat().st_size == 20_000
    assert output.read_bytes() == before
    assert part.read_text().splitlines()[1].startswith("0.png,")
