"""`--members`: several networks in one run, whose checkpoint predicts, is exported and is resumed."""

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from colours import QUICKEST
from promise import promise

import finetune
from finetune.cli import main
from finetune.data.decode import decode
from finetune.inference.predictor import Predictor
from finetune.models.backbones import build

pytestmark = pytest.mark.slow

SMALL = [*QUICKEST, "--test_after_fit", "false"]
EVALUATED = ["--data.num_workers", 0, "--trainer.accelerator", "cpu"]
RUN = "runs/fit/version_0"


def command(*arguments: Any) -> None:
    with pytest.raises(SystemExit) as ended:
        main([str(argument) for argument in arguments])
    assert ended.value.code == 0


@pytest.fixture(scope="module")
def folder(colours, tmp_path_factory) -> Path:
    """Where three networks were trained and exported."""
    root = tmp_path_factory.mktemp("ensemble")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(root)
        command("fit", colours, *SMALL, "--members", 3, "--trainer.max_epochs", 2)
        for kind in ("onnx", "safetensors"):
            best = f"{RUN}/checkpoints/best.ckpt"
            command("export", best, "--format", kind, "--output", f"best.{kind}")
        shutil.copy(f"{RUN}/checkpoints/best.ckpt", "best.ckpt")
    return root


def test_a_checkpoint_alone_says_the_mean_of_its_members(folder, colours):
    model = finetune.load(folder / "best.ckpt", "cpu")
    assert "3 × small_cnn at 28 pixels" in repr(model)
    paths = sorted(str(path) for path in colours.glob("test/*/*"))
    predicted = np.array([[*p.probabilities.values()] for p in model.predict(paths)])
    checkpoint = torch.load(folder / "best.ckpt", weights_only=True)
    state = checkpoint["state_dict"]
    pixels = torch.stack(
        [torch.from_numpy(model.predictor.prepare(decode(path))) for path in paths]
    )
    x = (pixels.permute(0, 3, 1, 2).float() - state["mean"]) / state["std"]
    each = []
    for i in range(3):
        member, prefix = build("small_cnn", 3).eval(), f"network.members.{i}."
        member.load_state_dict(
            {k.removeprefix(prefix): v for k, v in state.items() if k.startswith(prefix)}
        )
        with torch.no_grad():
            each.append(member(x).double())
    (scale,) = checkpoint["finetune"]["calibration"]["scale"]

    def of(logits: torch.Tensor) -> np.ndarray:
        return (logits * scale).softmax(1).numpy()

    mean = torch.stack(each).softmax(2).mean(0)
    # float32's rounding, of logits that the temperature makes no larger than some tens.
    np.testing.assert_allclose(predicted, of(mean.log()), rtol=0, atol=1e-5)
    # the controls: one alone, and without the temperature
    for wrong in (*map(of, each), mean.numpy()):
        assert np.abs(predicted - wrong).max() > 1e-3


@promise("export")
@pytest.mark.parametrize("kind", ["onnx", "safetensors"])
def test_an_exported_file_says_the_same_and_is_tested(folder, colours, cli, tmp_path, kind):
    about = json.loads((folder / f"best.{kind}.json").read_text())
    assert about["members"] == 3 and about["verified"]["largest_difference"] <= 1e-5
    paths = sorted(str(path) for path in colours.glob("test/*/*"))
    own, file = (Predictor(folder / f"best.{end}") for end in ("ckpt", kind))
    images = [decode(path) for path in paths]
    np.testing.assert_allclose(file(images), own(images), rtol=0, atol=1e-5)
    assert file.network_name == own.network_name == "3 × small_cnn"
    for name in ("ckpt", kind):
        cli(
            "test", folder / f"best.{name}", colours, *EVALUATED, "--trainer.default_root_dir", name
        )
    first, second = (
        json.loads((tmp_path / f"{name}/test/version_0/test.json").read_text())
        for name in ("ckpt", kind)
    )
    assert first["confusion_matrix"] == second["confusion_matrix"]
    assert first["test/loss"] == pytest.approx(second["test/loss"], abs=1e-5)


def test_resume_continues_with_as_many_members(folder, colours, cli, tmp_path):
    shutil.copytree(folder / "runs", tmp_path / "runs")
    run = tmp_path / RUN
    cli("fit", colours, *SMALL, "--trainer.max_epochs", 3, "--resume")
    last = torch.load(run / "checkpoints/last.ckpt", weights_only=True)
    assert last["loops"]["fit_loop"]["epoch_progress"]["current"]["processed"] == 3
    assert yaml.safe_load((run / "config.yaml").read_text())["model"]["members"] == 3
