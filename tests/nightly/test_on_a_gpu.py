"""A GPU computes what the CPU does, two processes what one does, and a killed run resumes bit for bit."""

import csv
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from colours import QUICK, draw_colours
from device_scenarios import NUM_EVALUATED
from processes import launch
from scenario_results import distance, draw_scenarios, is_same, load

from finetune.runs.folder import versions

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.timeout(900),
]
# device and number of processes
WAYS = {"cpu": ("cpu", 1), "gpu": ("cuda", 1), "shared": ("cuda", 2)}


# As test_three_devices.py's. Between CPU and GPU float32 multiplies in TF32, with 10 bits of mantissa.
SCENARIOS = [
    ("small_float64", 1e-10, 1e-10),
    ("small_float32", 1e-2, 7.5e-5),
    ("resnet_float32", 1e-1, 1e-2),
    ("trained_batch_norm", 1e-8, 1e-8),
    ("batch_norm_uneven", 1e-10, 1e-10),
    ("bad_batches", 1e-10, 1e-10),
    ("balanced", 1e-10, 1e-10),
    ("solved_head", 5e-9, 5e-9),
    ("frozen_part", 1e-8, 1e-8),
    ("probe", 5e-9, 5e-9),
]
MEASURED = [f"evaluated_{num}" for num in NUM_EVALUATED]
CONTROLS = ["control_order", "control_sum"]


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Folders with what the scenarios left on the CPU, on a GPU, and in two processes on that one."""
    root = tmp_path_factory.mktemp("gpu")
    data = draw_scenarios(root / "data", NUM_EVALUATED)
    with pytest.MonkeyPatch.context() as patch:
        found = {}
        for name, (device, num) in WAYS.items():
            patch.setenv("SCENARIO_DEVICE", device)
            controls = CONTROLS if num > 1 else []
            words = [*(each for each, *_ in SCENARIOS), *MEASURED, *controls]
            found[name] = launch("device_scenarios.py", root / name, num, data, *words)
        return found


@pytest.mark.parametrize(("scenario", "tolerance", "_"), SCENARIOS)
def test_weights_are_those_of_the_cpu(results, scenario, tolerance, _):
    cpu, gpu = (load(results[way], scenario) for way in ("cpu", "gpu"))
    found = distance(cpu["weights"], gpu["weights"])
    print(f"{scenario}: CPU and GPU {found:.1e}")
    assert gpu["moved"] > 1e-4
    assert found <= tolerance


@pytest.mark.parametrize(("scenario", "_", "tolerance"), SCENARIOS)
def test_weights_are_the_same_in_two_processes(results, scenario, _, tolerance):
    for rank in range(2):
        shared = load(results["shared"], scenario, rank)["weights"]
        found = distance(load(results["gpu"], scenario)["weights"], shared)
        print(f"{scenario}: one process and rank {rank} of two {found:.1e}")
        assert found <= tolerance


@pytest.mark.parametrize("control", CONTROLS)
def test_wrong_variants_are_caught(results, control):
    right, wrong = load(results["cpu"], "small_float64"), load(results["shared"], control)
    assert distance(right["weights"], wrong["weights"]) > 1e-4


@pytest.mark.parametrize("num", NUM_EVALUATED)
@pytest.mark.parametrize("way", ["gpu", "shared"])
def test_measures_are_those_of_the_cpu(results, way, num):
    expected, found = (load(results[name], f"evaluated_{num}") for name in ("cpu", way))
    assert found["confusion_matrix"] == expected["confusion_matrix"]
    assert found["metrics"] == pytest.approx(expected["metrics"], abs=1e-3)
    rows, others = (
        list(csv.DictReader((results[name] / f"evaluated_{num}.csv").read_text().splitlines()))
        for name in ("cpu", way)
    )
    assert [(row["path"], row["class"]) for row in rows] == [
        (row["path"], row["class"]) for row in others
    ]
    for row, other in zip(rows, others, strict=True):
        assert float(other["probability"]) == pytest.approx(float(row["probability"]), abs=1e-3)


FIT = [
    *("--trainer.accelerator", "gpu", "--trainer.max_epochs", "6", "--data.batch_size", "12"),
    *("--trainer.deterministic", "true", "--checkpoint_every_n_steps", "3"),
    *("--trainer.log_every_n_steps", "1"),
]


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed", "16-mixed"])
def test_killed_and_resumed_bit_for_bit(tmp_path, precision):
    data = draw_colours(tmp_path / "data", train=30, test=4)
    straight, killed = tmp_path / "straight", tmp_path / "killed"
    fit = [sys.executable, "-m", "finetune", "fit", str(data), *QUICK, *FIT]
    fit += ["--precision", precision]
    subprocess.run([*fit, "--out", str(straight)], check=True, capture_output=True)
    begun = subprocess.Popen([*fit, "--out", str(killed)], start_new_session=True)
    num_rows = rows_written(straight)
    deadline = time.monotonic() + 120
    while rows_written(killed) < num_rows // 2 and time.monotonic() < deadline:
        time.sleep(0.005)
    os.killpg(begun.pid, signal.SIGKILL)
    assert begun.wait() == -signal.SIGKILL, "it was done already"
    subprocess.run([*fit, "--out", str(killed), "--resume"], check=True, capture_output=True)
    assert rows_written(killed) == num_rows
    expected, found = (last(root) for root in (straight, killed))
    for part in ("global_step", "state_dict", "optimizer_states"):
        assert is_same(expected[part], found[part]), part


def rows_written(root: Path) -> int:
    """Return how many rows of steps and validations a run has written."""
    runs = versions(root, "fit")
    path = runs[-1] / "steps.csv" if runs else root / "none"
    return len(path.read_text().splitlines()) - 1 if path.exists() else 0


def last(root: Path) -> dict[str, Any]:
    (run,) = versions(root, "fit")
    return torch.load(run / "checkpoints/last.ckpt", "cpu", weights_only=True)
