"""Files that a command meets, for tests of what it refuses: functions that make them in an empty folder."""

import os
import shutil
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from hub_server import Repository, hub_server
from object_server import ObjectServer, object_server
from runs import FittedRuns, copy_by_links


@dataclass
class Place:
    """An empty folder, the runs that may be copied into it, and servers that stop after the test."""

    folder: Path
    runs: FittedRuns
    servers: ExitStack


RUN = "runs/fit/version_0"


def empty(place: Place) -> None:
    """No file at all."""


def folder(place: Place) -> None:
    """photos/: three classes in train and test."""
    copy_by_links(place.runs.colours, place.folder / "photos")


def table(place: Place) -> None:
    """photos/, and table.csv of its images."""
    folder(place)
    images = sorted((place.folder / "photos").rglob("*.png"))
    rows = [f"{path.relative_to(place.folder)},{path.parent.name}" for path in images]
    (place.folder / "table.csv").write_text("\n".join(["path,label", *rows]) + "\n")


def tags(place: Place) -> None:
    """tags.csv: a table of images with several labels each."""
    copy_by_links(place.runs.tags, place.folder)


def run(place: Place) -> None:
    """photos/, and a finished run of it."""
    folder(place)
    copy_by_links(place.runs.single, place.folder / RUN)


def several(place: Place) -> None:
    """tags.csv, and a finished run of it."""
    tags(place)
    copy_by_links(place.runs.several, place.folder / RUN)


def ensemble(place: Place) -> None:
    """photos/, and a finished run of two networks."""
    folder(place)
    copy_by_links(place.runs.ensemble, place.folder / RUN)


def other_members(place: Place) -> None:
    """A run, and checkpoints of it that have other numbers of members: two.ckpt and huge.ckpt."""
    import torch

    run(place)
    checkpoint = torch.load(place.folder / RUN / "checkpoints/best.ckpt", weights_only=True)
    for name, num in {"two": 2, "huge": 10**9}.items():
        checkpoint["hyper_parameters"]["members"] = num
        torch.save(checkpoint, place.folder / f"{name}.ckpt")


def exported(place: Place) -> None:
    """A finished run with its best.safetensors."""
    run(place)
    copy_by_links(place.runs.exported, place.folder / RUN / "checkpoints")


def clothes(place: Place) -> None:
    """clothes/: a small Fashion-MNIST."""
    from data_files import write_unpacked

    write_unpacked(place.folder / "clothes")


def named(place: Place) -> None:
    """A finished run by the name exp1."""
    folder(place)
    copy_by_links(place.runs.single, place.folder / "runs/fit/exp1")


def without_last(place: Place) -> None:
    """A finished run whose last.ckpt was deleted."""
    run(place)
    (place.folder / RUN / "checkpoints/last.ckpt").unlink()


def of_steps(place: Place) -> None:
    """A finished run whose length is a number of steps."""
    run(place)
    config = place.folder / RUN / "config.yaml"
    text = config.read_text().replace("max_epochs: 1", "max_epochs: null")
    config.write_text(text.replace("max_steps: -1", "max_steps: 50"))


def other(place: Place) -> None:
    """others/: as photos/, and one image fewer."""
    copy_by_links(place.runs.colours, place.folder / "others")
    (place.folder / "others/train/blue/00.png").unlink()


def wrong_class(place: Place) -> None:
    """photos/, whose test/ has a class that train/ does not have."""
    folder(place)
    (place.folder / "photos/test/red").rename(place.folder / "photos/test/other")


def fourth_class(place: Place) -> None:
    """photos/, of which a run was trained, with a fourth class."""
    run(place)
    config = place.folder / RUN / "config.yaml"
    text = config.read_text().replace(str(place.runs.colours), str(place.folder / "photos"))
    config.write_text(text)
    copy_by_links(place.folder / "photos/train/red", place.folder / "photos/train/wine")


def weights(place: Place) -> None:
    """Weights of torch: w.pt of small_cnn, lenet.pt and lenet.ckpt of lenet."""
    import torch

    from finetune.models.backbones import build

    torch.save(build("small_cnn", 3).state_dict(), place.folder / "w.pt")
    torch.save(build("lenet", 3).state_dict(), place.folder / "lenet.pt")
    shutil.copy(place.folder / "lenet.pt", place.folder / "lenet.ckpt")


def killed_folds(place: Place) -> None:
    """killed/fit/version_0: a cross-validation that was killed in its first fold."""
    from finetune.runs.run_dir import RunDir

    killed = place.folder / "killed/fit/version_0"
    killed.mkdir(parents=True)
    identity = {"place": os.path.realpath(place.folder / "photos"), "folds": 2}
    RunDir(killed).update(kind="fit", command="fit", identity=identity)
    (killed / "config.yaml").write_text("folds: 2\ndata: {root: photos}\n")


def not_utf8(place: Place) -> None:
    """latin.yaml, whose text is not UTF-8."""
    (place.folder / "latin.yaml").write_bytes(b"a: caf\xe9")


def bucket(place: Place) -> ObjectServer:
    """The bucket s3://photos with images in set/, a table, and a run without last.ckpt."""
    server = place.servers.enter_context(object_server())
    server.put_folder(place.runs.colours / "test", "set")
    server.put("labels.csv", b"path,label\n")
    for name in (".lock", "config.yaml", "checkpoints/best.ckpt"):
        server.put(f"runs/fit/there/{name}", b"")
    server.put("runs/fit/there/run.json", b'{"finetune": "0.1.0", "kind": "fit"}')
    return server


def closed_bucket(place: Place) -> None:
    """A bucket that may not be read."""
    bucket(place).fault = lambda *_: "deny"


def read_only_bucket(place: Place) -> None:
    """A bucket that may not be written to."""
    bucket(place).fault = lambda method, _: "deny" if method == "PUT" else ""


def hub(place: Place) -> Repository:
    """The dataset hf://datasets/owner/photos, and a table in it."""
    server = place.servers.enter_context(
        hub_server(place.folder.with_name(f"{place.folder.name}-hub"))
    )
    server.put_folder(place.runs.colours / "test", "owner/photos", "set")
    repository = server.repositories["datasets/owner/photos"]
    repository.commit({"labels.csv": b"path,label\n"})
    return repository


def gated_dataset(place: Place) -> None:
    """The same, for those whom its owner grants access."""
    hub(place).is_gated = True


def private_dataset(place: Place) -> None:
    """The same, for those with a token."""
    hub(place).is_private = True


def row_per_label(place: Place) -> None:
    """labels.csv: a table with a row for each label of an image."""
    folder(place)
    rows = ["path,label"]
    for path in sorted((place.folder / "photos").rglob("*.png")):
        rows += [f"{path.relative_to(place.folder)},{name}" for name in (path.parent.name, "image")]
        if path.parent.name == "red":
            rows.pop()
    (place.folder / "labels.csv").write_text("\n".join(rows) + "\n")


def moved_run(place: Place) -> None:
    """photos/, and a finished run of it in models/."""
    run(place)
    (place.folder / "runs").rename(place.folder / "models")


def grouped(place: Place) -> None:
    """photos/, and a finished run of it whose checkpoint groups images by a regular expression."""
    import torch

    run(place)
    path = place.folder / RUN / "checkpoints/best.ckpt"
    checkpoint = torch.load(path, weights_only=True)
    checkpoint["datamodule_hyper_parameters"]["group_by"] = r"(\w+)/"
    path.unlink()  # a link to one that other tests read
    torch.save(checkpoint, path)
