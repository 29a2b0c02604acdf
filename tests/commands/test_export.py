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
from colours import QUICKEST, draw_colours
from extras import needs_coremltools, needs_openvino
from PIL import Image
from small_fits import scramble

from finetune.cli import main
from finetune.cli import run as run_command
from finetune.commands import export as export_command
from finetune.commands.export_target import put_file_in_place, workplace
from finetune.commands.int8_data import int8_data
from finetune.data.decode import decode
from finetune.data.seen_record import SeenRecord, unpack_record
from finetune.data.splits import hashes
from finetune.inference import any_size, export_check
from finetune.inference.coreml_package import COREML_FILES
from finetune.inference.predictor import Predictor
from finetune.runs.checkpoint_io import read_checkpoint
from finetune.runs.exported_files import ExportedCheckpoint

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


@needs_openvino
def test_a_model_of_openvino_is_two_files_and_their_description(run, cli, tmp_path, capsys):
    best = run / "checkpoints/best.ckpt"
    cli("export", best, "--output", "new/some.xml", "--format", "openvino")
    first, second = capsys.readouterr().out.splitlines()
    assert re.fullmatch(
        r"new/some\.xml and some\.bin \(\d+\.\d MB\), and some\.xml\.json about it", first
    )
    assert second.startswith("verified against the checkpoint on 64 synthetic images: same classes")
    names = ["some.bin", "some.xml", "some.xml.json"]
    assert sorted(path.name for path in (tmp_path / "new").iterdir()) == names
    about = json.loads((tmp_path / "new/some.xml.json").read_text())
    assert about["format"] == "openvino" and about["verified"]["num_pictures"] == 64
    for option in (["--quantize", "int8"], ["--input", "any_size"]):
        wanted = f"{' '.join(option)} makes an .onnx, not --format openvino"
        with pytest.raises(ValueError, match=re.escape(wanted)):
            cli("export", best, "--format", "openvino", *option)


@pytest.mark.parametrize(
    "suffix", [".onnx", ".safetensors", pytest.param(".xml", marks=needs_openvino)]
)
def test_its_files_predict_and_test_as_the_checkpoint_does(run, colours, tmp_path, own, suffix):
    if suffix == ".xml":
        export_command.export(str(run / "checkpoints/best.ckpt"), "openvino")
    rows, result = predicted_and_measured(run / f"checkpoints/best{suffix}", colours, tmp_path)
    own_rows, own_result = own
    assert len(rows) == 30 and [row["class"] for row in rows] == [row["class"] for row in own_rows]
    for a, b in zip(own_rows, rows, strict=True):
        assert float(a["p_red"]) == pytest.approx(float(b["p_red"]), abs=1e-5)
    assert own_result["confusion_matrix"] == result["confusion_matrix"]
    assert own_result["calibration"] == result["calibration"]
    assert own_result["test/loss"] == pytest.approx(result["test/loss"], abs=1e-5)


def test_an_onnx_is_tested_on_a_folder_that_is_named(run, cli):
    onnx = run / "checkpoints/best.onnx"
    with pytest.raises(ValueError, match="no data: pass the folder of images"):
        cli("test", "--ckpt_path", onnx)


def test_a_file_knows_what_it_has_seen(run, colours, cli):
    with pytest.raises(ValueError, match="has seen .* in training"):
        cli("test", "--ckpt_path", run / "checkpoints/best.onnx", "--data.root", colours / "train")


def test_plain_onnxruntime_says_what_predict_says(run, colours):
    session = onnxruntime.InferenceSession(
        run / "checkpoints/best.onnx", providers=["CPUExecutionProvider"]
    )
    predictor = Predictor(run / "checkpoints/best.ckpt")
    image = decode(str(next((colours / "test/red").iterdir())))
    probabilities, _ = session.run(None, {"images": predictor.prepare(image)[None]})
    np.testing.assert_allclose(probabilities, predictor([image]), rtol=0, atol=1e-5)


