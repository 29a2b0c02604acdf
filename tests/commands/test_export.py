"""`finetune export`, and its files where a checkpoint is expected."""

import csv
import json
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import onnxruntime
import pytest
import torch
from colours import QUICK, draw_colours

from finetune.cli import main
from finetune.data.decode import decode
from finetune.inference import export_check
from finetune.inference.predictor import Predictor
from finetune.runs.checkpoint_io import read_checkpoint


@pytest.fixture(scope="module")
def run(tmp_path_factory, colours) -> Path:
    """A run of `fit`, with its best exported in two formats."""
    folder = tmp_path_factory.mktemp("exported")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        best = "runs/fit/version_0/checkpoints/best.ckpt"
        pictures = ["--verify_on", str(colours / "test")]
        for arguments in (
            ["fit", "--data.root", str(colours), *QUICK],
            ["export", best, *pictures],
            ["export", best, "--format", "safetensors", *pictures],
        ):
            with pytest.raises(SystemExit) as ended:
                main([str(argument) for argument in arguments])
            assert ended.value.code == 0
    return folder / "runs/fit/version_0"


def test_it_says_what_was_written_and_how_well_it_agrees(run, cli, tmp_path, capsys):
    cli("export", run / "checkpoints/best.ckpt", "--output", "new/some.onnx")
    first, second = capsys.readouterr().out.splitlines()
    assert first.startswith("new/some.onnx (") and first.endswith("some.onnx.json about it")
    assert second.startswith("held against the network on 64 drawn pictures: the same classes, largest difference")
    about = json.loads((tmp_path / "new/some.onnx.json").read_text())
    assert about["class_names"] == ["blue", "green", "red"]
    assert about["verified"]["num_pictures"] == 64 and about["verified"]["largest_difference"] <= 1e-4
    assert str(tmp_path) not in json.dumps(about)
    assert sorted(path.name for path in (tmp_path / "new").iterdir()) == ["some.onnx", "some.onnx.json"]


@pytest.mark.parametrize("suffix", [".onnx", ".safetensors"])
def test_its_files_predict_and_test_as_the_checkpoint_does(run, colours, cli, tmp_path, suffix):
    for name, path in (("own", run / "checkpoints/best.ckpt"), ("file", run / f"checkpoints/best{suffix}")):
        cli("predict", "--ckpt_path", path, "--data.predict", colours / "test", "--output", f"{name}.csv")
        cli("test", "--ckpt_path", path, "--data.root", colours, "--trainer.default_root_dir", name)
    rows = [list(csv.DictReader((tmp_path / f"{name}.csv").read_text().splitlines())) for name in ("own", "file")]
    assert len(rows[0]) == 30 and [row["class"] for row in rows[0]] == [row["class"] for row in rows[1]]
    for a, b in zip(*rows, strict=True):
        assert float(a["p_red"]) == pytest.approx(float(b["p_red"]), abs=1e-5)
    own, file = (json.loads((tmp_path / f"{name}/test/version_0/test.json").read_text()) for name in ("own", "file"))
    assert own["confusion_matrix"] == file["confusion_matrix"] and own["calibration"] == file["calibration"]
    assert own["test/loss"] == pytest.approx(file["test/loss"], abs=1e-5)


def test_what_an_onnx_can_t_have_is_told(run, colours, cli):
    onnx, pictures = run / "checkpoints/best.onnx", ["--data.predict", colours / "test"]
    with pytest.raises(ValueError, match=r"trainer\.strategy model_parallel can't be had with an \.onnx"):
        cli("predict", "--ckpt_path", onnx, *pictures, "--trainer.strategy", "model_parallel")
    with pytest.raises(ValueError, match="no data: give the folder of the pictures"):
        cli("test", "--ckpt_path", onnx)


def test_a_file_knows_what_it_has_seen(run, colours, cli):
    with pytest.raises(ValueError, match="has seen .* in training"):
        cli("test", "--ckpt_path", run / "checkpoints/best.onnx", "--data.root", colours / "train")


def test_plain_onnxruntime_says_what_predict_says(run, colours):
    session = onnxruntime.InferenceSession(run / "checkpoints/best.onnx", providers=["CPUExecutionProvider"])
    predictor = Predictor(run / "checkpoints/best.ckpt")
    picture = decode(str(next((colours / "test/red").iterdir())))
    probabilities, _ = session.run(None, {"images": predictor.prepare(picture)[None]})
    np.testing.assert_allclose(probabilities, predictor([picture]), rtol=0, atol=1e-5)


def test_a_file_that_disagrees_is_not_kept(run, cli, tmp_path, monkeypatch):
    opened = export_check.opened
    monkeypatch.setattr("finetune.commands.export.opened", lambda path: lambda x: opened(path)(x) * np.float32(0.9))
    with pytest.raises(ValueError, match="was not kept, for it does not say what the network says: on 64 drawn"):
        cli("export", run / "checkpoints/best.ckpt", "--format", "safetensors", "--output", "some.safetensors")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--output", "some.pt"], r"--output some\.pt: a file of --format onnx is a \.onnx"),
        (["--output", "."], r"--output \.: a file of --format onnx"),
        (["--verify_on", "gone"], "gone"),
    ],
)
def test_wrong_usage_is_told_before_the_work(run, cli, tmp_path, arguments, message):
    with pytest.raises((ValueError, FileNotFoundError), match=message):
        cli("export", run / "checkpoints/best.ckpt", *arguments)
    assert not list(tmp_path.iterdir())


