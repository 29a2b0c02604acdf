"""`finetune fit --folds` as a command with a process for each fold: interrupted and resumed, and on two devices."""

import json
import os
import signal
import time
from pathlib import Path

import numpy as np
import onnxruntime
import pytest
import torch
from colours import QUICKEST, draw_colours
from processes import Process, finetune, start

from finetune.inference.predictor import Predictor
from finetune.runs.run_lock import is_held

pytestmark = pytest.mark.slow

OPTIONS = [
    *QUICKEST,
    *("--trainer.max_epochs", "3", "--folds", "2", "--checkpoint_every_n_steps", "1"),
]


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Class folders of 60 images each."""
    return draw_colours(tmp_path_factory.mktemp("data"), all=60) / "all"


@pytest.fixture(scope="module")
def whole(images: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A cross-validation that nothing has interrupted."""
    folder = tmp_path_factory.mktemp("whole")
    process = finetune("fit", images, *OPTIONS, cwd=folder)
    assert process.returncode == 0, process.stderr
    return folder / "runs/fit/version_0"


def wait_for_step(process: Process, run: Path) -> None:
    """Wait until a fold has written a checkpoint."""
    deadline = time.monotonic() + 200
    while not (run / "checkpoints/last.ckpt").is_file():
        assert process.poll() is None and time.monotonic() < deadline, process.stderr
        time.sleep(0.005)


def weights_of(run: Path) -> dict[str, torch.Tensor]:
    return torch.load(run / "checkpoints/best.ckpt", weights_only=True)["state_dict"]


@pytest.mark.parametrize(
    ("signum", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGKILL, -9)]
)
def test_interrupted_in_the_second_fold_it_ends_bit_for_bit_as_a_whole_one(
    images, whole, tmp_path, signum, code
):
    process = start("fit", images, *OPTIONS, cwd=tmp_path)
    folder = tmp_path / "runs/fit/version_0"
    wait_for_step(process, folder / "fit/fold_2")
    process.send_signal(signum)
    assert process.wait() == code
    second = folder / "fit/fold_2"
    deadline = time.monotonic() + 30  # after a kill the fold notices that its parent is gone
    while is_held(second) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not (folder / "test.json").exists()
    # within the second in which it notices that, the fold may end
    assert signum == signal.SIGKILL or not (second / "test.json").exists()
    resumed = finetune("fit", images, *OPTIONS, "--resume", cwd=tmp_path)
    assert resumed.returncode == 0, resumed.stderr
    assert "fold 1 of 2" in resumed.stderr and "resuming" in resumed.stderr
    assert (folder / "predictions.csv").read_bytes() == (whole / "predictions.csv").read_bytes()
    weights, expected = weights_of(folder), weights_of(whole)
    assert weights.keys() == expected.keys()
    assert all(torch.equal(weights[name], expected[name]) for name in weights)


def test_two_devices_give_the_same_numbers(images, whole, tmp_path):
    process = finetune("fit", images, *OPTIONS, "--devices", 2, cwd=tmp_path, timeout=600)
    assert process.returncode == 0, process.stderr
    results = [
        json.loads((folder / "test.json").read_text())
        for folder in (whole, tmp_path / "runs/fit/version_0")
    ]
    assert results[0]["confusion_matrix"] == results[1]["confusion_matrix"]
    losses = [result["test/loss"] for result in results]
    assert losses[0] == pytest.approx(losses[1], rel=1e-4)  # float32, in another order of sums
    rows = [
        [line.split(",")[:3] for line in (folder / "predictions.csv").read_text().splitlines()]
        for folder in (whole, tmp_path / "runs/fit/version_0")
    ]
    assert rows[0] == rows[1]
    # the control: another split seed gives other folds
    other = finetune("fit", images, *OPTIONS, "--data.split_seed", 1, cwd=tmp_path)
    assert other.returncode == 0, other.stderr
    content = (tmp_path / "runs/fit/version_1/predictions.csv").read_text()
    assert [line.split(",")[:3] for line in content.splitlines()] != rows[0]


def test_the_folds_are_exported_as_one_network(images, whole, tmp_path):
    process = finetune("export", whole, "--out", tmp_path / "all.onnx", cwd=tmp_path)
    assert process.returncode == 0, process.stderr
    folds = [Predictor(whole / f"fit/fold_{fold}/checkpoints/best.ckpt") for fold in (1, 2)]
    pixels = np.random.default_rng(0).integers(0, 256, (4, 28, 28, 3)).astype(np.uint8)
    session = onnxruntime.InferenceSession(os.fspath(tmp_path / "all.onnx"))
    (found,) = session.run(["probabilities"], {session.get_inputs()[0].name: pixels})
    expected = np.mean([fold.classify(pixels) for fold in folds], axis=0)
    np.testing.assert_allclose(found, expected, atol=1e-4)  # as export itself checks