def test_a_file_that_disagrees_is_not_kept(run, cli, tmp_path, monkeypatch):
    load_exported, there = export_check.load_exported, []

    def spoilt(path):
        there.extend(tmp_path.rglob("*"))
        return lambda x: load_exported(path)(x) * np.float32(0.9)

    monkeypatch.setattr("finetune.commands.export.load_exported", spoilt)
    with pytest.raises(
        ValueError,
        match="file was discarded, since it does not predict as the checkpoint: on 64 synthetic",
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
    (tmp_path / ".best.onnx.f00d.tmp").write_text("of a process that was killed")

    fail_to_replace(ends_at, monkeypatch)
    with pytest.raises(OSError, match="the end"):
        put_file_in_place(tmp_path / "new", {"of": "new"}, target, about_file)
    assert contents(target) == ({"best.onnx": "old", "best.onnx.json": "new"}[ends_at], None)
    assert not list(tmp_path.glob(".*"))


@pytest.mark.parametrize("ends_at", ["best.bin", "best.xml"])
def test_weights_of_one_export_are_never_next_to_the_xml_of_another(tmp_path, monkeypatch, ends_at):
    target = tmp_path / "best.xml"
    about_file = tmp_path / "best.xml.json"
    for name in ("old", "new"):
        for suffix in (".xml", ".bin"):
            (tmp_path / f"{name}{suffix}").write_text(name)
    put_file_in_place(tmp_path / "old.xml", {"of": "old"}, target, about_file)
    assert target.with_suffix(".bin").read_text() == "old"

    fail_to_replace(ends_at, monkeypatch)
    with pytest.raises(OSError, match="the end"):
        put_file_in_place(tmp_path / "new.xml", {"of": "new"}, target, about_file)
    assert not target.exists() and not about_file.exists()
    monkeypatch.undo()
    put_file_in_place(tmp_path / "new.xml", {"of": "new"}, target, about_file)
    assert contents(target) == ("new", "new")
    assert target.with_suffix(".bin").read_text() == "new"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--output", "some.pt"], r"--out some\.pt: a file of --format onnx is a \.onnx$"),
        (["--output", "some.pt2"], r"is a \.onnx; --format torch writes a \.pt2$"),
        (["--output", "."], r"--out \.: a file of --format onnx"),
        (["--verify_on", "gone"], "gone"),
    ],
)
def test_wrong_usage_is_reported_before_the_work(run, cli, tmp_path, arguments, message):
    with pytest.raises((ValueError, FileNotFoundError), match=message):
        cli("export", run / "checkpoints/best.ckpt", *arguments)
    assert not list(tmp_path.iterdir())


def test_an_exported_file_is_no_checkpoint_to_train_or_export(run, colours, cli):
    with pytest.raises(
        ValueError, match="is an exported file: use the checkpoint from which it was exported"
    ):
        cli("export", run / "checkpoints/best.onnx", "--output", "other.onnx")
    with pytest.raises(ValueError, match="is an exported file, which cannot be resumed"):
        cli("fit", "--data.root", colours, *QUICKEST, "--ckpt_path", run / "checkpoints/best.onnx")


@needs_coremltools
def test_a_package_of_core_ml_says_that_it_was_not_run(run, cli, tmp_path, capsys):
    best = run / "checkpoints/best.ckpt"
    cli("export", best, "--format", "coreml", "--output", "new/some.mlpackage")
    first, second = capsys.readouterr().out.splitlines()
    assert re.fullmatch(r"new/some\.mlpackage \(\d+\.\d MB\)", first)
    assert second.startswith(
        "verified before the conversion against the checkpoint on 64 synthetic"
    )
    assert second.endswith("but it was not run: only Apple's systems can run it")
    package = tmp_path / "new/some.mlpackage"
    assert {str(path.relative_to(package)) for path in package.rglob("*") if path.is_file()} == {
        "finetune.json",
        *COREML_FILES,
    }
    about = json.loads((package / "finetune.json").read_text())
    assert about["class_names"] == ["blue", "green", "red"] and "verified" not in about
    assert about["verified_before_conversion"]["num_pictures"] == 64
    assert list(about["output"]) == ["classLabel", "classLabel_probs"]
    with pytest.raises(ValueError, match="coreml writes a folder, NAME.mlpackage"):
        cli("export", best, "--format", "coreml", "--output", "some.mlmodel")


