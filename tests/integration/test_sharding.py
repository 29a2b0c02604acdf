"""The same run with the head, or the whole network, spread over two and three devices: held against one device."""

import csv
import os
import re
import subprocess
import sys
from itertools import product
from pathlib import Path

import pytest
import torch
from colours import QUICK
from processes import launch
from scenario_results import distance, draw_scenarios, load
from sharding_scenarios import NUM_EVALUATED, ON_THREE

from finetune import Classifier
from finetune.runs.checkpoint_io import read_checkpoint

pytestmark = pytest.mark.slow

SCENARIOS = ("small", "balanced", "frozen_stages", "batch_norm_uneven", "bad_batches", "noisy", "probe")
MESHES = ("(2, 1)", "(1, 2)")  # the batch shared out and every weight sharded; the head cut in two


@pytest.fixture(scope="module")
def results(tmp_path_factory) -> dict[int, Path]:
    root = tmp_path_factory.mktemp("sharding")
    data = draw_scenarios(root / "data", NUM_EVALUATED)
    return {k: launch("sharding_scenarios.py", root / f"world{k}", k, data) for k in (1, 2, 3)}


# float64: rounding over 10 steps, far below any mistake. A probe's head is known to 1e-10 and has weights as large as
# 40: 5.8e-10 was seen, and would be 2e-9 over 20 steps.
TOLERANCES = {"probe": 5e-9}


@pytest.mark.timeout(900)
@pytest.mark.parametrize(("scenario", "mesh"), [*product(SCENARIOS, MESHES), *product(ON_THREE, ["(3, 1)", "(1, 3)"])])
def test_weights_are_those_of_one_device(results, scenario, mesh):
    alone, world_size = load(results[1], f"{scenario}_None"), max(map(int, re.findall(r"\d", mesh)))
    for rank in range(world_size):
        assert distance(alone, load(results[world_size], f"{scenario}_{mesh}", rank)) <= TOLERANCES.get(scenario, 1e-10)


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_training_moved_the_weights(results, scenario):
    assert load(results[1], f"{scenario}_moved_None") > 1e-4


def test_shares_by_global_rank_are_caught(results):
    assert distance(load(results[1], "small_None"), load(results[2], "control_(1, 2)")) > 1e-4


def test_devices_that_share_a_head_keep_one_backbone(results):
    first, second = (load(results[2], "drifting", rank) for rank in range(2))
    assert distance(first, second) == 0
    assert distance(*(load(results[2], "control_drifting", rank) for rank in range(2))) > 1e-6


@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("num", NUM_EVALUATED)
def test_every_picture_counts_once(results, num, mesh):
    alone = load(results[1], f"evaluated_{num}_None")
    assert sum(map(sum, alone["confusion_matrix"])) == num
    for rank in range(2):
        shared = load(results[2], f"evaluated_{num}_{mesh}", rank)
        assert shared["confusion_matrix"] == alone["confusion_matrix"]
        assert shared["metrics"] == pytest.approx(alone["metrics"], abs=1e-6)
    rows_alone, rows = (
        list(csv.DictReader((results[k] / f"evaluated_{num}_{m}.csv").read_text().splitlines()))
        for k, m in ((1, None), (2, mesh))
    )
    assert len(rows_alone) == num
    for row, row_alone in zip(rows, rows_alone, strict=True):
        assert (row["path"], row["class"]) == (row_alone["path"], row_alone["class"])
        assert float(row["probability"]) == pytest.approx(float(row_alone["probability"]), abs=1e-6)


@pytest.mark.parametrize("mesh", [*MESHES, "(3, 1)", "(1, 3)"])
def test_limits_take_the_batches_of_one_device(results, mesh):
    alone, unlimited = load(results[1], "limited_None"), load(results[1], "control_unlimited")
    world_size = max(map(int, re.findall(r"\d", mesh)))
    for rank in range(world_size):
        shared = load(results[world_size], f"limited_{mesh}", rank)
        assert distance(alone["weights"], shared["weights"]) <= 1e-10
        assert shared["metrics"] == pytest.approx(alone["metrics"], abs=1e-6)
    # The control: on other batches, as each device's own would be, both would differ.
    assert distance(alone["weights"], unlimited["weights"]) > 1e-4
    assert abs(alone["metrics"]["val/loss"] - unlimited["metrics"]["val/loss"]) > 1e-4


@pytest.mark.parametrize("mesh", MESHES)
def test_each_device_holds_its_part_of_the_head(results, mesh):
    parts = [load(results[2], f"checkpoint_{mesh}", rank)["shape"] for rank in range(2)]
    assert parts == [(2, 32), (1, 32)]  # of three classes, both times by rows
    assert load(results[1], "checkpoint_None")["shape"] == (3, 32)


@pytest.mark.parametrize("mesh", ["None", *MESHES])
def test_a_checkpoint_is_one_ordinary_file(results, mesh):
    folder = results[1 if mesh == "None" else 2]
    path, saved = folder / f"{mesh}.ckpt", load(folder, f"checkpoint_{mesh}")
    assert path.is_file()
    state = read_checkpoint(path)["state_dict"]
    whole = {name.removeprefix("network."): value for name, value in state.items() if name.startswith("network.")}
    assert distance(whole, saved["at_checkpoint"]) == 0
    assert all(type(value) is torch.Tensor for value in state.values())


@pytest.mark.parametrize("mesh", MESHES)
def test_going_on_from_it_ends_as_one_device_does(results, mesh):
    alone = load(results[1], "checkpoint_None")
    assert distance(alone["at_checkpoint"], alone["resumed"]) > 1e-4
    for rank in range(2):
        assert distance(alone["resumed"], load(results[2], f"checkpoint_{mesh}", rank)["resumed"]) <= 1e-10


def test_the_command_line_spreads_the_head_and_one_device_tests_it(cli, colours, tmp_path, capfd):
    command = [sys.executable, "-m", "finetune", "fit", "--data.root", str(colours), *QUICK]
    mesh = ["--trainer.strategy", "model_parallel", "--trainer.devices", "2"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run([*command, *mesh], env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    accuracy = next(line for line in done.stdout.splitlines() if line.startswith("test/accuracy"))
    best = tmp_path / "runs/fit/version_0/checkpoints/best.ckpt"
    assert len(Classifier.load_from_checkpoint(best, map_location="cpu").class_names) == 3
    capfd.readouterr()
    cli("test", "--ckpt_path", best, "--data.num_workers", "0", "--trainer.accelerator", "cpu")
    assert accuracy in capfd.readouterr().out
