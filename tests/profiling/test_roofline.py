"""The least time of a step, against operations and bytes counted by hand."""

import pytest
import torch
from torch import nn

from finetune.profiling.roofline import Rates, Work, least_seconds, measured_rates


def test_operations_and_bytes_of_a_product_are_those_counted_by_hand():
    a, b = torch.randn(3, 4), torch.randn(4, 5)
    with Work() as work:
        torch.relu(a @ b)  # the product alone: 2 * 3 * 4 * 5 operations; 12 + 20 + 15 floats
    assert work.products == [(120, 4 * 47)]


def test_a_convolution_counts_forward_and_both_gradients():
    conv = nn.Conv2d(2, 3, 3, padding=1, bias=False)
    x = torch.randn(1, 2, 8, 8, requires_grad=True)
    forward = 2 * 64 * 3 * 2 * 9
    least = least_seconds(lambda: conv(x).sum().backward(), Rates(1.0, 1e30))
    assert least["operations"] == 3 * forward
    assert least["seconds"] == pytest.approx(3 * forward)


def test_each_product_takes_the_slower_of_its_two_roofs():
    a, b = torch.randn(3, 4), torch.randn(4, 5)
    assert least_seconds(lambda: a @ b, Rates(120.0, 1e30))["seconds"] == pytest.approx(1)
    assert least_seconds(lambda: a @ b, Rates(1e30, 94.0))["seconds"] == pytest.approx(2)


@pytest.mark.slow
def test_rates_are_of_this_device():
    rates = measured_rates(torch.device("cpu"), torch.float32, repeats=1)
    assert 1e8 < rates.operations < 1e15 and 1e8 < rates.bytes < 1e13
