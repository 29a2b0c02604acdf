"""From images to logits by a plain module: normalization, layout, members."""

import copy
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn
from torchvision.transforms.v2 import functional as reference

from finetune.models import image_classifier
from finetune.models.ensemble import Ensemble
from finetune.models.image_classifier import ImageClassifier, build_image_classifier
from finetune.models.stages import head


def images(side: int = 28, num: int = 3) -> Tensor:
    return torch.randint(0, 256, (num, 3, side, side), dtype=torch.uint8)


def test_normalization_is_that_of_the_backbone():
    model, x = build_image_classifier("resnet18", 2).eval(), images(40)
    scaled = reference.to_dtype(x, torch.float32, scale=True)
    expected = reference.normalize(scaled, [0.485, 0.456, 0.406], [0.229, 0.224, 0.225])
    with torch.no_grad():
        logits = model(x)
        torch.testing.assert_close(logits, model.network(expected), rtol=1e-4, atol=1e-5)
        assert not torch.allclose(logits, model.network(scaled), rtol=1e-4, atol=1e-5)  # control
    assert model.normalized(x).is_contiguous(memory_format=torch.channels_last)
    assert model.network.conv1.weight.is_contiguous(memory_format=torch.channels_last)


def test_logits_have_the_precision_of_the_buffers():
    model = build_image_classifier("small_cnn", 2).eval()
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        assert model.network(model.normalized(images())).dtype == torch.bfloat16
        assert model(images()).dtype == torch.float32
    assert model.double()(images()).dtype == torch.float64


@pytest.mark.parametrize("num", [1, 3])
def test_members_answer_together_and_train_apart(num):
    model, x = build_image_classifier("small_cnn", 2, members=num), images()
    assert len(model.members) == num and isinstance(model.network, Ensemble) == (num > 1)
    assert model.train()(x).shape == ((num, 3, 2) if num > 1 else (3, 2))
    p = model.eval()(x).softmax(1)
    each = [network(model.normalized(x)).softmax(1) for network in model.members]
    torch.testing.assert_close(p, torch.stack(each).mean(0))


def test_each_member_is_frozen():
    model = build_image_classifier("resnet18", 2, members=2)
    frozen = model.freeze("layer1")
    for network in model.members:
        assert any(module is network.layer1 for module in frozen)
        assert not any(p.requires_grad for p in network.layer1.parameters())
        assert all(p.requires_grad for p in network.layer2.parameters())
        assert head(network).weight.requires_grad
    assert build_image_classifier("resnet18", 2).freeze(None) == []


def test_networks_are_built_in_turn():
    """So that a seed gives the first member the weights of a single network."""
    made: list[nn.Module] = []

    def build(backbone: str, num_classes: int, image_size: int | None) -> nn.Module:
        made.append(nn.Linear(1, num_classes))
        return made[-1]

    with patch.object(image_classifier, "build", build):
        model = build_image_classifier("small_cnn", 2, members=2)
    assert model.members == made


def test_a_copy_shares_nothing_and_another_around_the_network_shares_its_weights():
    model = build_image_classifier("small_cnn", 2)
    copied, around = copy.deepcopy(model), ImageClassifier(model.network, model.mean, model.std)
    with torch.no_grad():
        head(model.network).bias.fill_(5)
    assert (head(around.network).bias == 5).all()
    assert not (head(copied.network).bias == 5).any()