def test_an_exported_file_is_no_checkpoint_to_train_or_export(run, colours, cli):
    with pytest.raises(ValueError, match="is an exported file: give the checkpoint"):
        cli("export", run / "checkpoints/best.onnx", "--output", "other.onnx")
    with pytest.raises(ValueError, match="is an exported file, from which nothing can go on"):
        cli("fit", "--data.root", colours, *QUICK, "--ckpt_path", run / "checkpoints/best.onnx")


@pytest.mark.parametrize(("missing", "command"), [("onnx", "export"), ("onnxruntime", "predict")])
def test_a_missing_package_is_named_with_what_brings_it(run, colours, cli, monkeypatch, missing, command):
    monkeypatch.setitem(sys.modules, missing, None)
    with pytest.raises(ValueError, match=r"pip install 'finetune\[export\]'"):
        if command == "export":
            cli("export", run / "checkpoints/best.ckpt", "--output", "some.onnx")
        else:
            cli("predict", "--ckpt_path", run / "checkpoints/best.onnx", "--data.predict", colours / "test")


def test_int8_is_measured_on_the_test_pictures_and_predicts(run, colours, cli, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("finetune.inference.quantize.timed", lambda *_: (2.0, 1.0))  # whatever this machine is
    monkeypatch.setattr("finetune.inference.quantize.POINT", 1.0)
    cli("export", run / "checkpoints/best.ckpt", "--quantize", "int8", "--output", "some.onnx", "--root", colours)
    assert "int8 on 30 test pictures: accuracy 0." in capsys.readouterr().out
    about = json.loads((tmp_path / "some.onnx.json").read_text())["quantized"]
    assert about["num_pictures"] == 30 and about["milliseconds"] == [2.0, 1.0]
    cli("predict", "--ckpt_path", "some.onnx", "--data.predict", colours / "test", "--output", "said.csv")
    assert len((tmp_path / "said.csv").read_text().splitlines()) == 31
    monkeypatch.setattr("finetune.inference.quantize.timed", lambda *_: (1.0, 2.0))
    with pytest.raises(ValueError, match=r"the int8 file was not kept: it is no faster here: .* on 30 test pictures"):
        cli("export", run / "checkpoints/best.ckpt", "--quantize", "int8", "--output", "b.onnx", "--root", colours)
    assert not list(tmp_path.glob("*b.onnx*"))


def test_int8_needs_the_pictures_of_the_run(run, cli, tmp_path):
    int8 = ["export", run / "checkpoints/best.ckpt", "--quantize", "int8", "--output", tmp_path / "some.onnx"]
    for arguments, message in (
        (["--root", "gone"], "there is no folder gone: --quantize int8 needs them, with --root FOLDER"),
        (["--format", "torch"], "--quantize int8 makes an .onnx, not --format torch"),
    ):
        with pytest.raises(ValueError, match=re.escape(message)):
            cli(*int8, *arguments)
    draw_colours(tmp_path / "others", train=3, test=1)
    for split in ("train", "test"):
        (tmp_path / "others" / split / "red").rename(tmp_path / "others" / split / "yellow")
    with pytest.raises(ValueError, match="others has other classes than the checkpoint"):
        cli(*int8, "--root", tmp_path / "others")


def test_training_begins_with_the_normalisation_of_its_safetensors(run, colours, cli, tmp_path):
    known = torch.load(run / "checkpoints/best.ckpt", weights_only=True)
    known["state_dict"] |= {"mean": torch.full((3, 1, 1), 100.0), "std": torch.full((3, 1, 1), 50.0)}
    torch.save(known, tmp_path / "other.ckpt")
    cli("export", "other.ckpt", "--format", "safetensors")
    fit = ["fit", "--data.root", colours, *QUICK, "--test_after_fit", "false"]
    cli(*fit, "--model.weights", "other.safetensors")
    state = read_checkpoint(tmp_path / "runs/fit/version_0/checkpoints/last.ckpt")["state_dict"]
    assert state["mean"].unique().tolist() == [100] and state["std"].unique().tolist() == [50]
    with pytest.raises(ValueError, match=r"training can't begin with .*best\.onnx: an \.onnx gives answers alone"):
        cli(*fit, "--model.weights", run / "checkpoints/best.onnx")


def test_the_lines_of_the_guide_run(run, colours, tmp_path):
    guide = (Path(__file__).parents[2] / "docs/export.md").read_text()
    (code,) = re.findall(r"```python\n(.*?)```", guide, re.S)
    for name in ("best.onnx", "best.onnx.json"):
        (tmp_path / name).write_bytes((run / "checkpoints" / name).read_bytes())
    (tmp_path / "picture.png").write_bytes(next((colours / "test/red").iterdir()).read_bytes())
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True)
    said, probability = done.stdout.split()
    assert said in ("blue", "green", "red") and 1 / 3 <= float(probability) <= 1
