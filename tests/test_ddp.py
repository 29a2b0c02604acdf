"""The same run on 1, 2 and 3 processes, each promise beside a wrong variant that the comparison catches."""

import csv
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import draw_colours
from ddp_scenarios import NUM_EVALUATED

WORLD_SIZES = (1, 2, 3)


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[int, Path]:
    """Folders with what the scenarios left for each number of processes."""
    root = tmp_path_factory.mktemp("ddp")
    data = root / "data"
    draw_colours(data / "train", train=30)
    # 25 pictures of unequal classes in batches of 6: the last batch has one picture, and two of three devices none.
    uneven = draw_colours(data / "uneven", train=14)
    for name, kept in (("blue", 14), ("green", 8), ("red", 3)):
        for path in sorted((uneven / "train" / name).iterdir())[kept:]:
            path.unlink()
    for num in NUM_EVALUATED:
        folder = draw_colours(data / f"test{num}", test=5)
        for path in sorted((folder / "test").rglob("*.png"))[num:]:
            path.unlink()
    return {k: launch(root / f"world{k}", data, k) for k in WORLD_SIZES}


def launch(out: Path, data: Path, world_size: int) -> Path:
    out.mkdir()
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    processes = []
    for rank in range(world_size):
        launched = {
            "RANK": rank,
            "LOCAL_RANK": rank,
            "GROUP_RANK": 0,
            "WORLD_SIZE": world_size,
            "LOCAL_WORLD_SIZE": world_size,
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": port,
            "TORCHELASTIC_RUN_ID": "test",
            "OMP_NUM_THREADS": 1,
        }
        environment = {**os.environ, **{key: str(value) for key, value in launched.items() if world_size > 1}}
        command = [sys.executable, str(Path(__file__).with_name("ddp_scenarios.py")), out, data, str(world_size)]
        with open(out / f"log{rank}", "w") as log:
            processes.append(subprocess.Popen(command, env=environment, stdout=log, stderr=subprocess.STDOUT))
    try:
        codes = [process.wait(timeout=240) for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert codes == [0] * world_size, "\n".join(path.read_text()[-3000:] for path in out.glob("log*"))
    return out


def load(folder: Path, name: str, rank: int = 0) -> Any:
    return torch.load(folder / f"{name}_{rank}.pt", weights_only=True)


def distance(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> float:
    """Largest difference between two networks' weights."""
    assert a.keys() == b.keys()
    return max(float((a[name] - b[name]).abs().max()) for name in a)


# float64: rounding over 20 steps, far below any mistake. float32: ten times what was measured (small 7.5e-8, ResNet-18
# 2.9e-7 at a largest weight of 1); the order of additions differs between device counts.
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("scenario", "tolerance"),
    [
        ("small_float64", 1e-10),
        ("small_float32", 7.5e-7),
        ("resnet_float64", 1e-10),
        ("resnet_float32", 3e-6),
        ("trained_batch_norm", 1e-10),
        ("batch_norm_uneven", 1e-10),
        ("balanced", 1e-10),
        ("frozen_backbone", 1e-10),
        ("probe", 1e-10),
    ],
)
def test_weights_are_the_same_on_any_number_of_processes(results, scenario, tolerance):
    alone = load(results[1], scenario)
    for world_size in (2, 3):
        for rank in range(world_size):  # every rank, not only the first
            assert distance(alone, load(results[world_size], scenario, rank)) <= tolerance


def test_training_moved_the_weights(results):
    # else the comparison above would hold for networks that never learned
    assert distance(load(results[1], "small_float64"), load(results[1], "balanced")) > 1e-3


@pytest.mark.parametrize("control", ["control_order", "control_sum"])
def test_wrong_variants_are_caught(results, control):
    assert distance(load(results[1], "small_float64"), load(results[2], control)) > 1e-4


def test_statistics_of_each_device_s_own_share_are_caught(results):
    assert distance(load(results[1], "trained_batch_norm"), load(results[2], "control_own_statistics")) > 1e-4


def test_averaging_the_means_of_devices_is_caught(results):
    assert distance(load(results[1], "balanced"), load(results[3], "control_means")) > 1e-4


@pytest.mark.parametrize("num", NUM_EVALUATED)
def test_every_picture_counts_once(results, num):
    name = f"evaluated_{num}"
    alone = load(results[1], name)
    assert sum(map(sum, alone["confusion_matrix"])) == num
    for world_size in (2, 3):
        for rank in range(world_size):
            shared = load(results[world_size], name, rank)
            assert shared["confusion_matrix"] == alone["confusion_matrix"]
            assert shared["metrics"] == pytest.approx(alone["metrics"], abs=1e-6)
        rows, rows_alone = (
            list(csv.DictReader((results[k] / f"{name}.csv").read_text().splitlines())) for k in (world_size, 1)
        )
        assert len(rows_alone) == num
        for row, row_alone in zip(rows, rows_alone, strict=True):
            assert (row["path"], row["class"]) == (row_alone["path"], row_alone["class"])
            for column in ("probability", "p_blue", "p_green", "p_red"):
                assert float(row[column]) == pytest.approx(float(row_alone[column]), abs=1e-6)


def test_lightnings_sampler_counts_a_picture_twice(results):
    assert load(results[2], "control_padding") == 14  # of 13
