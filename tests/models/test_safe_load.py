"""Untrusted files: unsupported content is named in one line and never run."""

import copy
import pickle
import shutil
import zipfile
from pathlib import Path

import pytest
import torch
from PIL import Image
from promise import promise

from finetune.models.safe_load import load_safely
from finetune.models.weight_files import read_file
from finetune.runs.checkpoint_io import AtomicCheckpointIO, read_checkpoint


def test_no_such_checkpoint(tmp_path):
    with pytest.raises(FileNotFoundError, match="there is no checkpoint"):
        load_safely(tmp_path / "nowhere.ckpt")


WEIGHTS = {"state_dict": {"weight": torch.ones(100_000)}}


class Code:
    """Unpickled, it would leave a file."""

    def __init__(self, path: Path) -> None:
        self.path = str(path)

    def __reduce__(self):
        return open, (self.path, "w")


@promise("no-code")
@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("photo.jpg", r"begins with '\xff\xd8\xff\xe0"),
        ("fit.yaml", "begins with 'model:"),
        ("other.zip", "it is a compressed archive"),
        ("empty", "it is empty"),
        ("half", ""),
        ("code", "holds io.open, which is neither a tensor nor a plain value"),
        ("pickle", ""),
        ("folder", "it is a folder; pass the file in it"),
    ],
)
def test_a_file_that_is_no_checkpoint_is_named_in_a_line_and_not_run(tmp_path, name, reason):
    Image.new("RGB", (8, 8)).save(tmp_path / "photo.jpg")
    (tmp_path / "fit.yaml").write_text("model:\n  backbone: resnet18\n")
    (tmp_path / "empty").touch()
    (tmp_path / "folder").mkdir()
    shutil.make_archive(str(tmp_path / "other"), "zip", tmp_path, "fit.yaml")
    torch.save(WEIGHTS, tmp_path / "whole")
    full = (tmp_path / "whole").read_bytes()
    (tmp_path / "half").write_bytes(full[: len(full) // 2])
    torch.save({**WEIGHTS, "extra": Code(tmp_path / "ran")}, tmp_path / "code")
    (tmp_path / "pickle").write_bytes(pickle.dumps(Code(tmp_path / "ran")))
    reported = (
        "there is no checkpoint"
        if name == "folder"
        else "is not a checkpoint that can be loaded safely"
    )
    for read in (load_safely, read_checkpoint, AtomicCheckpointIO().load_checkpoint):
        with pytest.raises((ValueError, FileNotFoundError), match=reported) as caught:
            read(tmp_path / name)
        message = str(caught.value)
        assert (
            reason in message
            and "\n" not in message
            and "weights_only" not in message
            and len(message) < 300
        )
        assert repr(str(tmp_path / name)) in message
    assert not (tmp_path / "ran").exists()
    # the control: torch's own words
    with pytest.raises(pickle.UnpicklingError, match="weights_only"):
        torch.load(tmp_path / "photo.jpg", weights_only=True)


@pytest.mark.parametrize("name", ["best.ckpt", "model.onnx", "model.safetensors"])
def test_a_git_lfs_pointer_is_named(tmp_path, name):
    (tmp_path / name).write_text(
        "version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 5\n"
    )
    for read in (read_checkpoint, AtomicCheckpointIO().load_checkpoint):
        with pytest.raises(
            ValueError,
            match=f"{name} is a Git LFS pointer, not the file itself: run `git lfs pull`",
        ):
            read(tmp_path / name)


def test_what_torch_has_written_is_given_back(tmp_path):
    torch.save(WEIGHTS, tmp_path / "a.ckpt")
    assert torch.equal(
        load_safely(tmp_path / "a.ckpt")["state_dict"]["weight"], WEIGHTS["state_dict"]["weight"]
    )


def test_a_compressed_checkpoint_is_refused_before_it_takes_memory(tmp_path):
    torch.save(WEIGHTS, tmp_path / "stored.ckpt")
    with (
        zipfile.ZipFile(tmp_path / "stored.ckpt") as stored,
        zipfile.ZipFile(tmp_path / "a.ckpt", "w", zipfile.ZIP_DEFLATED) as deflated,
    ):
        for entry in stored.infolist():
            deflated.writestr(entry.filename, stored.read(entry))
    with zipfile.ZipFile(tmp_path / "b.ckpt", "w") as overlapping:
        overlapping.writestr("data", bytes(10_000))
        twin = copy.copy(overlapping.infolist()[0])
        overlapping.filelist.append(twin)  # two entries of the central directory for one record
    for read in (load_safely, read_checkpoint, AtomicCheckpointIO().load_checkpoint, read_file):
        for name in ("a.ckpt", "b.ckpt"):
            with pytest.raises(
                ValueError, match=rf"{name}.* is a compressed archive, or one whose"
            ):
                read(tmp_path / name)
