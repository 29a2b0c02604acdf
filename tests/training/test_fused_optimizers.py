"""Fused optimizers end with the same weights, whatever the layout of gradients and state."""

import copy
from functools import partial

import pytest
import torch
from torch import nn
from torch.optim import SGD, Adam, AdamW, RMSprop

from finetune.training.fused_optimizers import fuse

OPTIMIZERS = {
    "SGD": partial(SGD, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.01),
    "plain SGD": partial(SGD, lr=0.1),
    "Adam": partial(Adam, lr=0.01, weight_decay=0.01),
    "AdamW": partial(AdamW, lr=0.01, amsgrad=True),
}


def trained(
    network: nn.Module,
    make,
    is_fused: bool,
    turned: bool = False,
    hook: bool = True,
    closure: bool = False,
) -> list[torch.Tensor]:
    """Take five steps on gradients of a fixed seed.

    `turned`: laid out unlike the weights from the third step on. `closure`: computed by one, as Lightning has it.
    """
    network = copy.deepcopy(network)
    optimizer = make(network.parameters())
    if is_fused:
        fuse(optimizer)
        assert all(group["fused"] for group in optimizer.param_groups)
        if not hook:
            optimizer._optimizer_step_pre_hooks.clear()
    generator = torch.Generator().manual_seed(0)

    def give_gradients(step: int) -> None:
        for p in network.parameters():
            grad = torch.randn(p.shape, dtype=p.dtype, generator=generator)
            p.grad = grad.contiguous() if turned and step > 1 else torch.empty_like(p).copy_(grad)

    for step in range(5):
        if closure:
            optimizer.step(closure=lambda step=step: give_gradients(step))
        else:
            give_gradients(step)
            optimizer.step()
    return list(network.parameters())


@pytest.fixture
def network():
    torch.manual_seed(0)
    layers = nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.Conv2d(8, 8, 1), nn.Flatten(), nn.Linear(8, 2)
    )
    return layers.double().to(memory_format=torch.channels_last)


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize("closure", [False, True])
def test_it_ends_where_the_other_ways_end(network, name, turned, closure):
    ours = trained(network, OPTIMIZERS[name], True, turned, closure=closure)
    reference = trained(network, partial(OPTIMIZERS[name], foreach=False), False, turned)
    for a, b in zip(ours, reference, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-13, atol=1e-13)


def test_gradients_laid_out_otherwise_would_go_wrong_without_care(network):
    wrong = trained(network, OPTIMIZERS["SGD"], True, turned=True, hook=False)
    reference = trained(network, partial(OPTIMIZERS["SGD"], foreach=False), False, turned=True)
    assert not all(torch.allclose(a, b) for a, b in zip(wrong, reference, strict=True))


@pytest.mark.parametrize("make", [partial(RMSprop, lr=0.1), partial(SGD, lr=0.1, foreach=True)])
def test_others_and_those_with_a_setting_are_left_alone(network, make):
    optimizer = make(network.parameters())
    fuse(optimizer)
    assert not any(group.get("fused") for group in optimizer.param_groups)
    assert not optimizer._optimizer_step_pre_hooks


def test_a_checkpoint_does_not_decide_the_way(network):
    """A run on one device may continue with sharded weights, for which torch has no fused optimizer."""
    fused, reported = (
        fuse(SGD(network.parameters(), lr=0.1, foreach=way)) for way in (None, False)
    )
    saved = [optimizer.state_dict() for optimizer in (fused, reported)]
    assert [state["param_groups"][0]["fused"] for state in saved] == [True, None]
    fused.load_state_dict(saved[1])
    reported.load_state_dict(saved[0])
    assert [optimizer.param_groups[0]["fused"] for optimizer in (fused, reported)] == [True, None]


