"""Checkpoints on disk: the new one or the previous one, whole; and no code is run from them."""

import errno
import os
import pickle
import shutil
import threading
from pathlib import Path

import pytest
import torch
from PIL import Image

from finetune.runs.checkpoint_io import AtomicCheckpointIO, read_checkpoint
from finetune.system.files import link


def state(value: int) -> dict:
    """What our checkpoints have in common, large enough to be written in several pieces."""
    return {
        "state_dict": {"weight": torch.full((100_000,), float(value))},
        "hyper_parameters": {"class_names": ["a", "größe"]},
        "datamodule_hyper_parameters": {},
        "finetune": {},
        "global_step": value,
    }


def value(path: Path) -> int:
    checkpoint = read_checkpoint(path)
    assert torch.equal(checkpoint["state_dict"]["weight"], state(checkpoint["global_step"])["state_dict"]["weight"])
    return checkpoint["global_step"]


@pytest.fixture
def target(tmp_path) -> Path:
    return tmp_path / "run/checkpoints/last.ckpt"


def test_what_was_saved_is_loaded(target):
    io = AtomicCheckpointIO()
    for i in 1, 2:
        io.save_checkpoint(state(i), str(target))
        assert io.load_checkpoint(target)["hyper_parameters"] == {"class_names": ["a", "größe"]}
        assert value(target) == i and os.listdir(target.parent) == ["last.ckpt"]


