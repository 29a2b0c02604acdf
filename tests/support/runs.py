"""Runs that are fitted once a session, of which each test gets a copy of its own."""

import csv
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path

import numpy as np
import pytest

CHECKPOINTS = (".ckpt", ".onnx", ".safetensors")  # large, and replaced rather than changed


def copy_by_links(source: Path, target: Path) -> Path:
    """Copy a folder; files that are never changed in place are hard links."""
    return shutil.copytree(source, target, copy_function=_link_or_copy, dirs_exist_ok=True)


def _link_or_copy(source: str, target: str) -> None:
    if os.path.exists(target):
        return
    if Path(source).suffix in (*CHECKPOINTS, ".png"):
        os.link(source, target)
    else:
        shutil.copy2(source, target)


class FittedRuns:
    """The folders of finished runs of one epoch; to be read only. Each is fitted when it is first asked for."""

    def __init__(self, folder: Path, colours: Path):
        self.folder = folder
        self.colours = colours

    @cached_property
    def single(self) -> Path:
        """One label an image, on the images of `colours`."""
        return self._fit("single", str(self.colours))

    @cached_property
    def frozen(self) -> Path:
        """As `single`, with a solved head on a frozen network."""
        return self._fit("frozen", str(self.colours), "--freeze", "backbone")

    @cached_property
    def ensemble(self) -> Path:
        """As `single`, with two networks."""
        with fits_in_this_process():
            return self._fit("ensemble", str(self.colours), "--members", "2")

    @cached_property
    def tags(self) -> Path:
        """A folder with tags.csv, a table of images with several labels each."""
        from labelled_files import draw_labelled

        folder = self.folder / "tags"
        draw_labelled(folder / "tagged", train=60, test=20)
        rows = ["path,labels,split"]
        for split in ("train", "test"):
            for image in sorted((folder / "tagged" / split).iterdir()):
                labels = ";".join(image.stem.split("+")[1:])
                rows.append(f"tagged/{split}/{image.name},{labels},{split}")
        (folder / "tags.csv").write_text("\n".join(rows) + "\n")
        return folder

    @cached_property
    def several(self) -> Path:
        """Several labels an image, on the table `tags/tags.csv`."""
        return self._fit("several", str(self.tags / "tags.csv"))

    @cached_property
    def exported(self) -> Path:
        """best.safetensors of `single`."""
        folder = self.folder / "exported"
        out = str(folder / "best.safetensors")
        _run_in(self.folder, "export", str(self.single), "--format", "safetensors", "--out", out)
        return folder

    def _fit(self, name: str, *words: str) -> Path:
        from colours import QUICKEST

        out = self.folder / name
        _run_in(self.folder, "fit", *words, *QUICKEST, "--out", str(out))
        return out / "fit/version_0"


@pytest.fixture(scope="session")
def fitted_runs(colours: Path, tmp_path_factory: pytest.TempPathFactory) -> FittedRuns:
    """The finished runs of this session, to be read only."""
    return FittedRuns(tmp_path_factory.mktemp("fitted_runs"), colours)


@pytest.fixture
def run(fitted_runs: FittedRuns, tmp_path: Path) -> Callable[..., Path]:
    """Copy a finished run, as in `run("several")`, to runs/fit/version_0 in the folder of the test."""

    def copied(kind: str = "single", target: str = "runs/fit/version_0") -> Path:
        return copy_by_links(getattr(fitted_runs, kind), tmp_path / target)

    return copied


@pytest.fixture(scope="session")
def finished(colours: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a finished run of `finetune fit`, with its report; to be read only."""
    from colours import QUICKEST

    folder = tmp_path_factory.mktemp("finished")
    words = [*QUICKEST, "--report", "true", "--trainer.max_epochs", "3"]
    _run_in(folder, "fit", str(colours), *words)
    return folder / "runs/fit/version_0"


@pytest.fixture(scope="session")
def predicted(
    finished: Path, colours: Path, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, np.ndarray]:
    """`finetune predict`: path of each test image to its probabilities."""
    from colours import NAMES

    folder = tmp_path_factory.mktemp("predicted")
    words = ["--workers", "0", "--trainer.accelerator", "cpu", "--out", "predictions.csv"]
    _run_in(folder, "predict", str(finished), str(colours / "test"), *words)
    rows = list(csv.DictReader((folder / "predictions.csv").read_text().splitlines()))
    assert len(rows) == 30
    return {row["path"]: np.array([float(row[f"p_{name}"]) for name in NAMES]) for row in rows}


@contextmanager
def fits_in_this_process() -> Iterator[None]:
    """Let folds and members train in this process, not in a process each."""
    from finetune.cli import run
    from finetune.fitting import several_fits
    from finetune.runs import run_lock

    def start(command: list[str], **_: object) -> int:
        run(command)
        run_lock.release()
        return 0

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(several_fits, "start_command", start)
        patch.setattr(several_fits, "wait_for", lambda code: code)
        yield


def _run_in(folder: Path, *words: str) -> None:
    """Run a command in a folder, and leave this process as it was."""
    from finetune.cli import run
    from finetune.runs import run_lock

    before = dict(os.environ)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        run([*words])
    run_lock.release()
    os.environ.clear()
    os.environ.update(before)
