"""The demo with fewer images and epochs, and the losses of the sample run."""

from pathlib import Path
from unittest.mock import patch

import pytest
import yaml
from paths import ROOT

from finetune.demo import drawing
from finetune.demo.demo import demo
from finetune.distributed.signals import Interrupted
from finetune.fitting.plan import Plan
from finetune.fitting.time_budget import Costs
from finetune.runs.metrics_csv import read_metrics
from finetune.settings.all_commands import DemoSettings
from finetune.settings.configs import find
from finetune.settings.layers import Layer, read_config

GOLDEN = ROOT / "tests/golden/sample_losses.txt"


@pytest.fixture
def few_images(monkeypatch):
    monkeypatch.setattr(drawing, "NUM_SOURCE", {"train": 6, "val": 2, "test": 2})
    monkeypatch.setattr(drawing, "NUM_TARGET", {"train": 16, "val": 2, "test": 4})


@pytest.mark.slow
def test_demo_pretrains_fine_tunes_and_compares(few_images, cli, tmp_path, capsys):
    def short(command: str, name: str) -> Layer:
        config = yaml.safe_load(Path(find(name)).read_text())
        config["trainer"] |= {"max_epochs": 1, "accelerator": "cpu"}
        config["data"]["init_args"]["image_size"] = 28
        config.setdefault("model", {})["backbone"] = "small_cnn"
        (tmp_path / name).write_text(yaml.safe_dump(config))
        return read_config(command, str(tmp_path / name))

    with patch("finetune.demo.demo.read_config", short):
        cli("demo", "--root", "out")
    out = capsys.readouterr().out
    for name in ("source", "finetuned", "scratch"):
        run = tmp_path / "out" / name / "fit/version_0"
        assert (run / "checkpoints/best.ckpt").exists()
        assert str(run.relative_to(tmp_path)) in out
    assert (tmp_path / "out/finetuned/fit/version_0/report.html").exists()
    lines = [
        line for line in out.splitlines() if "fine-tuned from" in line or "from scratch" in line
    ]
    accuracies = [line.split()[-6:] for line in lines[:2]]
    assert len(accuracies) == 2
    assert demo.__doc__


@pytest.mark.slow
def test_losses_of_the_sample_run_are_golden(few_images, cli, tmp_path):
    """The first ten losses of the real command. The message of a commit that changes them explains why.

    They are in float64: in float32, the order of additions on a CPU changes them by 1e-3 within ten steps. Pixels that
    OpenCV and torch round differently on another CPU remain: 7e-4 without torch's code for AVX. A learning rate that
    is 1 % higher changes them by 6e-2.
    """
    options = ["--model.weights", "null", "--trainer.accelerator", "cpu", "--trainer.max_steps", 10]
    options += [
        "--trainer.log_every_n_steps",
        1,
        "--test_after_fit",
        "false",
        "--data.num_workers",
        0,
    ]
    cli("fit", "--config", "sample.yaml", *options, "--trainer.precision", "64-true")
    rows = read_metrics(tmp_path / "runs/fit/version_0/steps.csv")
    losses = [float(row["train/loss"]) for row in rows if row["train/loss"]]
    assert len(losses) == 10
    golden = [float(line) for line in GOLDEN.read_text().split()]
    assert losses == pytest.approx(golden, abs=5e-3)


def test_each_fit_has_one_device_and_ctrl_c_promises_nothing(
    few_images, cli, monkeypatch, tmp_path
):
    plans: list[Plan] = []

    def stopped(plan: Plan) -> None:
        plans.append(plan)
        raise Interrupted(2)

    costs = Costs(start=1.0, train=0.1, evaluate=0.01, decode=0.0, between=0.1)
    monkeypatch.setattr("finetune.fitting.minutes.measure", lambda *_: costs)
    monkeypatch.setattr("finetune.demo.demo.fit", stopped)
    with pytest.raises(Interrupted, match="^stopped by SIGINT$") as caught:  # there is no --resume
        demo(DemoSettings(root=str(tmp_path)))
    assert caught.value.exit_code == 130
    trainer = plans[0].settings.trainer
    assert trainer.devices == 1 and trainer.max_epochs == 6  # of the config, as there is time
