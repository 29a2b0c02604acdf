"""`finetune export`, and exported files as arguments in place of a checkpoint."""

import csv
import errno
import json
import os
import re
import shutil
import stat
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import pytest
import torch
from colours import QUICKEST
from PIL import Image
from promise import control, promise
from small_fits import scramble

from finetune.cli import main
from finetune.cli import run as run_command
from finetune.commands.export_target import put_file_in_place, workplace
from finetune.data.decode import decode
from finetune.inference import export_check
from finetune.inference.predictor import Predictor
from finetune.runs.checkpoint_io import read_checkpoint

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def run(tmp_path_factory, colours, untested_run) -> Path:
    """A run of `fit`, with its best exported in two formats."""
    run = shutil.copytree(untested_run, tmp_path_factory.mktemp("exported") / "run")
    for kind in ("onnx", "safetensors"):
        given = [
            str(run / "checkpoints/best.ckpt"),
            "--format",
            kind,
            "--verify_on",
            str(colours / "test"),
        ]
        with pytest.raises(SystemExit) as ended:
            main(["export", *given])
        assert ended.value.code == 0
    return run


def test_it_says_what_was_written_and_how_well_it_agrees(run, cli, tmp_path, capsys):
    cli("export", run / "checkpoints/best.ckpt", "--output", "new/some.onnx")
    first, second = capsys.readouterr().out.splitlines()
    assert first.startswith("new/some.onnx (") and first.endswith("some.onnx.json about it")
    assert second.startswith(
        "verified against the checkpoint on 64 synthetic images: same classes, largest difference"
    )
    about = json.loads((tmp_path / "new/some.onnx.json").read_text())
    assert about["class_names"] == ["blue", "green", "red"]
    assert (
        about["verified"]["num_pictures"] == 64 and about["verified"]["largest_difference"] <= 1e-4
    )
    assert str(tmp_path) not in json.dumps(about)
    assert sorted(path.name for path in (tmp_path / "new").iterdir()) == [
        "some.onnx",
        "some.onnx.json",
    ]


def predicted_and_measured(
    checkpoint: Path, colours: Path, folder: Path
) -> tuple[list[dict[str, str]], dict[str, Any]]:
    """Return the rows of `finetune predict` and the result of `finetune test`."""
    on_cpu = ["--trainer.accelerator", "cpu", "--trainer.default_root_dir", str(folder)]
    out = folder / "out.csv"
    given = ["--data.predict", str(colours / "test"), "--output", str(out)]
    run_command(["predict", "--ckpt_path", str(checkpoint), *given, *on_cpu])
    run_command(["test", "--ckpt_path", str(checkpoint), "--data.root", str(colours), *on_cpu])
    result = json.loads((folder / "test/version_0/test.json").read_text())
    return list(csv.DictReader(out.read_text().splitlines())), result


@pytest.fixture(scope="module")
def own(run, colours, tmp_path_factory) -> tuple[list[dict[str, str]], dict[str, Any]]:
    """The probabilities of the checkpoint."""
    return predicted_and_measured(
        run / "checkpoints/best.ckpt", colours, tmp_path_factory.mktemp("own")
    )


@promise("export")
@pytest.mark.parametrize("suffix", [".onnx", ".safetensors"])
def test_its_files_predict_and_test_as_the_checkpoint_does(run, colours, tmp_path, own, suffix):
    rows, result = predicted_and_measured(run / f"checkpoints/best{suffix}", colours, tmp_path)
    own_rows, own_result = own
    assert len(rows) == 30 and [row["class"] for row in rows] == [row["class"] for row in own_rows]
    for a, b in zip(own_rows, rows, strict=True):
        assert float(a["p_red"]) == pytest.approx(float(b["p_red"]), abs=1e-5)
    assert own_result["confusion_matrix"] == result["confusion_matrix"]
    assert own_result["calibration"] == result["calibration"]
    assert own_result["test/loss"] == pytest.approx(result["test/loss"], abs=1e-5)


def test_plain_onnxruntime_says_what_predict_says(run, colours):
    session = onnxruntime.InferenceSession(
        run / "checkpoints/best.onnx", providers=["CPUExecutionProvider"]
    )
    predictor = Predictor(run / "checkpoints/best.ckpt")
    image = decode(str(next((colours / "test/red").iterdir())))
    probabilities, _ = session.run(None, {"images": predictor.prepare(image)[None]})
    np.testing.assert_allclose(probabilities, predictor([image]), rtol=0, atol=1e-5)


