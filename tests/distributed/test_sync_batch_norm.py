"""Batch norm over all devices: one device equals torch's own; tests/support/ddp_scenarios.py has two and three.

A process group of one process computes with the same code, without communication.
"""

import copy
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from promise import control, promise
from timm.layers import BatchNormAct2d
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from finetune.distributed.sync_batch_norm import (
    SharedBatchNorm,
    _at_least_float32,
    share_statistics,
)


def flag_names(norm: nn.Module) -> tuple[nn.Module, nn.Module]:
    """Torch's batch norm with weights of some kind, and ours with the same."""
    network = nn.Sequential(norm.double())
    if norm.affine:
        nn.init.uniform_(norm.weight, 0.5, 2)
        nn.init.normal_(norm.bias)
    shared = copy.deepcopy(network)
    share_statistics(shared)
    assert isinstance(shared[0], SharedBatchNorm)
    return network, shared


@promise("batch-norm")
@pytest.mark.parametrize(
    ("norm", "shape"),
    [
        (nn.BatchNorm1d(4), (6, 4)),
        (nn.BatchNorm1d(4, momentum=None), (3, 4, 5)),
        (nn.BatchNorm2d(4, eps=0.1), (3, 4, 5, 2)),
        (nn.BatchNorm2d(4, affine=False), (3, 4, 5, 2)),
        (nn.BatchNorm2d(4, track_running_stats=False), (1, 4, 5, 2)),
        (nn.BatchNorm3d(4), (2, 4, 2, 3, 2)),
    ],
)
def test_output_gradients_and_running_statistics_are_torchs(group_of_one, norm, shape):
    torch.manual_seed(0)
    expected, shared = flag_names(norm)
    for _ in range(3):
        x = torch.randn(shape, dtype=torch.float64) * 3 + 1
        inputs = [x.clone().requires_grad_() for _ in range(2)]
        outputs = [network(i) for network, i in zip((expected, shared), inputs, strict=True)]
        slope = torch.randn(shape, dtype=torch.float64)
        for output in outputs:
            (output * slope).sum().backward()
        # float64: rounding, of sums of at most 60 values
        torch.testing.assert_close(outputs[1], outputs[0], rtol=0, atol=1e-13)
        torch.testing.assert_close(inputs[1].grad, inputs[0].grad, rtol=0, atol=1e-13)
    for ours, theirs in zip(shared.parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad, rtol=0, atol=1e-12)
    assert shared.state_dict().keys() == expected.state_dict().keys()
    for name, value in expected.state_dict().items():
        torch.testing.assert_close(shared.state_dict()[name], value, rtol=0, atol=1e-13)
    shared.eval(), expected.eval()
    torch.testing.assert_close(shared(x), expected(x), rtol=0, atol=1e-12)


@control("batch-norm")
def test_the_control_a_gradient_without_the_statistics_is_another(group_of_one):
    """A backward that treats mean and variance as constants must be far outside the tolerance."""
    torch.manual_seed(0)
    _, shared = flag_names(nn.BatchNorm2d(4))
    x = torch.randn(3, 4, 5, 2, dtype=torch.float64, requires_grad=True)
    slope = torch.randn(x.shape, dtype=torch.float64)
    (shared(x) * slope).sum().backward()
    deviation = x.detach().var((0, 2, 3), correction=0).add(1e-5).sqrt()
    as_constants = slope * (shared[0].weight / deviation).detach().view(1, 4, 1, 1)
    assert (x.grad - as_constants).abs().max() > 0.1


def test_half_precision_keeps_its_type_and_precise_statistics(group_of_one):
    torch.manual_seed(0)
    shared = nn.Sequential(nn.BatchNorm2d(4))
    share_statistics(shared)
    x = (torch.randn(8, 4, 16, 16) + 100).bfloat16().requires_grad_()
    y = shared(x)
    y.float().square().sum().backward()
    assert y.dtype == x.grad.dtype == torch.bfloat16
    assert shared[0].running_mean.dtype == torch.float32
    mean = x.detach().float().mean((0, 2, 3))
    # bf16 alone would be 4e-3 off
    torch.testing.assert_close(shared[0].running_mean, 0.1 * mean, rtol=1e-6, atol=0)


def test_only_what_trains_is_replaced_and_parameters_stay(group_of_one):
    frozen, alone = nn.Sequential(nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4)), nn.BatchNorm2d(4)
    network = nn.Sequential(frozen, alone, nn.Sequential(nn.BatchNorm2d(4).eval()))
    parameters, buffers = list(network.parameters()), list(network.buffers())
    share_statistics(network, except_in=[frozen])
    assert network[0] is frozen and type(frozen[1]) is nn.BatchNorm2d
    assert type(network[1]) is type(network[2][0]) is SharedBatchNorm
    assert network[1].training and not network[2][0].training
    assert all(a is b for a, b in zip(network.parameters(), parameters, strict=True))
    assert all(a is b for a, b in zip(network.buffers(), buffers, strict=True))


