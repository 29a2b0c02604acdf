"""Linear layers split over 3 processes equal those on one device; a wrong variant is caught."""

import math
from functools import partial
from pathlib import Path

import pytest
from model_parallel_scenarios import (
    NUM_CLASSES,
    TASKS,
    TOLERANCE,
    WRONG,
    alone,
    convolution_task,
    linear_task,
    load,
    mean_loss,
    mlp_task,
    train,
)
from networks import subnets
from processes import launch
from scenario_results import distance
from torch.distributed.device_mesh import init_device_mesh

from finetune.parity.communication_volume import linear_bytes
from finetune.parity.tensor_parallel import shard_linear

WORLD_SIZE = 3  # the command `parity` has two, in test_parity.py


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the results of the scenarios."""
    root = tmp_path_factory.mktemp("tensor_parallel")
    return launch("model_parallel_scenarios.py", root / "out", WORLD_SIZE, "tensor_parallel")


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    "scenario", ["subnets_linear", "mlp_linear", "convolution_head", "huge_head"]
)
def test_weights_are_those_of_one_device(results, scenario):
    weights, _ = alone(scenario.split("_")[0])
    for rank in range(WORLD_SIZE):  # every rank, not only the first
        assert distance(weights, load(results, scenario, rank)["weights"]) <= TOLERANCE


@pytest.mark.slow
@pytest.mark.parametrize("task", ["mlp", "convolution", "huge"])
def test_training_moved_the_weights(task):
    # else the comparison above would hold for networks that never learned
    network, _, _ = TASKS[task]()
    assert distance(network.state_dict(), alone(task)[0]) > 1e-3


@pytest.mark.slow
@pytest.mark.parametrize(
    ("scenario", "num_classes", "num_inputs"), [("convolution", 10, 54), ("huge", NUM_CLASSES, 35)]
)
def test_each_device_holds_its_part_of_the_head(results, scenario, num_classes, num_inputs):
    rows = math.ceil(num_classes / WORLD_SIZE)
    for rank in range(WORLD_SIZE):
        result = load(results, f"{scenario}_head", rank)
        own = min(rows, num_classes - rank * rows)  # as torch.chunk: 4, 4 and 2 of 10
        ((weight, bias, *learned),) = result["held"].values()
        # Values, gradients and momentum; in memory no more than an equal share, in float64.
        for shape, num_bytes in (weight, *learned[::2]):
            assert shape == (own, num_inputs)
            assert num_bytes <= rows * num_inputs * 8
        for shape, num_bytes in (bias, *learned[1::2]):
            assert shape == (own,)
            assert num_bytes <= rows * 8
        assert result["logits"][:2] == (
            "Tensor",
            (12 if scenario == "convolution" else 3, num_classes),
        )


@pytest.mark.slow
def test_a_gradient_that_is_not_summed_is_caught(results):
    network, batches, lr = mlp_task(num_classes=6)
    train(partial(mean_loss, network), network.parameters(), batches, lr)
    weights = {name: value for name, value in network.state_dict().items() if name.startswith("0")}
    assert distance(weights, load(results, "control_forgotten_reduction", 0)) > WRONG


@pytest.mark.slow
@pytest.mark.parametrize(
    ("scenario", "task", "names"),
    [
        ("subnets_linear", linear_task, ["0", "2", "4"]),
        ("mlp_linear", mlp_task, ["0", "2"]),
        ("convolution_head", convolution_task, ["4"]),
    ],
)
def test_linear_layers_send_what_is_computed(results, scenario, task, names):
    network, batches, _ = task()
    x, _ = batches[0]
    for rank in range(WORLD_SIZE):
        sent = 0
        for name, num_bytes in load(results, scenario, rank)["collectives"]:
            if name == "all_reduce":
                sent += 2 * (WORLD_SIZE - 1) * num_bytes // WORLD_SIZE
            else:
                assert name == "all_gather_into_tensor"
                sent += (WORLD_SIZE - 1) * num_bytes
        assert sent / len(batches) == linear_bytes(network, names, len(x), WORLD_SIZE)[rank]


def test_a_mesh_of_two_axes_is_refused(group_of_one):
    with pytest.raises(ValueError, match="one axis of devices, not over 2"):
        shard_linear(subnets(), [], init_device_mesh("cpu", (1, 1)))
