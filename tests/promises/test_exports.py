"""`finetune export`: each file predicts as its checkpoint, or is not kept."""

import csv
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnxruntime
import pytest
import torch
from colours import QUICKEST
from PIL import Image
from probabilities import probabilities
from promise import control, promise
from small_fits import scramble

from finetune import load
from finetune.cli import run as run_command
from finetune.data.decode import decode
from finetune.inference import export_check
from finetune.inference.predictor import Predictor
from finetune.runs.checkpoint_io import read_checkpoint
from finetune.training.calibration import Calibration

TEMPERATURE = 0.25
GUIDE = (Path(__file__).parents[2] / "docs/export.md").read_text("utf-8")
# Largest difference of a probability. float32 in another order; int8 has 7 bits.
TOLERANCES = {"onnx": 1e-5, "safetensors": 1e-5, "int8": 0.3}


@pytest.fixture(scope="module")
def checkpoint(fitted_runs, tmp_path_factory) -> Path:
    """One with a temperature, whose weights separate any two images."""
    folder = tmp_path_factory.mktemp("exports")
    path = Path(shutil.copy(fitted_runs.single / "checkpoints/best.ckpt", folder / "some.ckpt"))
    scramble(path)
    known = torch.load(path, weights_only=True)
    calibration = Calibration("single", (1 / TEMPERATURE,), (0.0,), num_images=7)
    known["finetune"]["calibration"] = calibration.as_plain()
    torch.save(known, path)
    return path


@pytest.fixture(scope="module")
def exported(checkpoint, colours, tmp_path_factory) -> Callable[[str], Path]:
    """The checkpoint in a format, written once."""
    folder = tmp_path_factory.mktemp("exported")
    test = str(colours / "test")
    options = {
        "onnx": ["--verify_on", test],
        "safetensors": ["--format", "safetensors", "--verify_on", test],
        "int8": ["--quantize", test],
    }

    def export(kind: str) -> Path:
        path = folder / {"int8": "some.int8.onnx"}.get(kind, f"some.{kind}")
        if not path.exists():
            run_command(["export", str(checkpoint), "--out", str(path), *options[kind]])
        return path

    return export


@pytest.fixture(scope="module")
def expected(checkpoint, colours) -> dict[str, list[float]]:
    """Path of each test image to its probabilities by the checkpoint."""
    predictions = load(checkpoint, "cpu").predict(colours / "test")
    return {str(one.path): list(one.probabilities.values()) for one in predictions}


def predicted(cli: Callable[..., None], file: Path, images: Path) -> dict[str, list[float]]:
    """Return what `finetune predict` writes."""
    cli("predict", file, images, "--trainer.accelerator", "cpu", "--out", "predictions.csv")
    rows = csv.DictReader(Path("predictions.csv").read_text("utf-8").splitlines())
    return {
        row["path"]: [float(p) for name, p in row.items() if name.startswith("p_")] for row in rows
    }


@promise("export")
@control("export")
@pytest.mark.parametrize(
    "kind", ["onnx", "safetensors", pytest.param("int8", marks=pytest.mark.slow)]
)
def test_predict_with_an_exported_file_is_predict_with_the_checkpoint(
    exported, expected, colours, cli, kind
):
    found = predicted(cli, exported(kind), colours / "test")
    assert list(found) == list(expected)
    own = np.array(list(expected.values()))
    np.testing.assert_allclose(list(found.values()), own, rtol=0, atol=TOLERANCES[kind])
    # the control: images differ, and without the temperature the probabilities would be others
    assert np.ptp(own, axis=0).min() > TOLERANCES[kind]
    without = own**TEMPERATURE / (own**TEMPERATURE).sum(axis=1, keepdims=True)
    assert np.abs(without - own).max() > TOLERANCES[kind]


@pytest.mark.slow
def test_test_of_an_exported_file_is_that_of_the_checkpoint(checkpoint, exported, colours, cli):
    results = []
    for number, file in enumerate((checkpoint, exported("onnx"))):
        cli("test", file, colours, "--trainer.accelerator", "cpu")
        results.append(json.loads(Path(f"runs/test/version_{number}/test.json").read_text()))
    own, found = results
    assert own["confusion_matrix"] == found["confusion_matrix"]
    assert own["calibration"] == found["calibration"]
    assert own["test/loss"] == pytest.approx(found["test/loss"], abs=1e-5)


def test_the_file_next_to_an_export_describes_it_and_nothing_is_of_this_machine(
    exported, tmp_path, cli, checkpoint, capsys
):
    for kind in ("onnx", "safetensors"):
        file = exported(kind)
        about = json.loads(Path(f"{file}.json").read_text("utf-8"))
        assert about["class_names"] == ["blue", "green", "red"] and about["members"] == 1
        assert about["temperature"] == TEMPERATURE
        assert about["verified"]["num_images"] == 30 and about["verified"]["num_other"] == 0
        assert about["verified"]["largest_difference"] <= 1e-4
        for content in (file.read_bytes(), Path(f"{file}.json").read_bytes()):
            for place in (file.parent, checkpoint.parent, Path.home(), Path(os.__file__).parent):
                assert str(place).encode() not in content
            assert b".py" not in content
    cli("export", checkpoint, "--out", "new/some.onnx")
    assert "same classes" in capsys.readouterr().out
    # no file of weights next to it
    assert {path.name for path in Path("new").iterdir()} == {"some.onnx", "some.onnx.json"}


