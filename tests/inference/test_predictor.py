"""A checkpoint as a function says what `finetune predict` writes."""

import csv

import numpy as np
import pytest
import torch

from finetune.data.decode import decode
from finetune.inference.predictor import Predictor


def test_probabilities_are_those_of_predict(checkpoint, colours, cli, tmp_path):
    cli("predict", "--ckpt_path", checkpoint, "--data.predict", colours / "test", "--trainer.precision", "32-true")
    with open(next(tmp_path.rglob("predictions.csv")), newline="") as file:
        rows = list(csv.DictReader(file))
    predictor = Predictor(checkpoint)
    assert predictor.class_names == ["blue", "green", "red"] and len(rows) == 30
    found = predictor([decode(row["path"]) for row in rows])
    assert found.dtype == np.float64 and found.shape == (30, 3)
    written = [[float(row[f"p_{name}"]) for name in predictor.class_names] for row in rows]
    # predict fuses batch norm into the convolutions, and writes seven digits
    np.testing.assert_allclose(found, written, rtol=0, atol=2e-6)
    one_by_one = [predictor([decode(row["path"])])[0] for row in rows]  # a picture's neighbours don't matter
    np.testing.assert_allclose(found, one_by_one, rtol=0, atol=1e-6)


def test_pictures_are_prepared_as_the_checkpoint_says(checkpoint):
    predictor = Predictor(checkpoint)
    picture = np.zeros((40, 80, 3), np.uint8)
    picture[:, :20] = 255  # `squash` keeps it, `shorter_side` would crop it away
    for side in (None, 120):
        prepared = predictor.prepare(picture, side)
        assert prepared.shape == (side or 32, side or 32, 3) and prepared[:, 0].min() > 200


def test_a_stranger_s_file_is_refused_in_a_line(tmp_path):
    torch.save({"state_dict": {}}, tmp_path / "other.ckpt")
    with pytest.raises(ValueError, match="other.ckpt"):
        Predictor(tmp_path / "other.ckpt")