def sent(share: int, precise=_at_least_float32) -> list[tuple[str, torch.dtype, int]]:
    """The numbers that a rank with this many images sends in a step under bf16, while another rank has four images."""
    network = nn.Sequential(nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4))
    share_statistics(network)
    seen = []

    def gather(parts: list[torch.Tensor], part: torch.Tensor, group: object) -> None:
        seen.append(("gather", part.dtype, part.numel()))
        for received in parts:
            received.copy_(part)
            received[-1] += 64  # values a channel, of the other

    def reduce(sums: torch.Tensor, group: object) -> None:
        seen.append(("reduce", sums.dtype, sums.numel()))

    x = torch.randn(share, 3, 4, 4, requires_grad=True)
    with patch.object(dist, "all_gather", gather), patch.object(dist, "all_reduce", reduce):
        with (
            patch("finetune.distributed.sync_batch_norm._at_least_float32", precise),
            torch.autocast("cpu", torch.bfloat16),
        ):
            y = network(x)
        assert y.dtype == torch.bfloat16 and y.shape == (share, 4, 4, 4)
        y.float().sum().backward()
    assert x.grad.shape == x.shape
    assert network[1].weight.grad.dtype == torch.float32
    return seen


def test_every_device_sends_as_much_under_bf16_also_one_without_images(group_of_one):
    expected = [("gather", torch.float32, 2 * 4 + 1), ("reduce", torch.float32, 2 * 4)]
    assert sent(share=4) == sent(share=1) == sent(share=0) == expected
    # the control, as torch's SyncBatchNorm has it: zeros in the type of the input
    assert (
        sent(share=0, precise=lambda x: x if x.numel() == 0 else _at_least_float32(x)) != expected
    )


class Waits(TorchDispatchMode):
    """Counts where the program looks at a number: there it would wait for a GPU."""

    num = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.num += func is torch.ops.aten._local_scalar_dense.default
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("momentum", [0.1, None])
def test_no_step_waits_for_a_gpu(group_of_one, momentum):
    shared = nn.Sequential(nn.BatchNorm2d(4, momentum=momentum))
    share_statistics(shared)
    with Waits() as waits:
        loss = shared(torch.randn(2, 4, 3, 3, requires_grad=True)).sum()
        loss.backward()
        assert waits.num == 0
        assert bool(loss > -1e9) and waits.num == 1  # and so it would be seen


def test_one_value_a_channel_is_reported(group_of_one):
    shared = nn.Sequential(nn.BatchNorm2d(4))
    share_statistics(shared)
    with pytest.raises(ValueError, match="more than one value a channel"):
        shared(torch.zeros(1, 4, 1, 1))


def test_without_a_process_group_it_is_plain_batch_norm():
    expected, shared = flag_names(nn.BatchNorm2d(4))
    x = torch.randn(3, 4, 5, 2, dtype=torch.float64)
    assert torch.equal(shared(x), expected(x))


@pytest.mark.parametrize("is_training", [True, False])
def test_what_timm_does_behind_batch_norm_is_kept(group_of_one, is_training):
    torch.manual_seed(0)
    expected, shared = flag_names(BatchNormAct2d(4, act_layer=nn.SiLU))
    plain = nn.Sequential(nn.BatchNorm2d(4).double())
    plain[0].load_state_dict(expected[0].state_dict())
    assert list(shared.state_dict()) == list(expected.state_dict())
    x = torch.randn(3, 4, 5, 2, dtype=torch.float64)
    inputs = [x.clone().requires_grad_() for _ in range(2)]
    outputs = [
        network.train(is_training)(i) for network, i in zip((expected, shared), inputs, strict=True)
    ]
    for output in outputs:
        output.square().sum().backward()
    # float64: rounding, as above
    torch.testing.assert_close(outputs[1], outputs[0], rtol=0, atol=1e-13)
    torch.testing.assert_close(inputs[1].grad, inputs[0].grad, rtol=0, atol=1e-12)
    # which it was, once replaced by its class
    assert not torch.allclose(plain.train(is_training)(x), outputs[0])


def test_batch_norm_that_does_more_is_refused(group_of_one):
    class Louder(nn.BatchNorm2d):
        def forward(self, input):
            return 2 * super().forward(input)

    with pytest.raises(ValueError, match="Louder does not support several devices: train on one"):
        share_statistics(nn.Sequential(Louder(3)))
