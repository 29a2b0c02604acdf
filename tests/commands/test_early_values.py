"""Invalid values are refused before anything is downloaded."""

from unittest.mock import patch

import pytest
from colours import QUICKEST
from tiers import sweep

from finetune.data.datasets.image_folder import Hotdog

SCHEDULERS = {
    "StepLR": {"step_size": 3},
    "CosineAnnealingLR": {"T_max": 5},
    "MultiStepLR": {"milestones": "[1, 2]"},
    "finetune.WarmupCosine": {"warmup": 0.1},
    "null": {},
}


@pytest.mark.parametrize(
    "name",
    sweep(SCHEDULERS, quick=["StepLR", "null"]),
)
def test_a_right_scheduler_gets_as_far_as_the_data(cli, tmp_path, name):
    arguments = [f"--model.scheduler.{key}={value}" for key, value in SCHEDULERS[name].items()]
    fetched = patch.object(Hotdog, "source_in", side_effect=ValueError("data are fetched"))
    with fetched, pytest.raises(ValueError, match="data are fetched"):
        root = ["--data", "Hotdog", "--data.root", str(tmp_path / "none")]
        cli("fit", *root, *QUICKEST, "--model.scheduler", name, *arguments)
