"""Checkpoints on disk: the new or the previous one, always complete."""

import errno
import os
import re
import resource
import threading
from pathlib import Path

import pytest
import torch
from promise import control, promise

from finetune.runs.checkpoint_io import AtomicCheckpointIO, read_checkpoint
from finetune.system.files import link


def state(value: int) -> dict:
    """What our checkpoints have in common, large enough to be written in several pieces."""
    return {
        "state_dict": {"weight": torch.full((100_000,), float(value))},
        "hyper_parameters": {
            "class_names": ["a", "größe"],
            "backbone": "small_cnn",
            "members": 1,
            "head_stages": 1,
        },
        "datamodule_hyper_parameters": {"image_size": 28},
        "finetune": {"version": "0.1.0", "torch": "2.15.0"},
        "global_step": value,
        "pytorch-lightning_version": "2.6.6",
    }


def value(path: Path) -> int:
    checkpoint = read_checkpoint(path)
    assert torch.equal(
        checkpoint["state_dict"]["weight"], state(checkpoint["global_step"])["state_dict"]["weight"]
    )
    return checkpoint["global_step"]


@pytest.fixture
def target(tmp_path) -> Path:
    return tmp_path / "run/checkpoints/last.ckpt"


def test_what_was_saved_is_loaded(target):
    io = AtomicCheckpointIO()
    for i in 1, 2:
        io.save_checkpoint(state(i), str(target))
        assert io.load_checkpoint(target)["hyper_parameters"]["class_names"] == ["a", "größe"]
        assert value(target) == i and os.listdir(target.parent) == ["last.ckpt"]


def full_disk(error: Exception):
    """`torch.save` on a disk that takes half of it."""
    save = torch.save

    def write_half(checkpoint: dict, file) -> None:
        import io

        full = io.BytesIO()
        save(checkpoint, full)
        file.write(full.getvalue()[: len(full.getvalue()) // 2])
        file.flush()
        raise error

    return write_half


NO_SPACE = OSError(errno.ENOSPC, "No space left on device")
# torch's own words, as its writer puts the same thing.
TORCH_NO_SPACE = RuntimeError(
    "[enforce fail at inline_container.cc:858] . PytorchStreamWriter failed writing file"
)
OF_A_GPU = RuntimeError("CUDA error: an illegal memory access was encountered")


@promise("complete-files")
@pytest.mark.parametrize(
    "error", [NO_SPACE, TORCH_NO_SPACE, OF_A_GPU], ids=["disk", "writer", "GPU"]
)
@pytest.mark.parametrize("has_previous", [True, False])
def test_a_full_disk_leaves_the_previous_one_whole_and_nothing_else(
    target, monkeypatch, error, has_previous
):
    if has_previous:
        AtomicCheckpointIO().save_checkpoint(state(1), target)
    monkeypatch.setattr(torch, "save", full_disk(error))
    with pytest.raises(OSError, match="last.ckpt could not be written") as caught:
        AtomicCheckpointIO().save_checkpoint(state(2), target)
    assert str(error) in str(caught.value) and "\n" not in str(caught.value)
    assert ("the disk is full: " in str(caught.value)) == (error is TORCH_NO_SPACE)
    assert os.listdir(target.parent) == (["last.ckpt"] if has_previous else [])
    if has_previous:
        assert value(target) == 1


def test_a_limit_of_the_file_size_is_no_full_disk(target):
    """torch's writer raises another error, whose message does not say why the write has failed."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, before[1]))
    try:
        with pytest.raises(OSError, match="could not be written: .*large"):
            AtomicCheckpointIO().save_checkpoint({"weight": torch.zeros(100_000)}, target)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert os.listdir(target.parent) == []


@control("complete-files")
def test_control_written_in_place_the_previous_one_is_lost(target, monkeypatch):
    AtomicCheckpointIO().save_checkpoint(state(1), target)
    monkeypatch.setattr(torch, "save", full_disk(NO_SPACE))
    with open(target, "wb") as file, pytest.raises(OSError):
        torch.save(state(2), file)
    with pytest.raises(ValueError, match="not a checkpoint"):
        read_checkpoint(target)


def test_ctrl_c_while_writing_leaves_nothing_behind(target, monkeypatch):
    AtomicCheckpointIO().save_checkpoint(state(1), target)
    monkeypatch.setattr(torch, "save", full_disk(KeyboardInterrupt()))
    with pytest.raises(KeyboardInterrupt):
        AtomicCheckpointIO().save_checkpoint(state(2), target)
    assert os.listdir(target.parent) == ["last.ckpt"] and value(target) == 1


def test_a_failed_rename_leaves_the_previous_one(target, monkeypatch):
    AtomicCheckpointIO().save_checkpoint(state(1), target)

    def refuse(*_) -> None:
        raise PermissionError(errno.EACCES, "Permission denied")

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", refuse)
        with pytest.raises(OSError, match="could not be written"):
            AtomicCheckpointIO().save_checkpoint(state(2), target)
    assert os.listdir(target.parent) == ["last.ckpt"] and value(target) == 1


def test_leftovers_of_killed_processes_are_removed_and_other_files_are_not(target):
    target.parent.mkdir(parents=True)
    for name in (
        ".last.ckpt.0a1b2c3d.tmp",
        ".last.ckpt.99999999.tmp",
        ".best.ckpt.0a1b2c3d.tmp",
        "last.ckpt.tmp",
        "notes.txt",
    ):
        (target.parent / name).write_bytes(b"half")
    AtomicCheckpointIO().save_checkpoint(state(1), target)
    assert sorted(os.listdir(target.parent)) == [
        ".best.ckpt.0a1b2c3d.tmp",
        "last.ckpt",
        "last.ckpt.tmp",
        "notes.txt",
    ]


def test_it_is_on_the_disk_before_it_gets_its_name(target, monkeypatch):
    calls = []
    fsync, replace = os.fsync, os.replace
    monkeypatch.setattr(
        os, "fsync", lambda fd: (calls.append(os.readlink(f"/proc/self/fd/{fd}")), fsync(fd))[1]
    )
    monkeypatch.setattr(os, "replace", lambda a, b: (calls.append("replace"), replace(a, b))[1])
    AtomicCheckpointIO().save_checkpoint(state(1), target)
    temporary, *rest = calls
    assert re.fullmatch(rf"{target.parent}/\.last\.ckpt\.[0-9a-f]{{8}}\.tmp", temporary)
    assert rest == ["replace", str(target.parent)]


@promise("complete-files")
def test_a_reader_never_sees_a_part(target):
    AtomicCheckpointIO().save_checkpoint(state(0), target)
    seen, done = [], threading.Event()

    def watch() -> None:
        while not done.is_set():
            seen.append(value(target))

    watcher = threading.Thread(target=watch)
    watcher.start()
    for i in range(1, 30):
        AtomicCheckpointIO().save_checkpoint(state(i), target)
    done.set()
    watcher.join()
    assert seen == sorted(seen) and len(set(seen)) > 1


# Reading


# best.ckpt as another name of last.ckpt


def test_a_new_last_leaves_the_linked_best_as_it_is(target):
    AtomicCheckpointIO().save_checkpoint(state(1), target)
    best = target.with_name("best.ckpt")
    link(target, best)
    AtomicCheckpointIO().save_checkpoint(state(2), target)
    assert (value(best), value(target)) == (1, 2)
