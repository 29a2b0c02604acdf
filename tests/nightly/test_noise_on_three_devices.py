"""A run with all sources of randomness on 1 and 3 processes, also started on one number and ended on the other.

test_devices.py, test_resume.py and test_timm_families.py have two processes.
"""

from pathlib import Path

import pytest
import torch
from elastic_scenarios import CASES
from processes import launch
from promise import control, promise
from scenario_results import distance, draw_scenarios, load

# float64: rounding in sums of another order. Small networks add that up over 10 steps (measured: 1.4e-16); behind many
# layers it grows (EfficientNet: 5e-15; with batch norm trained on six images 8e-8). Mistakes are at 7e-9 and more.
TOLERANCES = {"small_float32": 7.5e-7, "mobilenet": 1e-10, "efficientnet": 1e-10}
EXACT = 1e-14


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("elastic")
    data = draw_scenarios(root / "data", ())
    # the last one continues a run of three processes
    numbers = {"world1": 1, "world3": 3, "again": 1}
    return {
        name: launch("elastic_scenarios.py", root / name, k, data) for name, k in numbers.items()
    }


@promise("random-numbers")
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", CASES)
def test_noise_does_not_depend_on_the_number_of_processes(results, name):
    alone = load(results["world1"], name)
    for rank in range(3):
        shared = load(results["world3"], name, rank)
        assert distance(alone, shared) <= TOLERANCES.get(name, EXACT)


@promise("any-number-of-devices")
@promise("resume")
@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case.get("at", True)])
def test_going_on_with_another_number_of_processes_ends_where_one_does_that_was_left_alone(
    results, name
):
    full = load(results["world1"], name)
    before = torch.load(results["world1"] / f"{name}.ckpt", weights_only=True)["state_dict"]
    # else there was nothing to do
    assert distance(full, {key: before[f"network.{key}"] for key in full}) > 1e-5
    for folder, k in (("world3", 3), ("again", 1)):
        for rank in range(k):
            assert distance(full, load(results[folder], f"resumed_{name}", rank)) <= TOLERANCES.get(
                name, EXACT
            )


@control("random-numbers")
@pytest.mark.parametrize(
    ("mistake", "name"),
    [
        ("seeds_of_ranks", "noisy"),
        ("order_of_ranks", "small"),
        ("restored_in_float32", "small"),
    ],
)
def test_the_mistakes_are_caught(results, mistake, name):
    assert distance(load(results["world1"], name), load(results["world3"], mistake)) > 1e-10


@control("random-numbers")
def test_partners_from_the_device_s_own_batch_are_caught(results):
    one, three = (load(results[folder], "partners_of_the_batch") for folder in ("again", "world3"))
    assert distance(one, three) > 1e-10