def test_coremltools_is_named_with_what_brings_it(run, cli, monkeypatch):
    monkeypatch.setitem(sys.modules, "coremltools", None)
    with pytest.raises(ValueError, match=r"needs coremltools: pip install '\.\[coreml\]'"):
        cli("export", run / "checkpoints/best.ckpt", "--format", "coreml")


def test_openvino_is_named_with_what_brings_it(run, cli, monkeypatch):
    monkeypatch.setitem(sys.modules, "openvino", None)
    with pytest.raises(
        ValueError, match=r"need the package openvino: pip install '\.\[openvino\]'"
    ):
        cli("export", run / "checkpoints/best.ckpt", "--format", "openvino", "--output", "a.xml")


@pytest.mark.parametrize(("missing", "command"), [("onnx", "export"), ("onnxruntime", "predict")])
def test_a_missing_package_is_named_with_what_brings_it(
    run, colours, cli, monkeypatch, missing, command
):
    monkeypatch.setitem(sys.modules, missing, None)
    with pytest.raises(ValueError, match=r"pip install '\.\[export\]'"):
        if command == "export":
            cli("export", run / "checkpoints/best.ckpt", "--output", "some.onnx")
        else:
            cli(
                "predict",
                "--ckpt_path",
                run / "checkpoints/best.onnx",
                "--data.predict",
                colours / "test",
            )


def agreements(about: Path) -> set[str]:
    return {name for name in json.loads(about.read_text()) if name.startswith("verified")}


def test_int8_is_measured_on_the_test_images_and_predicts(
    run, colours, cli, tmp_path, capsys, monkeypatch
):
    # whatever this machine is
    monkeypatch.setattr("finetune.inference.quantize.time_in_turns", lambda *_: (2.0, 1.0))
    monkeypatch.setattr("finetune.inference.quantize.MAX_ACCURACY_LOSS", 1.0)
    cli(
        "export",
        run / "checkpoints/best.ckpt",
        "--quantize",
        "int8",
        "--output",
        "some.onnx",
        "--root",
        colours,
    )
    assert "int8 on 30 test images: accuracy " in capsys.readouterr().out
    about = json.loads((tmp_path / "some.onnx.json").read_text())["quantized"]
    assert about["num_pictures"] == 30 and about["milliseconds"] == [2.0, 1.0]
    assert agreements(tmp_path / "some.onnx.json") == {"verified_before_int8"}
    any_size = ["--input", "any_size", "--output", "any.onnx", "--root", colours]
    cli("export", run / "checkpoints/best.ckpt", "--quantize", "int8", *any_size)
    assert agreements(tmp_path / "any.onnx.json") == {
        "verified_before_int8",
        "verified_preparation",
    }
    images = np.random.default_rng(0).integers(0, 256, (2, 70, 50, 3), np.uint8)
    own, took = (
        Predictor(tmp_path / "some.onnx"),
        onnxruntime.InferenceSession(tmp_path / "any.onnx"),
    )
    np.testing.assert_allclose(
        took.run(None, {"images": images})[0], own(images), rtol=0, atol=1e-6
    )
    cli(
        "predict",
        "--ckpt_path",
        "some.onnx",
        "--data.predict",
        colours / "test",
        "--output",
        "said.csv",
    )
    assert len((tmp_path / "said.csv").read_text().splitlines()) == 31
    monkeypatch.setattr("finetune.inference.quantize.time_in_turns", lambda *_: (1.0, 2.0))
    with pytest.raises(
        ValueError,
        match=r"the int8 file was discarded: it is not faster on this machine: .* on 30 test images",
    ):
        cli(
            "export",
            run / "checkpoints/best.ckpt",
            "--quantize",
            "int8",
            "--output",
            "b.onnx",
            "--root",
            colours,
        )
    assert not list(tmp_path.glob("*b.onnx*"))