@control("export")
def test_a_file_that_disagrees_is_not_kept(run, cli, tmp_path, monkeypatch):
    load_exported, there = export_check.load_exported, []

    def spoilt(path):
        there.extend(tmp_path.rglob("*"))
        return lambda x: load_exported(path)(x) * np.float32(0.9)

    monkeypatch.setattr("finetune.commands.export.load_exported", spoilt)
    with pytest.raises(
        ValueError,
        match="file was discarded",
    ):
        cli(
            "export",
            run / "checkpoints/best.ckpt",
            "--format",
            "safetensors",
            "--output",
            "some.safetensors",
        )
    # a killed process leaves nothing next to the checkpoint
    assert not list(tmp_path.iterdir()) and not there


def contents(target: Path) -> tuple[str, str | None]:
    about_file = target.with_name(f"{target.name}.json")
    return target.read_text(), json.loads(about_file.read_text())[
        "of"
    ] if about_file.exists() else None


def test_exports_at_once_leave_the_file_and_the_words_of_one(tmp_path):
    target = tmp_path / "best.onnx"

    def keep(i: int) -> None:
        file = tmp_path / f"source{i}"
        file.write_text(str(i))
        put_file_in_place(file, {"of": str(i)}, target, target.with_name("best.onnx.json"))

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(keep, range(40)))
    file, output = contents(target)
    assert file == output and len(list(tmp_path.iterdir())) == 42


def test_links_and_modes_of_both_files_are_kept(tmp_path):
    disk, file = tmp_path / "disk", tmp_path / "source"
    disk.mkdir()
    file.write_text("new")
    names = ["best.onnx", "best.onnx.json"]
    for name in names:
        (disk / name).touch(0o600)
        (tmp_path / name).symlink_to(disk / name)
    put_file_in_place(file, {"of": "new"}, *(tmp_path / name for name in names))
    assert contents(tmp_path / "best.onnx") == ("new", "new")
    for name in names:
        assert (tmp_path / name).is_symlink() and stat.S_IMODE(
            (disk / name).stat().st_mode
        ) == 0o600


def test_a_full_disk_is_reported_with_its_place(tmp_path, monkeypatch):
    full = OSError(errno.ENOSPC, "No space left on device", "the source")
    monkeypatch.setattr(shutil, "copyfile", lambda *_: (_ for _ in ()).throw(full))
    with pytest.raises(OSError, match=r"No space left on device: '.*best\.onnx'"):
        put_file_in_place(tmp_path / "x", {}, tmp_path / "best.onnx", tmp_path / "best.onnx.json")
    assert not list(tmp_path.iterdir())
    with (
        pytest.raises(OSError, match=r"No space left on device: '.*TMPDIR sets another"),
        workplace(),
    ):
        raise OSError(errno.ENOSPC, "No space left on device")


def fail_to_replace(name, monkeypatch):
    """Let a process end before it puts a file of this name in place."""
    replace = os.replace

    def failing(source, target):
        if Path(target).name == name:
            raise OSError("the end")
        replace(source, target)

    monkeypatch.setattr(os, "replace", failing)


@pytest.mark.parametrize("ends_at", ["best.onnx", "best.onnx.json"])
def test_what_ends_in_between_leaves_no_words_about_another_file(tmp_path, monkeypatch, ends_at):
    target = tmp_path / "best.onnx"
    about_file = tmp_path / "best.onnx.json"
    (tmp_path / "new").write_text("new")
    (tmp_path / "old").write_text("old")
    put_file_in_place(tmp_path / "old", {"of": "old"}, target, about_file)
    (tmp_path / ".best.onnx.0000f00d.tmp").write_text("of a process that was killed")

    fail_to_replace(ends_at, monkeypatch)
    with pytest.raises(OSError, match="the end"):
        put_file_in_place(tmp_path / "new", {"of": "new"}, target, about_file)
    assert contents(target) == ({"best.onnx": "old", "best.onnx.json": "new"}[ends_at], None)
    assert not list(tmp_path.glob(".*"))


