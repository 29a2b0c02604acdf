"""A head over several stages gets the features that plain PyTorch pools; the network is like any other."""

import copy
import pickle

import pytest
import torch
from networks import NarrowResNet
from promise import promise
from torch import nn

from finetune.inference.class_activation import class_activation
from finetune.models.backbones import build, skeleton
from finetune.models.fx import fuse_batch_norm
from finetune.models.image_classifier import build_image_classifier
from finetune.models.multi_stage import most_stages, use_stages
from finetune.models.stages import freeze, head, head_name, stages, without_head
from finetune.models.weight_files import Pretrained
from finetune.models.weights import load_weights
from finetune.system.messages import WrongUsage

# the modules whose outputs are pooled, before the head's own input
STAGES = {
    "narrow": ["layer2", "layer3"],
    "timm/test_resnet": ["layer2", "layer3"],
    "timm/test_convnext": ["stages.1", "stages.2"],
    # a layer lies between its last stage and its head
    "timm/test_efficientnet": ["blocks.2", "blocks.3", "blocks.4"],
}
X = torch.randn(2, 3, 64, 64, generator=torch.Generator().manual_seed(0))


def plain(name: str) -> nn.Module:
    """An untrained network whose batch norm has the statistics of a batch: all stages differ from 0."""
    torch.manual_seed(0)
    network = NarrowResNet(3) if name == "narrow" else build(name, 3)
    for module in network.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.momentum = None
    with torch.no_grad():
        network.train()(torch.randn(8, 3, 64, 64))
    return network.eval()


def wide(name: str) -> nn.Module:
    network = plain(name)
    use_stages(network, 3, name)
    return network.eval()


def pooled(network: nn.Module, modules: list[str]) -> torch.Tensor:
    """The means over all places of what some modules give, and what the head takes."""
    parts: list[torch.Tensor] = []
    hooks = [
        network.get_submodule(name).register_forward_hook(
            lambda _, given, out: parts.append(out.mean(dim=(2, 3)))
        )
        for name in modules
    ]
    hooks.append(head(network).register_forward_pre_hook(lambda _, given: parts.append(given[0])))
    with torch.no_grad():
        network(X)
    for hook in hooks:
        hook.remove()
    return torch.cat(parts, dim=1)


@promise("solved-head")
@pytest.mark.parametrize("name", STAGES)
def test_the_head_takes_the_means_of_the_stages(name):
    network = wide(name)
    features = pooled(network, [])
    expected = pooled(plain(name), STAGES[name])
    torch.testing.assert_close(features, expected)
    assert head(network).in_features == features.shape[1]
    assert not torch.allclose(features, expected.roll(1, dims=1))  # the control: another order


@pytest.mark.parametrize("name", STAGES)
def test_all_but_the_head_is_the_plain_network(name):
    network, narrow = wide(name), plain(name)
    shapes = {key: value.shape for key, value in network.state_dict().items()}
    before = {key: value.shape for key, value in narrow.state_dict().items()}
    weight = f"{head_name(narrow)}.weight"
    assert shapes.pop(weight) != before.pop(weight) and shapes == before
    assert stages(network).keys() == stages(narrow).keys()
    assert len(freeze(network, "backbone")) == len(stages(narrow))
    moved = copy.deepcopy(network)
    with torch.no_grad():
        for parameter in moved.parameters():
            parameter.add_(1)
    load_weights(moved, Pretrained(narrow.state_dict(), None, "plain weights"))
    torch.testing.assert_close(pooled(moved, []), pooled(network, []), rtol=0, atol=0)
    load_weights(narrow, Pretrained(network.state_dict(), None, "wide weights"))


@pytest.mark.parametrize("name", STAGES)
def test_copied_pickled_and_traced_networks_answer_the_same(name):
    network = wide(name)
    with torch.no_grad():
        logits = network(X)
        others = {
            "copied": copy.deepcopy(network),
            "pickled": pickle.loads(pickle.dumps(network)),
            "fused": fuse_batch_norm(network),
        }
        for how, other in others.items():
            torch.testing.assert_close(other(X), logits, rtol=1e-4, atol=1e-5, msg=how)
        torch.testing.assert_close(without_head(network)(X), pooled(network, []))
        head(others["copied"]).weight.zero_()
        torch.testing.assert_close(network(X), logits)


def test_the_class_activation_maps_of_all_stages_add_up_to_the_logit():
    network = wide("narrow")
    with torch.no_grad():
        nn.init.uniform_(
            head(network).weight, 0.1, 1.0
        )  # all evidence is positive: none is cut off
        logits = network(X)
    maps = class_activation(network, X, [0, 1])
    assert maps is not None and maps.shape == (2, 2, 2)
    means = torch.from_numpy(maps).mean(dim=(1, 2))
    ratios = (logits[[0, 1], [0, 1]] - head(network).bias[[0, 1]]).detach() / means
    largest = evidence(network, [0, 1]).amax(dim=(1, 2))
    torch.testing.assert_close(ratios, largest)
    with torch.no_grad():  # the control: one stage less
        head(network).weight[:, :32] = 0
    assert not torch.allclose(evidence(network, [0, 1]).amax(dim=(1, 2)), ratios)


def evidence(network: nn.Module, classes: list[int]) -> torch.Tensor:
    """The evidence at each place of the last maps, from the modules' outputs."""
    outputs: list[torch.Tensor] = []
    hooks = [
        network.get_submodule(f"layer{i}").register_forward_hook(
            lambda _, given, out: outputs.append(out)
        )
        for i in (2, 3, 4)
    ]
    with torch.no_grad():
        network(X)
    for hook in hooks:
        hook.remove()
    weights = head(network).weight.detach()[classes].split([out.shape[1] for out in outputs], 1)
    total = torch.zeros(2, 2, 2)
    for out, weight in zip(outputs, weights, strict=True):
        places = (out * weight[:, :, None, None]).sum(1)
        side = out.shape[-1] // 2
        total += places.unflatten(1, (2, side)).unflatten(3, (2, side)).mean(dim=(2, 4))
    return total


@pytest.mark.parametrize(
    ("name", "most"),
    [
        ("resnet18", 4),
        ("timm/tf_efficientnet_lite0", 4),
        ("mobilenet_v3_small", 1),
        ("timm/test_vit", 1),
    ],
)
def test_networks_that_do_not_support_it_say_so(name, most):
    assert most_stages(skeleton(name)) == most
    if most == 1:
        with pytest.raises(
            WrongUsage, match=f"the head of {name} can take .* of the last stage only"
        ):
            build_image_classifier(name, 2, head_stages=3)


@pytest.mark.parametrize("wrong", [0, 5, True, 2.0])
def test_a_number_of_stages_is_from_1_to_4(wrong):
    with pytest.raises(WrongUsage, match="model.head_stages must be a whole number from 1 to 4"):
        use_stages(nn.Identity(), wrong, "some")