def test_int8_is_not_measured_on_what_was_trained_on(run, colours, cli, tmp_path):
    int8 = ["--quantize", "int8", "--output", tmp_path / "some.onnx", "--root"]
    # a folder of the training images alone
    with pytest.raises(ValueError, match=r"has seen .* in training"):
        cli("export", run / "checkpoints/best.ckpt", *int8, colours / "train")
    known = torch.load(run / "checkpoints/best.ckpt", weights_only=True)
    seen = unpack_record(known["finetune"]["seen"])
    names = np.concatenate(
        [seen.names, hashes(f"test/red/{path.name}" for path in (colours / "test/red").iterdir())]
    )
    sizes = np.concatenate([seen.sizes, np.zeros(len(names) - len(seen.names), np.int32)])
    known["finetune"]["seen"] = SeenRecord(names, sizes, seen.num_train).pack()
    torch.save(known, tmp_path / "other.ckpt")
    with pytest.raises(ValueError, match="has seen 10 of the 30 test images"):
        cli("export", tmp_path / "other.ckpt", *int8, colours)
    assert not (tmp_path / "some.onnx").exists()


def test_images_of_any_size_are_prepared_inside(run, colours, cli, tmp_path, capsys):
    cli(
        "export",
        run / "checkpoints/best.ckpt",
        "--input",
        "any_size",
        "--output",
        "any.onnx",
        "--verify_on",
        colours,
    )
    assert (
        "images of" in (output := capsys.readouterr().out)
        and ", crops of them included: same classes" in output
    )
    about = json.loads((tmp_path / "any.onnx.json").read_text())
    assert about["input"] == {"images": ["N", "H", "W", 3, "uint8 RGB"]}
    assert (
        about["preparation"].startswith("inside: resize until")
        and about["verified"]["largest_difference"] <= 1e-4
    )
    assert isinstance(read_checkpoint(tmp_path / "any.onnx"), ExportedCheckpoint)
    predictor = Predictor(run / "checkpoints/best.ckpt")
    session = onnxruntime.InferenceSession(
        tmp_path / "any.onnx", providers=["CPUExecutionProvider"]
    )
    for size in ((48, 31), (200, 300)):
        image = np.random.default_rng(0).integers(0, 256, (*size, 3), np.uint8)
        probabilities, _ = session.run(None, {"images": image[None]})
        np.testing.assert_allclose(probabilities, predictor([image]), rtol=0, atol=1e-5)
    for name, path in (("own", run / "checkpoints/best.ckpt"), ("file", tmp_path / "any.onnx")):
        cli(
            "predict",
            "--ckpt_path",
            path,
            "--data.predict",
            colours / "test",
            "--output",
            f"{name}.csv",
        )
    rows = [
        list(csv.DictReader((tmp_path / f"{name}.csv").read_text().splitlines()))
        for name in ("own", "file")
    ]
    for a, b in zip(*rows, strict=True):
        assert float(a["p_red"]) == pytest.approx(float(b["p_red"]), abs=1e-5)
    cli("sheet", "--ckpt_path", "any.onnx", "--pictures", colours / "test")
    assert (tmp_path / "sheet.png").is_file()


def test_a_preparation_that_disagrees_is_not_kept(of_any_size, cli, tmp_path, monkeypatch):
    prepend = any_size.prepend
    monkeypatch.setattr(
        any_size, "prepend", lambda source, target, size, *_: prepend(source, target, size, "whole")
    )
    with pytest.raises(
        ValueError,
        match="was discarded, .* on 96 synthetic images, crops of them included",
    ):
        cli("export", of_any_size / "some.ckpt", "--input", "any_size", "--output", "any.onnx")
    assert not list(tmp_path.iterdir())