@control("export")
def test_an_export_that_disagrees_is_not_kept(checkpoint, cli, tmp_path, monkeypatch):
    load_exported = export_check.load_exported
    there: list[Path] = []

    def spoilt(path):
        there.extend(tmp_path.iterdir())
        return lambda x: load_exported(path)(x) * np.float32(0.9)

    monkeypatch.setattr("finetune.commands.export.load_exported", spoilt)
    with pytest.raises(ValueError, match="discarded"):
        cli("export", checkpoint, "--format", "safetensors", "--out", "some.safetensors")
    # a killed process leaves nothing either
    assert not list(tmp_path.iterdir()) and not there


@pytest.mark.slow
def test_export_with_quantize_says_how_far_int8_is_from_the_checkpoint(exported, capsys):
    about = json.loads(Path(f"{exported('int8')}.json").read_text("utf-8"))
    assert about["verified_before_int8"]["largest_difference"] <= 1e-4
    assert about["int8"]["num_images"] == 30
    assert 1e-4 < about["int8"]["largest_difference"] < TOLERANCES["int8"]


@pytest.mark.slow
def test_fit_from_a_safetensors_file_begins_with_its_normalisation(
    checkpoint, colours, cli, tmp_path
):
    known = torch.load(checkpoint, weights_only=True)
    known["state_dict"]["mean"] = torch.full((3, 1, 1), 100.0)
    known["state_dict"]["std"] = torch.full((3, 1, 1), 50.0)
    torch.save(known, tmp_path / "other.ckpt")
    cli("export", "other.ckpt", "--format", "safetensors")
    cli("fit", colours, *QUICKEST, "--test_after_fit", "false", "--weights", "other.safetensors")
    state = read_checkpoint(tmp_path / "runs/fit/version_0/checkpoints/last.ckpt")["state_dict"]
    assert state["mean"].unique().tolist() == [100] and state["std"].unique().tolist() == [50]


def lines_of_the_guide(language: str) -> str:
    """Return the example with onnxruntime alone."""
    section = GUIDE.partition("## With onnxruntime alone")[2].partition("\n## ")[0]
    (code,) = re.findall(rf"```{language}\n(.*?)```", section, re.S)
    return code


@pytest.fixture
def of_the_guide(exported, tmp_path) -> Path:
    """A folder with best.onnx, an image, and the image as the network takes it."""
    shutil.copyfile(exported("onnx"), tmp_path / "best.onnx")
    shutil.copyfile(f"{exported('onnx')}.json", tmp_path / "best.onnx.json")
    noise = np.random.default_rng(0).integers(0, 256, (5, 8, 3), np.uint8)
    image = noise.repeat(13, 0).repeat(11, 1)
    Image.fromarray(image).save(tmp_path / "image.png")
    prepared = Predictor(tmp_path / "best.onnx").prepare(image)
    Image.fromarray(prepared).save(tmp_path / "prepared.png")
    return tmp_path


def assert_is_predicted(checkpoint: Path, folder: Path, command: list[str]) -> None:
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=120)
    predictor = Predictor(checkpoint)
    (own,) = probabilities(predictor, [decode(str(folder / "image.png"))])
    assert done.returncode == 0, done.stderr
    name, probability = done.stdout.split()
    assert name == predictor.class_names[own.argmax()]
    assert float(probability) == pytest.approx(own.max(), abs=1e-4)
    assert own.max() < 0.999  # else nothing would show


@pytest.mark.slow
def test_the_lines_of_the_guide_to_export_run_in_python(checkpoint, of_the_guide):
    command = [sys.executable, "-c", lines_of_the_guide("python")]
    assert_is_predicted(checkpoint, of_the_guide, command)


@pytest.mark.slow
def test_the_lines_of_the_guide_to_export_run_in_javascript(checkpoint, of_the_guide):
    modules = os.environ.get("FINETUNE_TEST_NODE_MODULES")
    node = shutil.which("node")
    if not modules or not node:
        pytest.skip("needs node, and FINETUNE_TEST_NODE_MODULES with onnxruntime-web and pngjs")
    (of_the_guide / "node_modules").symlink_to(Path(modules).resolve())
    (of_the_guide / "classify.mjs").write_text(lines_of_the_guide("js"))
    assert_is_predicted(checkpoint, of_the_guide, [node, "classify.mjs"])


def test_onnxruntime_alone_predicts_from_an_exported_file(checkpoint, exported, colours):
    session = onnxruntime.InferenceSession(exported("onnx"), providers=["CPUExecutionProvider"])
    predictor = Predictor(checkpoint)
    images = [decode(str(path)) for path in sorted((colours / "test").rglob("*.png"))]
    prepared = np.stack([predictor.prepare(image) for image in images])
    found, logits = session.run(None, {"images": prepared})
    np.testing.assert_allclose(found, predictor.classify(prepared), rtol=0, atol=1e-5)
    with torch.no_grad():
        own = predictor.model(torch.from_numpy(prepared).permute(0, 3, 1, 2))
    # without the temperature
    np.testing.assert_allclose(logits, own, rtol=0, atol=1e-4)