def full_disk(error: Exception):
    """`torch.save` on a disk that takes half of it."""
    save = torch.save

    def write_half(checkpoint: dict, file) -> None:
        import io

        whole = io.BytesIO()
        save(checkpoint, whole)
        file.write(whole.getvalue()[: len(whole.getvalue()) // 2])
        file.flush()
        raise error

    return write_half


NO_SPACE = OSError(errno.ENOSPC, "No space left on device")
# torch's own words, as its writer puts the same thing.
TORCH_NO_SPACE = RuntimeError("[enforce fail at inline_container.cc:858] . PytorchStreamWriter failed writing file")


@pytest.mark.parametrize("error", [NO_SPACE, TORCH_NO_SPACE], ids=["OSError", "RuntimeError"])
@pytest.mark.parametrize("has_previous", [True, False])
def test_a_full_disk_leaves_the_previous_one_whole_and_nothing_else(target, monkeypatch, error, has_previous):
    if has_previous:
        AtomicCheckpointIO().save_checkpoint(state(1), target)
    monkeypatch.setattr(torch, "save", full_disk(error))
    with pytest.raises(OSError, match="last.ckpt could not be written") as caught:
        AtomicCheckpointIO().save_checkpoint(state(2), target)
    assert str(error) in str(caught.value) and "\n" not in str(caught.value)
    assert os.listdir(target.parent) == (["last.ckpt"] if has_previous else [])
    if has_previous:
        assert value(target) == 1


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
    for name in (".last.ckpt.123.tmp", ".last.ckpt.99999.tmp", ".best.ckpt.123.tmp", "last.ckpt.tmp", "notes.txt"):
        (target.parent / name).write_bytes(b"half")
    AtomicCheckpointIO().save_checkpoint(state(1), target)
    assert sorted(os.listdir(target.parent)) == [".best.ckpt.123.tmp", "last.ckpt", "last.ckpt.tmp", "notes.txt"]


def test_the_system_s_temporary_folder_is_not_used(target, tmp_path, monkeypatch):
    # Renaming from there is a plain copy where it is another file system.
    monkeypatch.setenv("TMPDIR", str(tmp_path / "nowhere"))
    monkeypatch.setattr("tempfile.tempdir", None)
    AtomicCheckpointIO().save_checkpoint(state(1), target)
    assert value(target) == 1


def test_it_is_on_the_disk_before_it_gets_its_name(target, monkeypatch):
    calls = []
    fsync, replace = os.fsync, os.replace
    monkeypatch.setattr(os, "fsync", lambda fd: (calls.append(os.readlink(f"/proc/self/fd/{fd}")), fsync(fd))[1])
    monkeypatch.setattr(os, "replace", lambda a, b: (calls.append("replace"), replace(a, b))[1])
    AtomicCheckpointIO().save_checkpoint(state(1), target)
    temporary = str(target.with_name(f".last.ckpt.{os.getpid()}.tmp"))
    assert calls == [temporary, "replace", str(target.parent)]


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


def test_no_such_checkpoint(tmp_path):
    for path in (tmp_path / "nowhere.ckpt", tmp_path):
        with pytest.raises(FileNotFoundError, match="there is no checkpoint"):
            read_checkpoint(path)


class Code:
    """Unpickled, it would leave a file."""

    def __init__(self, path: Path) -> None:
        self.path = str(path)

    def __reduce__(self):
        return open, (self.path, "w")


@pytest.mark.parametrize("kind", ["empty", "text", "half", "code", "pickle"])
def test_a_file_that_is_no_checkpoint_is_named_in_a_line_and_not_run(tmp_path, kind):
    path = tmp_path / "a.ckpt"
    torch.save(state(1), path)
    whole = path.read_bytes()
    torch.save({**state(1), "extra": Code(tmp_path / "ran")}, tmp_path / "code")
    path.write_bytes(
        {
            "empty": b"",
            "text": b"no checkpoint\n" * 100,
            "half": whole[: len(whole) // 2],
            "code": (tmp_path / "code").read_bytes(),
            "pickle": pickle.dumps(Code(tmp_path / "ran")),
        }[kind]
    )
    with pytest.raises(ValueError, match="is not a checkpoint that can be loaded safely") as caught:
        read_checkpoint(path)
    assert repr(str(path)) in str(caught.value) and "\n" not in str(caught.value)
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("photo.jpg", r"begins with b'\xff\xd8\xff\xe0"),
        ("fit.yaml", "begins with b'model:"),
        ("other.zip", "an archive of something else"),
        ("empty", "it is empty"),
        ("code", "holds io.open, which is neither a tensor nor a plain value"),
        ("folder", "it is a folder; give the file in it"),
    ],
)
def test_what_was_given_instead_is_said_and_never_to_load_it_unsafely(tmp_path, name, reason):
    Image.new("RGB", (8, 8)).save(tmp_path / "photo.jpg")
    (tmp_path / "fit.yaml").write_text("model:\n  backbone: resnet18\n")
    (tmp_path / "empty").touch()
    (tmp_path / "folder").mkdir()
    shutil.make_archive(str(tmp_path / "other"), "zip", tmp_path, "fit.yaml")
    torch.save({**state(1), "extra": Code(tmp_path / "ran")}, tmp_path / "code")
    for read in (read_checkpoint, AtomicCheckpointIO().load_checkpoint):
        with pytest.raises((ValueError, FileNotFoundError)) as caught:
            read(tmp_path / name)
        message = str(caught.value)
        assert reason in message and "\n" not in message and "weights_only" not in message and len(message) < 300
    assert not (tmp_path / "ran").exists()
    with pytest.raises(pickle.UnpicklingError, match="weights_only"):  # the control: torch's own words
        torch.load(tmp_path / "photo.jpg", weights_only=True)


@pytest.mark.parametrize("content", [{"weight": torch.zeros(1)}, {"state_dict": {}}, [1, 2], torch.zeros(2)])
def test_weights_alone_are_told_where_to_go(tmp_path, content):
    torch.save(content, tmp_path / "weights.pt")
    with pytest.raises(ValueError, match="not a checkpoint of `finetune fit`; plain weights go to --model.weights"):
        read_checkpoint(tmp_path / "weights.pt")


def test_ours_are_read_without_running_code(tmp_path):
    torch.save(state(3), tmp_path / "a.ckpt")
    assert torch.load(tmp_path / "a.ckpt", weights_only=True)["global_step"] == 3
    assert value(tmp_path / "a.ckpt") == 3


# best.ckpt as another name of last.ckpt


@pytest.mark.parametrize("can_link", [True, False])
def test_linked_is_the_same_whatever_was_there(tmp_path, monkeypatch, can_link):
    source, target = tmp_path / "last.ckpt", tmp_path / "best.ckpt"
    source.write_bytes(b"new")
    target.write_bytes(b"old")
    (tmp_path / f".best.ckpt.{os.getpid()}.tmp").write_bytes(b"of an earlier process with this number")
    if not can_link:

        def refuse(*_) -> None:
            raise OSError(errno.EPERM, "Operation not permitted")

        monkeypatch.setattr(os, "link", refuse)
    link(source, target)
    assert target.read_bytes() == b"new" and os.path.samefile(source, target) == can_link
    link(source, target)  # again, as after an epoch that wrote nothing new
    assert sorted(os.listdir(tmp_path)) == ["best.ckpt", "last.ckpt"]


def test_a_new_last_leaves_the_linked_best_as_it_is(target):
    AtomicCheckpointIO().save_checkpoint(state(1), target)
    best = target.with_name("best.ckpt")
    link(target, best)
    AtomicCheckpointIO().save_checkpoint(state(2), target)
    assert (value(best), value(target)) == (1, 2)


# When
