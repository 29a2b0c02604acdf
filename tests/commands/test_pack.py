"""`finetune pack`: commands take the packed folder, and a fit on it ends in the weights of the folder."""

import errno
import io
import os
import re
import shutil
import tarfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import BinaryIO

import numpy as np
import pytest
import torch
from colours import QUICKEST
from object_server import ObjectServer, begin_test, object_server
from processes import finetune, start

from finetune import ImageFolderData
from finetune.commands.error_lines import one_line
from finetune.commands.options import OPTIONS
from finetune.commands.pack import pack
from finetune.data import contents, packing
from finetune.data.addresses import is_address
from finetune.data.checking.first_look import first_look
from finetune.data.datasets.listing import list_images as checked_images
from finetune.data.pack_place import INDEX
from finetune.data.prediction_paths import files_to_predict
from finetune.data.seen_record import add_digests
from finetune.data.storage import PACKS, normal_path, open_file, refresh
from finetune.data.tables.table_rows import TableOptions
from finetune.review.review_images import list_images
from finetune.system.messages import WrongUsage


@pytest.fixture(autouse=True)
def no_pack_in_use() -> Iterator[None]:
    PACKS.clear()
    yield
    PACKS.clear()


@pytest.fixture
def server(monkeypatch):
    with object_server() as running:
        yield from begin_test(running, monkeypatch)


def fit(
    cli: Callable[..., None], root: object, name: str, *more: object
) -> dict[str, torch.Tensor]:
    cli("fit", root, *QUICKEST, "--name", name, *more)
    path = Path("runs/fit", name, "checkpoints/last.ckpt")
    return torch.load(path, weights_only=True)["state_dict"]


def are_equal(first: dict[str, torch.Tensor], second: dict[str, torch.Tensor]) -> bool:
    return all(torch.equal(value, second[name]) for name, value in first.items())


def changed_copy(colours: Path, folder: Path) -> Path:
    """Return a copy in which one image is another one of the same class."""
    shutil.copytree(colours, folder)
    shutil.copy(folder / "train/red/01.png", folder / "train/red/00.png")
    return folder


@pytest.mark.parametrize("num_workers", [pytest.param(0, marks=pytest.mark.slow), 2])
def test_weights_are_those_of_the_folder(colours, cli, num_workers, capsys):
    options = ["--data.num_workers", num_workers, "--data.mixup", 0.2]
    local = fit(cli, colours, "local", *options)
    cli("pack", colours, "packed", "--shard_mb", 0.05)
    num_shards = len([*Path("packed").glob("shard-*.tar")])
    assert num_shards > 10
    assert f"packed 90 images into {num_shards} shards in packed" in capsys.readouterr().out
    assert are_equal(local, fit(cli, "packed", "packed", *options))
    cli("compare", "runs/fit/local", "runs/fit/packed")
    expected = f"of 30 test images, which have the same paths in {colours} and {Path('packed').absolute()}: no"
    assert expected in capsys.readouterr().out
    cli("pack", changed_copy(colours, Path("other")), "control")
    assert not are_equal(local, fit(cli, "control", "control", *options))


@pytest.mark.slow
def test_weights_on_two_processes_are_those_of_the_folder(colours, tmp_path):
    devices = [*QUICKEST, "--devices", 2, "--data.num_workers", 0]
    finetune("pack", colours, "packed", cwd=tmp_path)
    for place, name in ((colours, "local"), ("packed", "packed")):
        fitted = finetune("fit", place, *devices, "--name", name, cwd=tmp_path)
        assert fitted.returncode == 0, fitted.stderr
    first, second = (
        torch.load(tmp_path / f"runs/fit/{name}/checkpoints/last.ckpt", weights_only=True)
        for name in ("local", "packed")
    )
    assert are_equal(first["state_dict"], second["state_dict"])


WINDOW = ("--data.shuffle_window", 24)


def test_a_window_has_the_same_order_on_a_disk_and_in_object_storage(server, colours, cli):
    cli("pack", colours, "packed")
    local = fit(cli, "packed", "local", *WINDOW)
    server.put_folder(Path("packed"), "packed")
    PACKS.clear()
    there = fit(cli, f"{server.address}/packed", "there", *WINDOW, "--data.num_workers", 1)
    assert are_equal(local, there)
    assert not are_equal(local, fit(cli, "packed", "control"))
    path = Path("runs/fit/local/checkpoints/last.ckpt")
    checkpoint = torch.load(path, weights_only=True)
    assert checkpoint["datamodule_hyper_parameters"]["shuffle_window"] == 24
    with pytest.raises(
        ValueError, match=r"in another order with data\.shuffle_window 0 \(was 24\)"
    ):
        cli("fit", "packed", *QUICKEST, "--data.shuffle_window", 0, "--resume", "runs/fit/local")
    PACKS.clear()
    cli("test", "runs/fit/local", colours)  # which is not packed