def test_int8_needs_the_images_of_the_run(run, cli, tmp_path):
    int8 = [
        "export",
        run / "checkpoints/best.ckpt",
        "--quantize",
        "int8",
        "--output",
        tmp_path / "some.onnx",
    ]
    for arguments, message in (
        (
            ["--root", "gone"],
            "there is no folder gone: --quantize int8 needs the data set of the checkpoint: pass its",
        ),
        (["--format", "torch"], "--quantize int8 makes an .onnx, not --format torch"),
        (
            ["--quantize", "null", "--input", "any_size", "--format", "torch"],
            "--input any_size makes an .onnx, not",
        ),
    ):
        with pytest.raises(ValueError, match=re.escape(message)):
            cli(*int8, *arguments)
    draw_colours(tmp_path / "others", train=3, test=1)
    for split in ("train", "test"):
        (tmp_path / "others" / split / "red").rename(tmp_path / "others" / split / "yellow")
    with pytest.raises(
        ValueError, match="others/test has the class 'yellow', not in the training classes"
    ):
        cli(*int8, "--root", tmp_path / "others")


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
    with pytest.raises(
        ValueError, match=r"training cannot start from .*best\.onnx: an \.onnx file only predicts"
    ):
        cli(*fit, "--model.weights", run / "checkpoints/best.onnx")


@pytest.fixture(scope="module")
def of_any_size(run, colours, tmp_path_factory) -> Path:
    """A folder with an exported file that takes images of any size, and an image."""
    folder = tmp_path_factory.mktemp("any_size")
    shutil.copyfile(run / "checkpoints/best.ckpt", folder / "some.ckpt")
    scramble(folder / "some.ckpt")
    with pytest.raises(SystemExit) as ended:
        main(
            [
                "export",
                str(folder / "some.ckpt"),
                "--input",
                "any_size",
                "--output",
                str(folder / "any.onnx"),
            ]
        )
    assert ended.value.code == 0
    image = (
        np.random.default_rng(0).integers(0, 256, (5, 8, 3), np.uint8).repeat(13, 0).repeat(11, 1)
    )
    Image.fromarray(image).save(folder / "image.png")
    return folder


GUIDE = (Path(__file__).parents[2] / "docs/export.md").read_text()


def lines_of_the_guide(language: str) -> str:
    """Return the example with onnxruntime."""
    section = GUIDE.partition("## With onnxruntime alone")[2]
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


def test_the_lines_of_the_guide_run_in_python(of_any_size):
    code = lines_of_the_guide("python")
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=of_any_size, capture_output=True, text=True
    )
    assert_is_predicted(of_any_size, done)


@needs_openvino
def test_the_lines_of_the_guide_run_with_openvino(of_any_size):
    checkpoint = str(of_any_size / "some.ckpt")
    export_command.export(checkpoint, "openvino", str(of_any_size / "mushrooms.xml"))
    prepared = Predictor(checkpoint).prepare(decode(str(of_any_size / "image.png")))
    Image.fromarray(prepared).save(of_any_size / "prepared.png")
    section = GUIDE.partition("## OpenVINO\n")[2].partition("\n## ")[0]
    (code,) = re.findall(r"```python\n(.*?)```", section, re.S)
    without_telemetry = "import sys; sys.modules['openvino_telemetry'] = None\n"
    done = subprocess.run(
        [sys.executable, "-c", without_telemetry + code],
        cwd=of_any_size,
        capture_output=True,
        text=True,
    )
    assert_is_predicted(of_any_size, done)


def test_the_lines_of_the_guide_run_in_javascript(of_any_size):
    modules, node = os.environ.get("FINETUNE_TEST_NODE_MODULES"), shutil.which("node")
    if not modules or not node:
        pytest.skip(
            "there is no node, or FINETUNE_TEST_NODE_MODULES names no folder with onnxruntime-web and pngjs"
        )
    (of_any_size / "node_modules").symlink_to(Path(modules).resolve())
    (of_any_size / "classify.mjs").write_text(lines_of_the_guide("js"))
    done = subprocess.run([node, "classify.mjs"], cwd=of_any_size, capture_output=True, text=True)
    assert_is_predicted(of_any_size, done)


def test_int8_takes_the_classes_in_the_order_of_the_run(run, colours):
    checkpoint = torch.load(run / "checkpoints/best.ckpt", weights_only=True)
    names = ["red", "blue", "green"]
    data = int8_data(checkpoint, str(colours), names)
    assert data.class_names == names and "red" in str(data.splits["train"].paths[0])
