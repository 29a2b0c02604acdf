"""The files of a run: whatever fails while one is written, the old or the new one is there, never half of one."""

import errno
import itertools
import json
import os
import re
import resource
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from faults import before_each_write
from promise import promise

from finetune.models.backbones import build
from finetune.runs import checkpoint_io
from finetune.runs.checkpoint_facts import check_size
from finetune.runs.checkpoint_io import AtomicCheckpointIO, read_checkpoint
from finetune.runs.result_file import read_result, write_result
from finetune.system import files
from finetune.system.files import link, replace_text


def state(value: int) -> dict[str, Any]:
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


def save(path: Path, value: int) -> None:
    AtomicCheckpointIO().save_checkpoint(state(value), path)


def value_of(path: Path) -> int:
    checkpoint = read_checkpoint(path)
    value = checkpoint["global_step"]
    assert torch.equal(checkpoint["state_dict"]["weight"], state(value)["state_dict"]["weight"])
    return value


def link_one(path: Path, value: int) -> None:
    source = path.with_name(f"source{value}")
    source.write_text(str(value) * 100_000)
    link(source, path)
    source.unlink()


def number_in(path: Path) -> int:
    (value,) = set(path.read_text())
    return int(value)


Writer = tuple[str, Callable[[Path, int], None], Callable[[Path], int]]
WRITERS: list[Writer] = [
    ("last.ckpt", save, value_of),
    (
        "test.json",
        lambda path, value: write_result(path, {"class_names": [], "x": [value] * 50_000}),
        lambda path: int(*set(read_result(path)["x"])),
    ),
    (
        "run.json",
        lambda path, value: replace_text(path, json.dumps([value] * 50_000)),
        lambda path: int(*set(json.loads(path.read_text()))),
    ),
    ("best.ckpt", link_one, number_in),
]


@contextmanager
def failing(number: int, error: BaseException) -> Iterator[Iterator[int]]:
    """Let the n-th call that writes fail; yield the count of calls."""
    count = itertools.count()

    def fail() -> None:
        if next(count) == number:
            raise error

    with before_each_write(fail):
        yield count


@contextmanager
def limited(num_bytes: int) -> Iterator[None]:
    """No file may grow beyond this, as on a full disk."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def write_in_place(monkeypatch: pytest.MonkeyPatch) -> None:
    @contextmanager
    def in_place(target: Path) -> Iterator[Path]:
        yield target

    monkeypatch.setattr(files, "replacing", in_place)
    monkeypatch.setattr(checkpoint_io, "replacing", in_place)


@promise("complete-files", controls=[write_in_place])
@pytest.mark.parametrize(("name", "write", "read"), WRITERS, ids=[each[0] for each in WRITERS])
def test_after_each_failed_write_the_old_or_the_new_file_is_there(tmp_path, name, write, read):
    path = tmp_path / name
    for error in (OSError(errno.ENOSPC, "No space left on device"), KeyboardInterrupt()):
        for number in itertools.count():
            write(path, 1)
            is_written = False
            with suppress(OSError, KeyboardInterrupt), failing(number, error) as count:
                write(path, 2)
                is_written = True
            for source in tmp_path.glob("source*"):
                source.unlink()
            assert os.listdir(tmp_path) == [name]
            assert read(path) == 2 if is_written else read(path) in (1, 2), number
            if next(count) <= number:
                break
        assert number >= 2
    size = path.stat().st_size
    write(path, 1)
    for num_bytes in (0, 1, size // 2, size - 1):
        with limited(num_bytes), suppress(OSError):
            write(path, 2)
        for source in tmp_path.glob("source*"):
            source.unlink()
        assert os.listdir(tmp_path) == [name] and read(path) == 1


@pytest.fixture
def target(tmp_path: Path) -> Path:
    return tmp_path / "run/checkpoints/last.ckpt"


@promise("complete-files")
def test_a_reader_never_sees_a_part_of_a_checkpoint(target):
    save(target, 0)
    seen = []
    done = threading.Event()

    def watch() -> None:
        while not done.is_set():
            seen.append(value_of(target))

    watcher = threading.Thread(target=watch)
    watcher.start()
    for i in range(1, 30):
        save(target, i)
    done.set()
    watcher.join()
    assert seen == sorted(seen) and len(set(seen)) > 1


def test_a_checkpoint_is_on_the_disk_before_it_gets_its_name(target, monkeypatch):
    calls = []
    fsync, replace = os.fsync, os.replace
    monkeypatch.setattr(
        os, "fsync", lambda fd: (calls.append(os.readlink(f"/proc/self/fd/{fd}")), fsync(fd))[1]
    )
    monkeypatch.setattr(os, "replace", lambda a, b: (calls.append("replace"), replace(a, b))[1])
    save(target, 1)
    temporary, *rest = calls
    assert re.fullmatch(rf"{target.parent}/\.last\.ckpt\.[0-9a-f]{{8}}\.tmp", temporary)
    assert rest == ["replace", str(target.parent)]


def test_a_new_last_ckpt_leaves_the_linked_best_ckpt_as_it_is(target):
    save(target, 1)
    best = target.with_name("best.ckpt")
    link(target, best)
    save(target, 2)
    assert (value_of(best), value_of(target)) == (1, 2)
    assert AtomicCheckpointIO().load_checkpoint(best)["global_step"] == 1


# What a checkpoint fits


def test_a_network_of_another_image_size_is_refused_where_it_has_other_shapes():
    def checkpoint(backbone: str, size: int | None) -> dict[str, Any]:
        network = build(backbone, 2, size)
        weights = {f"network.{name}": value for name, value in network.state_dict().items()}
        weights["mean"] = torch.zeros(3, 1, 1)
        return {"hyper_parameters": {"network_size": size}, "state_dict": weights}

    vit, resnet = "timm/test_vit", "timm/test_resnet"
    with pytest.raises(ValueError, match="--data.image_size 64"):
        check_size(checkpoint(vit, 64), 48, build(vit, 2, 48))
    check_size(checkpoint(vit, 64), 64, build(vit, 2, 64))
    check_size(checkpoint(resnet, 64), 48, build(resnet, 2, 48))
