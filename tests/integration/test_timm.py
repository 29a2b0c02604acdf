"""Networks of timm from folder to prediction, and the same on two processes as on one."""

from pathlib import Path

import pytest
from ddp_scenarios import NUM_EVALUATED
from processes import launch
from scenario_results import distance, draw_scenarios, load
from timm_scenarios import FAMILIES


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[int, Path]:
    """Folders with what the scenarios left for each number of processes."""
    root = tmp_path_factory.mktemp("timm")
    data = draw_scenarios(root / "data", NUM_EVALUATED)
    return {k: launch("timm_scenarios.py", root / f"world{k}", k, data) for k in (1, 2)}


@pytest.mark.timeout(900)
@pytest.mark.parametrize("scenario", [*FAMILIES, "frozen"])
def test_two_processes_train_as_one_does(results, scenario):
    alone = load(results[1], scenario)
    for rank in range(2):
        # float64: rounding over a few steps; without the layers below it is 1e-3 and more
        assert distance(alone, load(results[2], scenario, rank)) <= 1e-10


def test_forgotten_statistics_or_draws_are_seen(results):
    assert distance(load(results[1], "mobilenetv4"), load(results[2], "control_own_statistics")) > 1e-6
    assert distance(load(results[1], "focalnet"), load(results[2], "control_own_draws")) > 1e-6
