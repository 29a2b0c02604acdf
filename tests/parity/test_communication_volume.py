"""Bytes sent, worked out by hand; test_pipeline.py and test_tensor_parallel.py count what is really sent."""

import torch
from networks import subnets
from torch import nn

from finetune.parity.communication_volume import data_parallel_bytes, linear_bytes, pipeline_bytes
from finetune.parity.pipeline import layers, partition

NUM_PARAMETERS = 1024 * 512 + 512 + 512 * 256 + 256 + 256 * 100 + 100


def test_data_parallel():
    network = subnets()
    assert data_parallel_bytes(network, 1) == [0]
    assert data_parallel_bytes(network, 2) == [NUM_PARAMETERS * 4] * 2  # half round the ring, twice
    assert data_parallel_bytes(network, 4) == [NUM_PARAMETERS * 6] * 4
    network[0].requires_grad_(False)
    assert data_parallel_bytes(network, 2) == [(NUM_PARAMETERS - 1025 * 512) * 4] * 2


def test_pipeline():
    x = torch.empty(8, 1024, dtype=torch.float64)
    parts = layers(subnets().double())
    assert pipeline_bytes(parts, x) == [8 * 8 * 512, 8 * 8 * (512 + 256), 8 * 8 * 256]
    assert pipeline_bytes(partition(parts, 1), x) == [0]


def test_linear():
    network = subnets()
    # The first input is data, which has no gradient; the second layer's outputs and the third's input gradient are
    # summed, the third's outputs gathered: 34, 33 and 33 of 100, which are sent as 34 each.
    ring = 2 * 2 * (8 * 4 * 256) // 3
    assert linear_bytes(network, ["0", "2", "4"], 8, 3) == [2 * ring + 2 * 8 * 4 * 34] * 3
    assert linear_bytes(network, ["0", "2", "4"], 8, 1) == [0]
    # A head behind something that learns, and behind something that does not.
    assert linear_bytes(network, ["4"], 8, 2) == [8 * 4 * 256 + 8 * 4 * 50] * 2
    network[:4].requires_grad_(False)
    assert linear_bytes(network, ["4"], 8, 2) == [8 * 4 * 50] * 2
    assert linear_bytes(nn.Sequential(nn.Linear(6, 5)), ["0"], 8, 2) == [8 * 4 * 3] * 2
