"""Networks: their heads, their initial weights, and the images that they take."""

import pytest
import torch
from networks import HEADS, network
from torch import nn
from torchvision import models

from finetune.models.backbones import build, normalization
from finetune.models.stages import head
from finetune.parity import data_parallel
from finetune.system.messages import WrongUsage


@pytest.mark.parametrize("backbone", HEADS)
def test_head_is_the_only_difference_to_torchvision(backbone):
    with torch.device("meta"):
        ours, theirs = build(backbone, 3).state_dict(), models.get_model(backbone).state_dict()
    assert list(ours) == list(theirs)
    changed = {key for key in ours if ours[key].shape != theirs[key].shape}
    assert changed == {f"{HEADS[backbone]}.weight", f"{HEADS[backbone]}.bias"}


def test_head_is_xavier():
    layer = head(network("resnet18"))
    bound = (6 / (512 + 3)) ** 0.5  # Glorot and Bengio 2010, equation 16
    assert layer.weight.abs().max() <= bound
    # 1,536 uniform numbers: 2 %
    assert layer.weight.std().item() == pytest.approx(bound / 3**0.5, rel=0.05)
    assert layer.bias.eq(0).all()


def test_unknown_backbone_names_the_nearest():
    with pytest.raises(ValueError, match=r"'resnet81'; did you mean .*resnet18"):
        build("resnet81", 2)
    with pytest.raises(ValueError, match="no classification network 'fcn_resnet50'"):
        build("fcn_resnet50", 2)  # torchvision has it, but it segments
    with pytest.raises(WrongUsage, match="squeezenet1_1 is not supported"):
        build("squeezenet1_1", 2)


def test_lenet_is_the_one_by_hand():
    torch.manual_seed(0)
    net = build("lenet", 10).double()
    for parameter in net.parameters():
        # as first drawn, logits are too small to tell networks apart
        nn.init.normal_(parameter, std=0.1)
    grey = torch.rand(2, 1, 28, 28, dtype=torch.float64)
    params = [p.T if p.dim() == 2 else p for p in net.parameters()]
    expected = data_parallel.lenet(grey, params)
    assert expected.abs().max() > 0.1
    # the channels' mean
    torch.testing.assert_close(net(grey.expand(2, 3, 28, 28)), expected, rtol=0, atol=1e-12)
    assert not torch.allclose(net(grey.expand(2, 3, 28, 28).flip(2)), expected)


@pytest.mark.parametrize("backbone", ["lenet", "resnet18_small"])
def test_first_weights_are_the_book_s(backbone):
    torch.manual_seed(0)
    layers = [m for m in build(backbone, 10).modules() if isinstance(m, nn.Conv2d | nn.Linear)]
    drawn = torch.cat([layer.weight.flatten() for layer in layers])
    assert drawn.std().item() == pytest.approx(0.01, rel=0.02)  # over 100,000 numbers
    assert abs(drawn.mean()) < 1e-4
    assert all(layer.bias is None or layer.bias.eq(0).all() for layer in layers)


def test_resnet18_small_keeps_small_images_large():
    net, seen = build("resnet18_small", 10).eval(), {}
    for name in ("conv1", "layer1", "layer4"):
        net.get_submodule(name).register_forward_hook(
            lambda m, i, o, name=name: seen.update({name: o.shape[1:]})
        )
    with torch.inference_mode():
        net(torch.rand(1, 3, 28, 28))
    assert seen == {"conv1": (64, 28, 28), "layer1": (64, 28, 28), "layer4": (512, 4, 4)}
    assert net.get_submodule("conv1.1").in_channels == 1


def test_small_cnn_is_the_text_s():
    shapes = [tuple(p.shape) for p in build("small_cnn", 10).parameters() if p.dim() > 1]
    assert shapes == [(32, 3, 5, 5), (64, 4608), (10, 64)]


@pytest.mark.parametrize("backbone", ["lenet", "small_cnn"])
def test_images_of_another_size_are_refused_in_a_line(backbone):
    network = build(backbone, 10)
    with pytest.raises(ValueError, match=r"^image_size must be 28, not 32x28$"):
        network(torch.rand(1, 3, 32, 28))
    with pytest.raises(ValueError, match=r"^image_size must be 28, not 32$"):
        network(torch.rand(1, 3, 32, 32))


def test_our_own_take_pixels_as_they_are():
    assert normalization("lenet") == ((0.0, 0.0, 0.0), (1.0, 1.0, 1.0))
    assert normalization("resnet18")[0] == (0.485, 0.456, 0.406)
    with pytest.raises(ValueError, match="did you mean 'lenet'"):
        build("lenett", 3)


@pytest.mark.parametrize(
    ("backbone", "image_size", "num"),
    [
        ("vit_b_16", None, 14),
        ("vit_b_16", 224, 14),
        ("vit_b_16", 384, 24),
        ("vit_h_14", 518, 37),
        ("vit_b_32", 64, 2),
    ],
)
def test_a_vit_has_positions_for_the_images_size(backbone, image_size, num):
    with torch.device("meta"):
        network = build(backbone, 3, image_size)
    assert network.image_size == (image_size or 224)
    assert network.encoder.pos_embedding.shape[1] == 1 + num * num


def test_a_size_that_a_vits_patches_do_not_fill_is_reported():
    with pytest.raises(
        WrongUsage,
        match="48x48 pixels: image_size must be a multiple of the side of its patches, 32$",
    ):
        build("vit_b_32", 3, 48)
