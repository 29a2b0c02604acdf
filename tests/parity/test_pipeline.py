"""A network that is split over 2 and 3 processes equals the network on one device; wrong variants are caught."""

import copy
from pathlib import Path

import pytest
import torch
from model_parallel_scenarios import (
    TASKS,
    TOLERANCE,
    WRONG,
    alone,
    linear_task,
    load,
    resnet_task,
    train,
)
from networks import subnets
from processes import launch
from scenario_results import distance
from tiers import sweep
from torch import nn
from torchvision import models

from finetune.models.backbones import build
from finetune.parity.communication_volume import pipeline_bytes
from finetune.parity.pipeline import Pipeline, layers, part_inputs, partition


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[int, Path]:
    """Folders with what the scenarios left, by number of processes."""
    root = tmp_path_factory.mktemp("pipeline")
    return {
        k: launch("model_parallel_scenarios.py", root / f"world{k}", k, "pipeline") for k in (2, 3)
    }


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize("scenario", ["subnets_gpipe", "subnets_1f1b", "resnet"])
def test_weights_are_those_of_one_device(results, scenario, world_size):
    weights, _ = alone(scenario.split("_")[0])
    for rank in range(world_size):  # every rank, not only the first
        assert distance(weights, load(results[world_size], scenario, rank)["weights"]) <= TOLERANCE


@pytest.mark.slow
@pytest.mark.parametrize("task", ["subnets", "resnet"])
def test_training_moved_the_weights(task):
    # else the comparison above would hold for networks that never learned
    network, _, _ = TASKS[task]()
    assert distance(network.state_dict(), alone(task)[0]) > 1e-3


@pytest.mark.slow
@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize("scenario", ["subnets_gpipe", "subnets_1f1b"])
def test_last_process_has_the_mean_loss(results, scenario, world_size):
    _, losses = alone("subnets")
    *others, last = (
        load(results[world_size], scenario, rank)["losses"] for rank in range(world_size)
    )
    assert last == pytest.approx(losses, abs=TOLERANCE)
    assert all(loss is None for other in others for loss in other)


@pytest.mark.slow
def test_summing_micro_batches_is_caught(results):
    assert distance(alone("subnets")[0], load(results[2], "control_sum", 0)["weights"]) > WRONG


@pytest.mark.slow
def test_batch_norm_that_trains_sees_micro_batches(results):
    # With one micro-batch nothing differs: it is they that do it.
    weights, _ = alone("trained")
    assert distance(weights, load(results[2], "trained_norm_whole", 0)["weights"]) <= TOLERANCE
    control = load(results[2], "control_trained_norm", 0)["weights"]
    # not the statistics, which count batches
    learned = [name for name, _ in resnet_task()[0].named_parameters()]
    assert distance({n: weights[n] for n in learned}, {n: control[n] for n in learned}) > WRONG


@pytest.mark.slow
@pytest.mark.parametrize(
    ("scenario", "task"), [("subnets_1f1b", linear_task), ("resnet", resnet_task)]
)
@pytest.mark.parametrize("world_size", [2, 3])
def test_pipeline_sends_what_is_computed(results, scenario, task, world_size):
    network, batches, _ = task()
    expected = pipeline_bytes(partition(layers(network), world_size), batches[0][0])
    assert [
        load(results[world_size], scenario, rank)["sent"] for rank in range(world_size)
    ] == expected


@pytest.mark.slow
@pytest.mark.parametrize("world_size", [2, 3])
def test_pipelines_that_cannot_be_are_refused_on_every_process(results, world_size):
    messages = [
        "a batch of 12 cannot be split evenly into 5 micro-batches",
        f"1f1b over {world_size} processes needs at least {world_size} micro-batches, not 1",
        "there is no schedule 'zigzag': take gpipe or 1f1b",
    ]
    for rank in range(world_size):
        assert load(results[world_size], "refused", rank) == messages


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_a_pipeline_of_one_process(group_of_one, schedule):
    network, batches, lr = linear_task()
    pipeline = Pipeline(partition(layers(network), 1), batches[0][0], schedule, 4)
    train(pipeline.step, pipeline.part.parameters(), batches, lr)
    assert distance(alone("subnets")[0], pipeline.full_state()) <= TOLERANCE
    with pytest.raises(ValueError, match="takes batches of 24, not of 12"):
        pipeline.step(torch.zeros(12, 1024), None)
    with pytest.raises(ValueError, match="2 parts needs as many processes, not 1"):
        Pipeline(partition(layers(network), 2), batches[0][0], schedule, 4)


@pytest.mark.parametrize(
    "backbone",
    sweep(
        ["resnet18", "resnet50", "resnext50_32x4d", "resnet18_small", "lenet"],
        quick=("resnet18_small", "lenet"),
    ),
)
def test_parts_in_a_row_are_the_network(backbone):
    network = build(backbone, 5).eval()
    x = torch.randn(2, 3, 28, 28)
    for k in (1, 2, 3, 4):
        parts = partition(layers(network), k)
        assert len(parts) == k
        with torch.no_grad():
            assert torch.equal(nn.Sequential(*parts)(x), network(x))
        states = [part.state_dict() for part in parts]
        assert sum(map(len, states)) == len(network.state_dict())  # nothing is in two parts
        assert {n: v.data_ptr() for s in states for n, v in s.items()} == {
            n: v.data_ptr() for n, v in network.state_dict().items()
        }


def test_subnets_are_three():
    shapes = [[tuple(p.shape) for p in part.parameters()] for part in layers(subnets())]
    assert shapes == [[(512, 1024), (512,)], [(256, 512), (256,)], [(100, 256), (100,)]]


def test_parts_are_shared_out_evenly():
    row = [nn.Sequential(nn.Identity()) for _ in range(7)]
    named = [nn.Sequential() for _ in row]
    for i, part in enumerate(named):
        part.add_module(f"layer{i}", row[i])
    assert [len(part) for part in partition(named, 3)] == [3, 2, 2]
    assert [name for part in partition(named, 3) for name, _ in part.named_children()] == [
        f"layer{i}" for i in range(7)
    ]


def test_cutting_too_often_is_refused():
    with torch.device("meta"):
        resnet, vit = build("resnet18", 2), models.vit_b_16()
    with pytest.raises(ValueError, match="of 4 parts cannot be split into 5: take 1 to 4 devices"):
        partition(layers(resnet), 5)
    with pytest.raises(ValueError, match="VisionTransformer cannot be split between layers"):
        layers(vit)


def test_activations_cost_nothing_and_change_nothing():
    network = build("resnet18", 10)
    before = copy.deepcopy(network.state_dict())
    found = part_inputs(layers(network), torch.empty(6, 3, 64, 64, device="meta"))
    shapes = [(6, 3, 64, 64), (6, 64, 16, 16), (6, 128, 8, 8), (6, 256, 4, 4), (6, 10)]
    assert [tuple(activation.shape) for activation in found] == shapes
    assert all(activation.is_meta for activation in found)
    assert distance(before, network.state_dict()) == 0
