"""The run of an ensemble: one checkpoint that predicts, is exported, resumed, and distinguished from others."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from promise import promise
from safetensors import safe_open
from safetensors.torch import save_file

import finetune
from finetune.cli import main
from finetune.data.decode import decode
from finetune.inference.predictor import Predictor
from finetune.models.backbones import build
from finetune.models.weight_files import EXPORTED

pytestmark = pytest.mark.slow

SMALL = [
    *(
        "--data.image_size",
        "28",
        "--data.batch_size",
        "16",
        "--data.num_workers",
        "0",
        "--model.backbone",
        "small_cnn",
    ),
    *(
        "--model.weights",
        "null",
        "--trainer.accelerator",
        "cpu",
        "--trainer.precision",
        "32-true",
        "--report",
        "false",
    ),
]
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
        fit = [
            "fit",
            colours,
            *SMALL,
            "--members",
            3,
            "--trainer.max_epochs",
            2,
            "--test_after_fit",
            "false",
        ]
        command(*fit)
        for kind in ("onnx", "safetensors"):
            command(
                "export",
                f"{RUN}/checkpoints/best.ckpt",
                "--format",
                kind,
                "--output",
                f"best.{kind}",
            )
        shutil.copy(f"{RUN}/checkpoints/best.ckpt", "best.ckpt")
    return root


def one_line(error: BaseException) -> str:
    text = str(error)
    assert "\n" not in text and len(text) < 300
    return text


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
    temperature = checkpoint["finetune"]["calibration"]["temperature"]

    def of(logits: torch.Tensor) -> np.ndarray:
        return (logits / temperature).softmax(1).numpy()

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


HOSTILE = [10**9, 33, 0, -1, "3", True, 2.0]


def no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    def make(*_: Any) -> None:
        raise AssertionError("a network was made of it")

    monkeypatch.setattr("finetune.models.image_classifier.build", make)


@pytest.mark.parametrize("num", HOSTILE)
def test_a_number_of_members_that_no_run_has_written_takes_no_memory(
    folder, monkeypatch, tmp_path, num
):
    known = torch.load(folder / "best.ckpt", weights_only=True)
    known["hyper_parameters"]["members"] = num
    torch.save(known, tmp_path / "other.ckpt")
    no_network(monkeypatch)
    with pytest.raises(ValueError) as caught:
        finetune.load(tmp_path / "other.ckpt", "cpu")
    assert "hyper_parameters.members is " in one_line(caught.value)


def test_no_command_takes_such_a_number(folder, colours, cli, monkeypatch, tmp_path):
    known = torch.load(folder / "best.ckpt", weights_only=True)
    known["hyper_parameters"]["members"] = HOSTILE[0]
    torch.save(known, tmp_path / "other.ckpt")
    no_network(monkeypatch)
    for act in (
        lambda: cli("predict", tmp_path / "other.ckpt", colours / "test", *EVALUATED),
        lambda: cli("test", tmp_path / "other.ckpt", colours, *EVALUATED),
        lambda: cli("export", tmp_path / "other.ckpt"),
    ):
        with pytest.raises(ValueError) as caught:
            act()
        assert "hyper_parameters.members is " in one_line(caught.value)


@pytest.mark.parametrize("num", HOSTILE)
def test_nor_does_that_of_an_exported_file(folder, monkeypatch, tmp_path, num):
    with safe_open(folder / "best.safetensors", "pt") as file:
        state, about = {name: file.get_tensor(name) for name in file.keys()}, file.metadata()  # noqa: SIM118
    plain = json.loads(about[EXPORTED])
    plain["model"]["members"] = num
    save_file(state, tmp_path / "other.safetensors", {EXPORTED: json.dumps(plain)})
    no_network(monkeypatch)
    reported = r"hyper_parameters\.members is .*from 1 to 32|is damaged: what it says"
    with pytest.raises(ValueError, match=reported) as caught:
        finetune.load(tmp_path / "other.safetensors", "cpu")
    one_line(caught.value)


@pytest.mark.parametrize("num", [1, 2, 4])
def test_another_number_than_the_file_holds_is_reported(folder, tmp_path, num):
    known = torch.load(folder / "best.ckpt", weights_only=True)
    known["hyper_parameters"]["members"] = num
    torch.save(known, tmp_path / "other.ckpt")
    with pytest.raises(ValueError, match="does not hold the weights") as caught:
        finetune.load(tmp_path / "other.ckpt", "cpu")
    one_line(caught.value)


@pytest.mark.parametrize("name", ["best.safetensors", RUN])
def test_training_can_not_begin_with_several(folder, colours, cli, tmp_path, name):
    with pytest.raises(ValueError, match="one network is needed") as caught:
        cli("fit", colours, *SMALL, "--epochs", 1, "--weights", folder / name)
    one_line(caught.value)
    assert not list(tmp_path.glob("runs/fit/*/checkpoints/*"))


@pytest.mark.parametrize("option", ["--weights", "--ckpt_path"])
def test_images_are_not_checked_with_several(folder, colours, cli, option):
    network = ["--backbone", "small_cnn", "--image_size", 28] if option == "--weights" else []
    with pytest.raises(ValueError, match="one network is needed") as caught:
        cli("check", colours, option, folder / "best.ckpt", *network)
    one_line(caught.value)


@pytest.fixture
def resume(folder, colours, cli, tmp_path) -> Callable[..., Path]:
    """Return a function that resumes a copy of the run and returns its folder."""
    shutil.copytree(folder / "runs", tmp_path / "runs")

    def act(*more: Any) -> Path:
        fit = [
            "fit",
            colours,
            *SMALL,
            "--trainer.max_epochs",
            3,
            "--test_after_fit",
            "false",
            "--resume",
        ]
        cli(*fit, *more)
        return tmp_path / RUN

    return act


def members_in(run: Path) -> int:
    return yaml.safe_load((run / "config.yaml").read_text())["model"]["members"]


def test_a_run_keeps_its_number_of_members(resume, tmp_path):
    last = tmp_path / RUN / "checkpoints/last.ckpt"
    before = last.read_bytes()
    with pytest.raises(ValueError) as caught:
        resume("--members", 2)
    assert "the run cannot continue with model.members 2 (was 3)" in one_line(caught.value)
    assert last.read_bytes() == before and members_in(tmp_path / RUN) == 3
    (tmp_path / RUN / "config.yaml").unlink()  # the checkpoint knows it, too
    with pytest.raises(ValueError) as caught:
        resume("--members", 2)
    assert "the run cannot continue with model.members 2 (was 3)" in one_line(caught.value)


def test_it_continues_with_as_many(resume):
    run = resume()
    last = torch.load(run / "checkpoints/last.ckpt", weights_only=True)
    assert (
        last["loops"]["fit_loop"]["epoch_progress"]["current"]["processed"] == 3
        and members_in(run) == 3
    )
