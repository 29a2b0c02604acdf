"""Unsupported settings of a fit are reported before it trains."""

from pathlib import Path

import torch
import yaml
from colours import QUICKEST


def test_weights_of_classes_in_a_file_become_values_of_the_run(colours, cli, tmp_path):
    fit = ["fit", "--data.root", colours, *QUICKEST, "--test_after_fit", "false"]
    Path("weights.yaml").write_text("red: 2\n")
    cli(*fit, "--class_weights", "weights.yaml")
    run = Path("runs/fit/version_0")
    assert yaml.safe_load((run / "config.yaml").read_text())["model"]["class_weights"] == {
        "red": 2.0
    }
    Path("weights.yaml").unlink()
    cli("fit", "--resume", run, "--trainer.max_epochs", 2)
    state = torch.load(run / "checkpoints/last.ckpt", weights_only=True)
    assert state["hyper_parameters"]["class_weights"] == {"red": 2.0}
    assert state["state_dict"]["class_weight"].tolist() == [1, 1, 2]
