"""Batch norm over all devices, and the loss of a device without images. On two and three: test_devices.py.

A process group of one process computes with the same code, without communication.
"""

import copy

import pytest
import torch
from promise import control, promise
from timm.layers import BatchNormAct2d
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode  # noqa: PLC2701 (no public one)

from finetune.distributed.global_loss import zero_loss
from finetune.distributed.sync_batch_norm import SharedBatchNorm, share_statistics
from finetune.training.loss import Target, loss_sum


def both(norm: nn.Module) -> tuple[nn.Module, nn.Module]:
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
    expected, shared = both(norm)
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
def test_control_a_gradient_without_the_statistics_is_another(group_of_one):
    """A backward that treats mean and variance as constants must be far outside the tolerance."""
    torch.manual_seed(0)
    _, shared = both(nn.BatchNorm2d(4))
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


class Waits(TorchDispatchMode):
    """Counts where the program looks at a number: there it would wait for a GPU."""

    num = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.num += func is torch.ops.aten._local_scalar_dense.default  # noqa: SLF001
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


@pytest.mark.parametrize("is_training", [True, False])
def test_activations_of_timm_behind_batch_norm_stay(group_of_one, is_training):
    torch.manual_seed(0)
    expected, shared = both(BatchNormAct2d(4, act_layer=nn.SiLU))
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

    with pytest.raises(ValueError, match="Louder does not support several devices"):
        share_statistics(nn.Sequential(Louder(3)))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_the_loss_of_no_image_reaches_every_parameter_that_trains_and_moves_none(dtype):
    network = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2), nn.Linear(2, 2)).to(dtype)
    network[0].requires_grad_(False)
    loss = zero_loss(network)
    loss.backward()
    assert loss == 0 and all(parameter.grad is None for parameter in network[0].parameters())
    for parameter in [*network[1].parameters(), *network[2].parameters()]:
        assert torch.equal(parameter.grad, torch.zeros_like(parameter))
    # the type of the loss of images: devices add them up
    logits, class_weight = torch.zeros(1, 2, dtype=dtype), torch.ones(2, dtype=dtype)
    assert loss.dtype == loss_sum(logits, Target(torch.tensor([0])), class_weight, 0.0).dtype