def test_a_run_in_a_window_continues_in_mid_epoch(colours, cli):
    cli("pack", colours, "packed")
    untested = ["--test_after_fit", "false"]
    two = ["--trainer.max_epochs", 2, "--trainer.max_steps", -1, *WINDOW, *untested]
    complete = fit(cli, "packed", "complete", *two)
    for name, words in (("parts", WINDOW), ("control", ())):
        fit(cli, "packed", name, *words, "--trainer.max_steps", 3, *untested)
        more = ["--resume", f"runs/fit/{name}", "--allow_changes", name == "control"]
        cli("fit", "packed", *QUICKEST, *two, *more)
        path = Path("runs/fit", name, "checkpoints/last.ckpt")
        continued = torch.load(path, weights_only=True)
        assert continued["global_step"] == 8
        assert are_equal(complete, continued["state_dict"]) == (name == "parts")


@pytest.mark.slow
def test_processes_train_the_same_weights_in_a_window(colours, tmp_path):
    finetune("pack", colours, "packed", cwd=tmp_path)

    def weights(world_size: int, *more: object) -> dict[str, torch.Tensor]:
        name = f"{world_size}{len(more)}"
        options = [*QUICKEST, "--devices", world_size, "--trainer.precision", "64-true"]
        fitted = finetune("fit", "packed", *options, *more, "--name", name, cwd=tmp_path)
        assert fitted.returncode == 0, fitted.stderr
        path = tmp_path / f"runs/fit/{name}/checkpoints/last.ckpt"
        return torch.load(path, weights_only=True)["state_dict"]

    def difference(first: dict[str, torch.Tensor], second: dict[str, torch.Tensor]) -> float:
        return max(float((value - second[name]).abs().max()) for name, value in first.items())

    alone = weights(1, *WINDOW)
    for world_size in (2, 3):
        # sums in another order: 1e-16 a step in float64
        assert difference(alone, weights(world_size, *WINDOW)) < 1e-12
    assert difference(alone, weights(2)) > 1e-6  # the control


def test_a_window_without_effect_is_refused(colours, cli):
    with pytest.raises(WrongUsage, match=r"shuffle_window 24: .* not in one packed folder: pack"):
        fit(cli, colours, "refused", *WINDOW)
    cli("pack", colours, "packed")
    with pytest.raises(WrongUsage, match=r"--data\.shuffle_window has no effect with --freeze"):
        fit(cli, "packed", "refused", *WINDOW, "--model.freeze", "backbone")
    assert not Path("runs/fit/refused").exists()


def test_commands_take_the_packed_folder(colours, cli, capsys):
    cli("pack", colours, "packed")
    fit(cli, "packed", "a")
    cli("test", "runs/fit/a")
    cli("predict", "runs/fit/a", "packed/test/red", "--out", "red.csv")
    rows = Path("red.csv").read_text().splitlines()[1:]
    assert [row.split(",")[0] for row in rows] == [
        f"packed/test/red/{i:02d}.png" for i in range(10)
    ]
    cli("predict", "runs/fit/a", colours / "test/red", "--out", "folder.csv")
    folder_rows = Path("folder.csv").read_text().splitlines()[1:]
    assert [row.split(",")[1:] for row in rows] == [row.split(",")[1:] for row in folder_rows]
    cli("sheet", "runs/fit/a", "packed/test/red/00.png", "--out", "sheet.png")
    assert Path("sheet.png").exists()
    PACKS.clear()  # as in another process
    cli("report", "runs/fit/a")
    with pytest.raises(SystemExit) as ended:
        cli("check", "packed", "--out", "checked")
    assert ended.value.code == 1  # it has findings
    PACKS.clear()
    with pytest.raises(FileNotFoundError, match="glob 'packed/other'"):
        cli("predict", "runs/fit/a", "packed/other")
    capsys.readouterr()