def test_int8_reports_how_many_classes_differ_and_how_long_an_image_takes(
    run, colours, cli, tmp_path, capsys
):
    shutil.copyfile(run / "checkpoints/best.ckpt", "some.ckpt")
    scramble(Path("some.ckpt"))
    cli("export", "some.ckpt", "--quantize", colours / "test")
    assert {path.name for path in tmp_path.iterdir()} == {
        "some.ckpt",
        "some.int8.onnx",
        "some.int8.onnx.json",
    }
    about = json.loads(Path("some.int8.onnx.json").read_text())
    assert about["verified_before_int8"]["largest_difference"] <= 1e-4
    found = about["int8"]
    assert found["num_pictures"] == 30 and 1e-4 < found["largest_difference"] < 0.3
    output = capsys.readouterr().out
    images = f"int8, compared with the checkpoint on 30 images of {colours / 'test'}"
    assert f"{images}: another class for {found['num_other']}, largest difference" in output
    assert f"{found['milliseconds_of_the_file']:.1f} ms with the file" in output
    cli("predict", "some.int8.onnx", colours / "test", "--out", "int8.csv")
    assert len(Path("int8.csv").read_text().splitlines()) == 31


def test_training_begins_with_the_normalisation_of_its_safetensors(run, colours, cli, tmp_path):
    known = torch.load(run / "checkpoints/best.ckpt", weights_only=True)
    known["state_dict"] |= {
        "mean": torch.full((3, 1, 1), 100.0),
        "std": torch.full((3, 1, 1), 50.0),
    }
    torch.save(known, tmp_path / "other.ckpt")
    cli("export", "other.ckpt", "--format", "safetensors")
    fit = ["fit", "--data.root", colours, *QUICKEST, "--test_after_fit", "false"]
    cli(*fit, "--model.weights", "other.safetensors")
    state = read_checkpoint(tmp_path / "runs/fit/version_0/checkpoints/last.ckpt")["state_dict"]
    assert state["mean"].unique().tolist() == [100] and state["std"].unique().tolist() == [50]


@pytest.fixture(scope="module")
def of_the_guide(run, tmp_path_factory) -> Path:
    """A folder with best.onnx, an image, and the image as the network takes it."""
    folder = tmp_path_factory.mktemp("guide")
    shutil.copyfile(run / "checkpoints/best.ckpt", folder / "some.ckpt")
    scramble(folder / "some.ckpt")
    with pytest.raises(SystemExit) as ended:
        main(
            [
                "export",
                str(folder / "some.ckpt"),
                "--output",
                str(folder / "best.onnx"),
            ]
        )
    assert ended.value.code == 0
    image = (
        np.random.default_rng(0).integers(0, 256, (5, 8, 3), np.uint8).repeat(13, 0).repeat(11, 1)
    )
    Image.fromarray(image).save(folder / "image.png")
    prepared = Predictor(folder / "some.ckpt").prepare(image)
    Image.fromarray(prepared).save(folder / "prepared.png")
    return folder


GUIDE = (Path(__file__).parents[2] / "docs/export.md").read_text()


def lines_of_the_guide(language: str) -> str:
    """Return the example with onnxruntime."""
    section = GUIDE.partition("## With onnxruntime alone")[2].partition("\n## ")[0]
    (code,) = re.findall(rf"```{language}\n(.*?)```", section, re.S)
    return code


def assert_is_predicted(folder: Path, done: subprocess.CompletedProcess) -> None:
    predictor = Predictor(folder / "some.ckpt")
    (own,) = predictor([decode(str(folder / "image.png"))])
    assert done.returncode == 0, done.stderr
    name, probability = done.stdout.split()
    assert name == predictor.class_names[own.argmax()]
    assert float(probability) == pytest.approx(own.max(), abs=1e-4)
    assert own.max() < 0.999  # or nothing would show


def test_the_lines_of_the_guide_run_in_python(of_the_guide):
    code = lines_of_the_guide("python")
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=of_the_guide, capture_output=True, text=True
    )
    assert_is_predicted(of_the_guide, done)


def test_the_lines_of_the_guide_run_in_javascript(of_the_guide):
    modules, node = os.environ.get("FINETUNE_TEST_NODE_MODULES"), shutil.which("node")
    if not modules or not node:
        pytest.skip(
            "there is no node, or FINETUNE_TEST_NODE_MODULES names no folder with onnxruntime-web and pngjs"
        )
    (of_the_guide / "node_modules").symlink_to(Path(modules).resolve())
    (of_the_guide / "classify.mjs").write_text(lines_of_the_guide("js"))
    done = subprocess.run([node, "classify.mjs"], cwd=of_the_guide, capture_output=True, text=True)
    assert_is_predicted(of_the_guide, done)