@pytest.mark.parametrize("name", ["SGD", "Adam"])
def test_state_from_a_checkpoint_is_laid_out_as_the_weights(network, name):
    """A checkpoint of an earlier version may have momentum in another memory format."""
    reference = OPTIMIZERS[name](network.parameters(), foreach=False)
    torch.manual_seed(1)
    for p in network.parameters():
        p.grad = torch.randn_like(p)
    reference.step()
    turned = copy.deepcopy(reference.state_dict())
    for state in turned["state"].values():
        state |= {key: value.contiguous() for key, value in state.items() if torch.is_tensor(value)}
    for p in network.parameters():
        p.grad = torch.ones_like(p)
    weights = [p.detach().clone(memory_format=torch.preserve_format) for p in network.parameters()]
    reference.step()
    expected = [p.detach().clone() for p in network.parameters()]
    with torch.no_grad():
        for p, before in zip(network.parameters(), weights, strict=True):
            p.copy_(before)

    def stepped(hook: bool) -> list[torch.Tensor]:
        other = copy.deepcopy(network)
        for p, q in zip(other.parameters(), network.parameters(), strict=True):
            p.grad = torch.ones_like(q)
        optimizer = fuse(OPTIMIZERS[name](other.parameters()))
        if not hook:
            optimizer._optimizer_load_state_dict_post_hooks.clear()
        optimizer.load_state_dict(copy.deepcopy(turned))
        for group in optimizer.param_groups:
            group["fused"], group["foreach"] = True, None
        optimizer.step()
        return list(other.parameters())

    for a, b in zip(stepped(hook=True), expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-13, atol=1e-13)
    wrong = stepped(hook=False)  # and so it would be seen
    assert not all(
        torch.allclose(a, b, rtol=1e-13, atol=1e-13) for a, b in zip(wrong, expected, strict=True)
    )


@pytest.mark.parametrize("is_mended", [True, False])
def test_the_step_of_a_checkpoint_without_the_fused_way_goes_to_the_device(is_mended):
    """As of a run whose weights were spread over devices: the kernel of a GPU can't read it on the CPU."""
    other = AdamW([nn.Parameter(torch.zeros(3))], lr=0.1, foreach=False)
    other.param_groups[0]["params"][0].grad = torch.ones(3)
    other.step()
    # a device that is not the CPU, as a GPU is
    weight = nn.Parameter(torch.zeros(3, device="meta"))
    optimizer = AdamW([weight], lr=0.1)
    # as `fuse` chooses on a GPU; torch asks the constructor for one
    optimizer.param_groups[0]["fused"] = True
    fuse(optimizer)
    if not is_mended:  # the control
        optimizer._optimizer_load_state_dict_post_hooks.clear()
    optimizer.load_state_dict(other.state_dict())
    devices = {name: value.device.type for name, value in optimizer.state[weight].items()}
    assert devices == {
        "step": "meta" if is_mended else "cpu",
        "exp_avg": "meta",
        "exp_avg_sq": "meta",
    }


def test_weights_spread_over_devices_are_left_alone():
    class Spread(nn.Parameter):
        pass

    optimizer = SGD([Spread(torch.zeros(3))], lr=0.1)
    fuse(optimizer)
    assert not optimizer.param_groups[0]["fused"]


@pytest.mark.parametrize("kind", [SGD, Adam])
def test_loaded_state_of_another_shape_is_refused(kind):
    options = {"lr": 0.1, "momentum": 0.9} if kind is SGD else {"lr": 0.1}
    weight = nn.Parameter(torch.ones(3, 4))
    optimizer = fuse(kind([weight], **options))
    weight.grad = torch.ones(3, 4)
    optimizer.step()
    state = optimizer.state_dict()
    fuse(kind([weight], **options)).load_state_dict(state)  # the control
    name = "momentum_buffer" if kind is SGD else "exp_avg"
    state["state"][0][name] = torch.zeros(2)
    with pytest.raises(
        ValueError, match=rf"is damaged: {name} has the shape \(2,\), expected \(3, 4\)"
    ):
        fuse(kind([weight], **options)).load_state_dict(state)
