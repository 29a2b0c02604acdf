"""`finetune fit --folds` as a command with a process for each fold: interrupted, resumed, and on two devices."""

import json
import os
import shutil
import signal
import time
from pathlib import Path

import numpy as np
import onnxruntime
import pytest
import torch
from colours import QUICKEST, draw_colours
from processes import Process, finetune, start
from promise import promise

from finetune import ImageFolderData
from finetune.inference.predictor import Predictor
from finetune.runs.run_dir import RunDir
from finetune.runs.run_lock import is_held

pytestmark = pytest.mark.slow

OPTIONS = [
    *QUICKEST,
    *("--trainer.max_epochs", "6", "--folds", "2", "--checkpoint_every_n_steps", "1"),
]


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Class folders of 40 images each."""
    return draw_colours(tmp_path_factory.mktemp("data"), all=40) / "all"


@pytest.fixture(scope="module")
def full(images: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A cross-validation that nothing has interrupted."""
    folder = tmp_path_factory.mktemp("full")
    process = finetune("fit", images, *OPTIONS, cwd=folder)
    assert process.returncode == 0, process.stderr
    return folder / "runs/fit/version_0"


def begin_second_fold(full: Path, target: Path) -> None:
    """Copy a cross-validation as it is before its second fold."""
    shutil.copytree(full, target, ignore=shutil.ignore_patterns("fold_2", ".lock"))
    for name in ("test.json", "predictions.csv"):
        (target / name).unlink()
    shutil.rmtree(target / "checkpoints")
    RunDir(target).update(ended=None, test=None, seconds=None)


def wait_for_step(process: Process, run: Path) -> None:
    """Wait until a fold has written a checkpoint."""
    deadline = time.monotonic() + 200
    while not (run / "checkpoints/last.ckpt").is_file():
        assert process.poll() is None and time.monotonic() < deadline, process.stderr
        time.sleep(0.005)


def weights_of(run: Path) -> dict[str, torch.Tensor]:
    return torch.load(run / "checkpoints/best.ckpt", weights_only=True)["state_dict"]


@pytest.mark.parametrize(("signum", "code"), [(signal.SIGTERM, 143), (signal.SIGKILL, -9)])
def test_interrupted_in_the_second_fold_it_ends_bit_for_bit_as_an_uninterrupted_one(
    images, full, tmp_path, signum, code
):
    folder = tmp_path / "runs/fit/version_0"
    begin_second_fold(full, folder)
    process = start("fit", "--resume", cwd=tmp_path)
    second = folder / "fit/fold_2"
    wait_for_step(process, second)
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    process.send_signal(signum)
    if signum == signal.SIGKILL:
        # Alone, the fold notices within a second that its parent is gone, and may end before that.
        for child in children:
            os.kill(int(child), signal.SIGKILL)
    assert process.wait() == code
    deadline = time.monotonic() + 30
    while is_held(second) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not (folder / "test.json").exists()
    assert not (second / "test.json").exists()
    same = ["fit", images, *OPTIONS] if signum == signal.SIGTERM else ["fit"]
    resumed = finetune(*same, "--resume", cwd=tmp_path)
    assert resumed.returncode == 0, resumed.stderr
    assert "fold 1 of 2" in resumed.stderr and "resuming" in resumed.stderr
    assert (folder / "predictions.csv").read_bytes() == (full / "predictions.csv").read_bytes()
    weights, expected = weights_of(folder), weights_of(full)
    assert weights.keys() == expected.keys()
    assert all(torch.equal(weights[name], expected[name]) for name in weights)


def rows_of(run: Path) -> list[list[str]]:
    """Return the path, the label and the predicted class of each image."""
    return [line.split(",")[:3] for line in (run / "predictions.csv").read_text().splitlines()]


@promise("folds")
def test_two_devices_give_the_same_numbers(images, full, tmp_path):
    process = finetune("fit", images, *OPTIONS, "--devices", 2, cwd=tmp_path, timeout=600)
    assert process.returncode == 0, process.stderr
    other = tmp_path / "runs/fit/version_0"
    results = [json.loads((folder / "test.json").read_text()) for folder in (full, other)]
    assert results[0]["confusion_matrix"] == results[1]["confusion_matrix"]
    losses = [result["test/loss"] for result in results]
    assert losses[0] == pytest.approx(losses[1], rel=1e-4)  # float32, in another order of sums
    assert rows_of(full) == rows_of(other)
    # the control: another split seed gives other folds
    tested = [path for path, _, _ in rows_of(full)[1:]]
    for seed, is_same in ((0, True), (1, False)):
        first = ImageFolderData(str(images), num_folds=2, fold=1, split_seed=seed).splits["test"]
        assert (list(first.paths) == tested[: len(first)]) == is_same


def test_the_folds_are_exported_as_one_network(full, tmp_path):
    process = finetune("export", full, "--out", tmp_path / "all.onnx", cwd=tmp_path)
    assert process.returncode == 0, process.stderr
    folds = [Predictor(full / f"fit/fold_{fold}/checkpoints/best.ckpt") for fold in (1, 2)]
    pixels = np.random.default_rng(0).integers(0, 256, (4, 28, 28, 3)).astype(np.uint8)
    session = onnxruntime.InferenceSession(os.fspath(tmp_path / "all.onnx"))
    (found,) = session.run(["probabilities"], {session.get_inputs()[0].name: pixels})
    expected = np.mean([fold.classify(pixels) for fold in folds], axis=0)
    np.testing.assert_allclose(found, expected, atol=1e-4)  # as export itself checks