@pytest.mark.slow
def test_a_pack_that_is_killed_is_not_taken_for_a_complete_one(colours, tmp_path):
    for name in ("blue", "red"):
        folder = tmp_path / "photos/train" / name
        folder.mkdir(parents=True)
        shutil.copy(colours / "train" / name / "00.png", folder / "0.png")
        for i in range(1, 5000):
            os.link(folder / "0.png", folder / f"{i}.png")
    killed = start("pack", "photos", "packed", "--shard_mb", 1, cwd=tmp_path)
    deadline = time.monotonic() + 60
    while not (tmp_path / "packed/shard-00003.tar").exists():
        assert killed.poll() is None and time.monotonic() < deadline, killed.stderr
        time.sleep(0.01)
    killed.kill()
    killed.wait()
    assert not (tmp_path / "packed" / INDEX).exists()
    for command, expected in (
        ("fit packed", "without index.jsonl, which is written last"),
        ("pack photos packed", "not empty"),
    ):
        again = finetune(*command.split(), cwd=tmp_path)
        assert again.returncode and expected in again.stderr
        assert len(again.stderr.splitlines()) == 1
    finetune("pack", "photos", "other", "--shard_mb", 1, cwd=tmp_path)  # the control
    assert (tmp_path / "other" / INDEX).exists()


def test_review_and_check_see_the_images_of_the_folder(colours, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    pack(str(colours), "packed")
    reviewed = list_images("packed")
    original = list_images(colours)
    assert reviewed.names == original.names
    assert [reviewed.labels(i) for i in range(90)] == [original.labels(i) for i in range(90)]
    listed = checked_images("packed")
    assert [listed.name(i) for i in range(90)] == [
        checked_images(colours).name(i) for i in range(90)
    ]
    with open_file(reviewed.listing.paths[5]) as file:
        assert file.read() == Path(original.listing.paths[5]).read_bytes()


def test_a_packed_table_is_taken_for_its_table(colours, cli):
    paths = sorted((colours / "train").rglob("*.png"))
    lines = [f"{path.relative_to(colours)},{'ab'[i % 2]}" for i, path in enumerate(paths)]
    Path("labels.csv").write_text("\n".join(["path,label", *lines]) + "\n")
    cli("pack", "labels.csv", "packed", "--root", colours)
    from_table = fit(cli, "labels.csv", "table", "--data.root", colours)
    from_pack = fit(cli, "packed", "packed")
    assert are_equal(from_table, from_pack)
    assert "packed/index.jsonl" in Path("runs/fit/packed/config.yaml").read_text()


@pytest.mark.parametrize("place", [".", INDEX])
def test_the_packed_folder_may_be_the_working_directory(colours, tmp_path, monkeypatch, place):
    source = colours
    if place == INDEX:
        source = tmp_path / "labels.csv"
        paths = sorted(colours.rglob("*.png"))
        lines = [f"{path.relative_to(colours)},{path.parent.name}" for path in paths]
        source.write_text("\n".join(["path,label", *lines]) + "\n")
    there = tmp_path / "packed"
    pack(str(source), str(there), root=None if place == "." else str(colours))
    PACKS.clear()
    monkeypatch.chdir(there)
    data = ImageFolderData(**{"root" if place == "." else "table": place}, num_workers=0)
    data.read()
    assert sum(map(len, data.splits.values())) == 90
    assert data.splits["train"].read(0).shape == (48, 56, 3)
    assert normal_path(".") == str(there)
    monkeypatch.chdir(colours)  # the control
    assert normal_path(".") == "."


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["{colours}"], "finetune pack FOLDER OUT"),
        (["{colours}", "a", "b"], "finetune pack FOLDER OUT"),
        (["{colours}", "out", "--shard_mb", 0], "shard_mb must be more than 0"),
        (["{colours}", "{colours}/packed"], "name a folder outside of it"),
        (["{colours}", "full"], "full is not empty"),
        (["{colours}", "full/file"], "full/file is a file"),
        (["{colours}", "out", "--root", "full"], "--root is for tables"),
        (["nothing", "out"], "does not exist"),
        (["", "out"], "folder of images is empty"),
        (["{colours}", ""], "OUT is empty"),
        (["s3://photos/a", "s3://photos/a/packed"], "name a folder outside of it"),
        (["{colours}", "s3://user:word@server/out"], "a user name, a password or a port"),
    ],
)
def test_wrong_usage_is_one_line(colours, cli, words, expected):
    Path("full").mkdir()
    Path("full/file").touch()
    with pytest.raises((WrongUsage, FileNotFoundError), match=expected):
        cli("pack", *[str(word).format(colours=colours) for word in words])
    assert not Path("out", INDEX).exists()


