"""Values that can't be are refused before anything is fetched."""

from unittest.mock import patch

import pytest
from colours import QUICKEST

from finetune.data.datasets.image_folder import Hotdog

WRONG = [
    (["--lr", "-1"], r"--lr \(--model.optimizer.lr\): Invalid learning rate: -1.0"),
    (
        ["--optimizer", "AdamW", "--model.optimizer.weight_decay", "-1"],
        r"--optimizer \(--model.optimizer\): Invalid weight",
    ),
    (["--epochs=0"], r"nothing to train: --epochs \(--trainer.max_epochs\) is 0"),
    (["--members", "99"], "model.members must be a whole number from 1 to 32"),
    (["--model.layer_decay", "2"], "layer_decay must be above 0"),
    (
        ["--devices", "0,1"],
        r"--devices \(--trainer.devices\) 0,1: there is no GPU to name here; on a CPU",
    ),
    (["--size", "1000000"], "image_size must be at most 8192, got 1000000"),
]


@pytest.mark.parametrize(("wrong", "told"), WRONG)
def test_a_wrong_value_is_refused_before_data_or_weights_are_fetched(cli, tmp_path, wrong, told):
    data = ["--data", "Hotdog", "--data.root", str(tmp_path / "none")]
    at = QUICKEST.index("--model.weights")
    quick = [*QUICKEST[:at], *QUICKEST[at + 2 :]]  # weights would be fetched
    fetched = patch.object(Hotdog, "obtain", side_effect=ValueError("data are fetched"))
    with fetched as obtain, pytest.raises(ValueError, match=told):
        cli("fit", *data, *quick, *wrong)
    assert not obtain.called


def test_control_right_values_get_as_far_as_the_data(cli, tmp_path):
    fetched = patch.object(Hotdog, "obtain", side_effect=ValueError("data are fetched"))
    with fetched, pytest.raises(ValueError, match="data are fetched"):
        cli("fit", "--data", "Hotdog", "--data.root", str(tmp_path / "none"), *QUICKEST, "--devices", "2")
