"""Checkpoints and configs of earlier versions still load, with class paths that name our modules.

tests/golden/of_0.1.0 is a short run of sample.yaml with LeNet, reduced in size: weights and moments are zeros, and the
record of images seen in training has four. Only its structure matters.
"""

import csv
import gzip
from pathlib import Path

import pytest
import torch
import yaml
from colours import draw_colours
from command_lines import ParseOnly
from paths import ROOT

import finetune
from finetune import public_paths
from finetune.runs.changes import compare_settings

OLD = ROOT / "tests/golden/of_0.1.0"


@pytest.fixture
def old_checkpoint(tmp_path: Path) -> Path:
    path = tmp_path / "last.ckpt"
    path.write_bytes(gzip.decompress((OLD / "last.ckpt.gz").read_bytes()))
    assert "datamodules" in torch.load(path, weights_only=True)["finetune"]["data_class"]
    return path


@pytest.mark.slow
def test_an_old_checkpoint_predicts_and_is_tested(old_checkpoint, cli, tmp_path):
    images = draw_colours(tmp_path / "colours", test=2) / "test"
    (images / "blue").rename(images / "hotdog")
    (images / "red").rename(images / "not-hotdog")
    options = [
        "--ckpt_path",
        old_checkpoint,
        "--trainer.accelerator",
        "cpu",
        "--data.num_workers",
        0,
    ]
    cli("predict", *options, "--data.predict", images / "hotdog")
    with open(tmp_path / "runs/predict/version_0/predictions.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    assert [row["class"] for row in rows] == ["hotdog"] * 2
    # of weights that are all zero
    assert all(float(row["p_hotdog"]) == pytest.approx(0.5, abs=0.05) for row in rows)
    (images / "green/00.png").unlink()
    (images / "green/01.png").unlink()
    (images / "green").rmdir()
    cli("test", *options, "--data.root", images.parent)


@pytest.mark.filterwarnings("ignore:LightningCLI's args parameter")
def test_an_old_config_begins_a_run(monkeypatch):
    monkeypatch.setenv("PL_GLOBAL_SEED", "0")
    assert "num_views" in (OLD / "config.yaml").read_text()
    assert "finetune.schedules.WarmupCosine" in (OLD / "config.yaml").read_text()
    parsed = ParseOnly(["fit", "--config", str(OLD / "config.yaml")]).config["fit"]
    assert parsed.model.scheduler.class_path == "finetune.WarmupCosine"
    assert parsed.model.scheduler.init_args.warmup == 0.25
    assert "num_views" not in parsed.data.init_args


def test_an_old_run_is_gone_on_with():
    before = yaml.safe_load((OLD / "config.yaml").read_text())
    now = yaml.safe_load(
        (OLD / "config.yaml").read_text().replace("finetune.schedules.", "finetune.")
    )
    assert compare_settings(public_paths(before), now, False, False) == ("", {})
    # control
    with pytest.raises(ValueError, match=r"cannot continue with model\.scheduler\.class_path"):
        compare_settings(before, now, False, False)


def test_public_paths_are_ours_and_lead_to_the_classes():
    assert public_paths("finetune.datamodules.Hotdog") == "finetune.Hotdog"
    assert public_paths({"a": ["finetune.datamodules.Hotdog", 1]}) == {"a": ["finetune.Hotdog", 1]}
    arguments = {
        "data": {"class_path": "finetune.Hotdog", "init_args": {"num_views": 3, "batch_size": 8}}
    }
    assert public_paths(arguments)["data"]["init_args"] == {"batch_size": 8}
    assert public_paths({"class_mapping": {"num_views": "a"}}) == {
        "class_mapping": {"num_views": "a"}
    }
    for path in (
        "finetune.backup.Hotdog",
        "finetune.datamodules.Hotdog/train",
        "mine.Hotdog",
        "finetune.datamodules.Other",
        "torch.optim.SGD",
        "finetune.Hotdog",
        "",
    ):
        assert public_paths(path) == path
    for name in set(finetune.__all__) - {"__version__"}:
        assert getattr(finetune, name).__name__ == name