def test_messages_name_only_options_that_the_command_has(colours, cli):
    Path("empty/b").mkdir(parents=True)
    Path("back/a").mkdir(parents=True)
    Path("back/b").mkdir()
    for folder in ("empty/a", "back/a", "back/b"):
        Path(folder).mkdir(exist_ok=True)
        shutil.copy(colours / "train/red/00.png", folder)
    Path("back/a/link").symlink_to("..")
    lines = {"missing": "none.png,x", "both": "empty/a/00.png,x;y|z", "split": "empty/a/00.png,"}
    for name, line in lines.items():
        Path(f"{name}.csv").write_text(f"path,label\n{line}\n")
    Path("unknown.csv").write_text("where,what\nempty/a/00.png,x\n")
    faulty = ["empty", "back", "unknown.csv", *(f"{name}.csv" for name in lines)]
    named: dict[str, set[str]] = {}
    for command, *more in (["fit"], ["pack", "out"], ["check"]):
        for place in faulty:
            with pytest.raises((ValueError, OSError, SystemExit)) as caught:
                cli(command, place, *more)
            line = "" if isinstance(caught.value, SystemExit) else one_line(caught.value)
            named.setdefault(command, set()).update(re.findall(r"--([a-z_.]+)", line))
    for command, options in named.items():
        assert options <= OPTIONS[command].keys(), command
    assert named["pack"] == {"root", "columns"}
    assert {"data.on_bad_image", "data.exclude"} <= named["fit"]  # the control


def test_a_dangling_link_is_named_as_such(colours, cli):
    shutil.copytree(colours, "photos")
    link = Path("photos/train/red/link.png")
    link.symlink_to("gone.png")
    for command in (["pack", "photos", "out"], ["fit", "photos", *QUICKEST]):
        with pytest.raises(OSError) as caught:
            cli(*command)
        line = one_line(caught.value)
        assert line == f"The target of this link does not exist: {link.absolute()}"
    link.unlink()
    cli("pack", "photos", "out")  # the control


@pytest.mark.parametrize(
    ("removed", "expected"),
    [
        (INDEX, "packed has shards of a packed folder without index.jsonl"),
        ("shard-00000.tar", "has the index.jsonl of a packed folder without shard-00000.tar"),
    ],
)
def test_a_part_of_a_packed_folder_is_recognised(colours, cli, removed, expected):
    cli("pack", colours, "packed")
    Path("packed", removed).rename("moved")
    for command in (["fit", "packed"], ["check", "packed"], ["pack", "packed", "again"]):
        PACKS.clear()
        with pytest.raises(ValueError, match=f"{expected}.* pack the images again"):
            cli(*command)
    PACKS.clear()
    with pytest.raises(FileNotFoundError, match=expected):
        files_to_predict("packed")
    Path("moved").rename(Path("packed", removed))
    PACKS.clear()
    assert len(files_to_predict("packed")) == 90  # the control


def test_a_table_that_was_packed_to_object_storage_is_copied(server, colours, cli, capsys):
    paths = sorted((colours / "train").rglob("*.png"))
    lines = [f"{path.relative_to(colours)},{'ab'[i % 2]}" for i, path in enumerate(paths)]
    Path("labels.csv").write_text("\n".join(["path,label", *lines]) + "\n")
    there = f"{server.address}/packed"
    cli("pack", "labels.csv", there, "--root", colours)
    assert f"finetune fit index.jsonl --data.root {there}" in capsys.readouterr().out
    with pytest.raises(WrongUsage, match=f"copy its table {there}/index.jsonl, and pass the copy"):
        fit(cli, there, "refused")
    Path(INDEX).write_bytes(server.objects[f"packed/{INDEX}"])
    PACKS.clear()
    from_pack = fit(cli, INDEX, "packed", "--data.root", there)
    assert are_equal(from_pack, fit(cli, "labels.csv", "table", "--data.root", colours))
    PACKS.clear()
    cli("predict", "runs/fit/table", f"{there}/train/red", "--out", "red.csv")
    assert len(Path("red.csv").read_text().splitlines()) == 21
    PACKS.clear()
    assert list(files_to_predict(f"{there}/train/red/03.png")) == [f"{there}/train/red/03.png"]
    with pytest.raises(FileNotFoundError, match=f"'{there}/other' does not exist"):  # the control
        files_to_predict(f"{there}/other")


def test_packs_in_object_storage_train_the_same_weights(server, colours, cli):
    local = fit(cli, colours, "local")
    cli("pack", colours, f"{server.address}/packed", "--shard_mb", 0.2)
    names = sorted(path.rpartition("/")[2] for path in server.objects)
    assert names == [INDEX, *(f"shard-{i:05}.tar" for i in range(len(names) - 1))]
    server.requests.clear()
    PACKS.clear()
    there = fit(cli, f"{server.address}/packed", "there", "--data.num_workers", 2)
    assert are_equal(local, there)
    assert server.requests["LIST"] == 1
    results = PACKS[f"{server.address}/packed"].results("")
    assert results is not None and len(results) == 90  # read once for all checks
    server.put_folder(changed_copy(colours, Path("other")), "other")
    cli("pack", f"{server.address}/other", f"{server.address}/control")
    assert not are_equal(local, fit(cli, f"{server.address}/control", "control"))


@pytest.mark.parametrize("num_cached", [10**5, pytest.param(0, id="control")])
def test_the_checks_before_a_fit_request_each_block_once(server, colours, monkeypatch, num_cached):
    pack(str(colours), f"{server.address}/packed")
    monkeypatch.setattr(contents, "_MOST_CACHED", num_cached)
    server.requests.clear()
    looks = []
    seen = []
    for root in (colours, f"{server.address}/packed"):
        data = ImageFolderData(str(root), num_workers=0)
        data.read()
        seen.append(add_digests(data.seen, data.splits["train"], data.splits["val"]).digests)
        num_digests = server.requests["GET"]
        looks.append(first_look(data.splits, data.class_names, data.scanned.folder).plain())
    assert looks[0] == looks[1] and np.array_equal(seen[0], seen[1])
    assert len(set(seen[1].tolist())) == 60  # the control
    assert num_digests == 7  # the index, the block of train, and five parts of it for the 7 of val
    num_requests = server.requests["GET"]
    assert num_requests == 37 if num_cached else num_requests > 37  # each image of test


@pytest.fixture(params=["remote", "local"])
def there(request, server, tmp_path) -> str:
    """A packed folder that does not exist yet, in object storage or on a disk."""
    return f"{server.address}/packed" if request.param == "remote" else str(tmp_path / "packed")


def files_in(folder: str, server: ObjectServer) -> list[str]:
    if not is_address(folder):
        return [path.name for path in Path(folder).glob("*")]
    return [key.removeprefix("packed/") for key in server.objects if key.startswith("packed/")]


@pytest.mark.parametrize("stop", [KeyboardInterrupt, SystemExit, OSError])
def test_a_stopped_pack_leaves_nothing_and_can_be_repeated(
    server, colours, there, monkeypatch, stop
):
    put = packing.Target.put

    def stop_at_third(target: packing.Target, name: str) -> None:
        if name == "shard-00002.tar":
            raise stop(errno.ENOSPC, "No space")
        put(target, name)

    with monkeypatch.context() as stopped:
        stopped.setattr(packing.Target, "put", stop_at_third)
        with pytest.raises((KeyboardInterrupt, SystemExit, OSError)) as caught:
            pack(str(colours), there, shard_mb=0.05)
    if stop is OSError:
        assert ("TMPDIR" in one_line(caught.value)) == is_address(there)
    assert files_in(there, server) == []
    pack(str(colours), there, shard_mb=0.05)
    assert len(files_in(there, server)) > 10  # the control


class FailingDisk(io.BytesIO):
    def read(self, *_) -> bytes:
        raise OSError(errno.EIO, "Input/output error")


@pytest.mark.parametrize("fails", ["image", "shard"])
def test_a_disk_that_fails_is_named(colours, tmp_path, monkeypatch, fails):
    image = min((colours / "train/red").glob("*.png"))

    def open_failing(path: str) -> BinaryIO:
        return FailingDisk() if path == str(image) else open_file(path)

    def fail_to_close(tar: tarfile.TarFile) -> None:
        raise OSError(errno.EIO, "Input/output error")

    if fails == "image":
        monkeypatch.setattr(packing, "open_file", open_failing)
    else:  # control
        monkeypatch.setattr(tarfile.TarFile, "close", fail_to_close)
    with pytest.raises(OSError, match="Input/output error") as caught:
        pack(str(colours), str(tmp_path / "packed"))
    expected = image if fails == "image" else tmp_path / "packed"
    assert caught.value.filename == str(expected) and not list(tmp_path.glob("packed/*"))


def test_of_two_packs_into_one_folder_one_is_refused(server, colours, there):
    source = packing.find_source(str(colours), None, TableOptions())
    with ExitStack() as stack:
        # both have seen that the folder is empty
        first, second = (packing.Target(there, stack) for _ in range(2))
        with packing.Shards(first, 10**6) as shards:
            shards.add("a.png", ("cls", b"0"), b"content")
            with pytest.raises(WrongUsage, match="another finetune pack writes to"):
                packing.pack_images(source, second, 10**6)
            shards.close()
    assert files_in(there, server) == ["shard-00000.tar"]
    refresh(there)
    with open_file(f"{there}/shard-00000.tar") as shard:
        assert b"content" in shard.read()
    with pytest.raises(WrongUsage, match="is not empty"):  # the control
        pack(str(colours), there)
