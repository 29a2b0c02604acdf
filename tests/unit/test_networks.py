"""Networks of torchvision, timm and our own: heads, first weights, sizes of images, and what is said of them."""

import json

import pytest
import timm
import torch
from networks import HEADS, few_blocks, network, skeleton
from promise import control, promise
from small_timm import FAMILIES
from tiers import sweep
from timm.data import resolve_data_config
from torch import nn
from torchvision import models
from torchvision.transforms.v2 import functional as reference

from finetune.features.image_features import fuse_batch_norm
from finetune.fitting.network_choice import BUILT_IN
from finetune.models.backbones import LIBRARIES, SMALL_NETWORKS, build, library_of, normalization
from finetune.models.image_classifier import build_image_classifier
from finetune.models.library import ListedNetwork
from finetune.models.network_names import SMALL, TORCHVISION, is_timm
from finetune.models.stages import batch_norms, head
from finetune.models.timm_networks import describe, pretrained_cfg, timm_name
from finetune.runs.licence import is_restricted, licence
from finetune.training.dropout import make_per_image


def test_names_that_are_known_without_torch_are_those_of_torchvision_and_ours():
    assert sorted(TORCHVISION) == sorted(models.list_models(module=models))
    assert set(SMALL) == SMALL_NETWORKS.keys()


@promise("backbones")
@control("backbones")
def test_the_listed_networks_are_those_of_torchvision_and_timm():
    networks = {network.name: network for library in LIBRARIES for network in library.listed()}
    assert {"lenet", "resnet18", "vit_h_14", *BUILT_IN} <= networks.keys()
    assert not any(name.startswith("squeezenet") for name in networks)  # it has no linear head
    assert networks["regnet_y_128gf"].licence == "CC-BY-NC-4.0"
    assert sum(name.startswith("timm/") for name in networks) > 1000
    name = "timm/convnext_nano.in12k_ft_in1k"
    config = timm.get_pretrained_cfg(name.removeprefix("timm/"))
    assert networks[name] == ListedNetwork(name, config.input_size[1], config.license)
    with torch.device("meta"):
        network = timm.create_model("convnext_nano")
        other = build(name, 10)
    num = library_of(name).num_parameters(name)
    assert num == sum(p.numel() for p in network.parameters())
    # The control: another number of classes has other parameters.
    assert num != sum(p.numel() for p in other.parameters())


@pytest.mark.parametrize("backbone", sweep(HEADS, quick=["resnet18", "vit_b_16"]))
def test_the_head_is_the_only_difference_to_torchvision(backbone):
    with torch.device("meta"):
        ours, theirs = build(backbone, 3).state_dict(), models.get_model(backbone).state_dict()
    assert list(ours) == list(theirs)
    changed = {key for key in ours if ours[key].shape != theirs[key].shape}
    assert changed == {f"{HEADS[backbone]}.weight", f"{HEADS[backbone]}.bias"}


@pytest.mark.parametrize("family", sweep(FAMILIES, quick=("resnet", "vit")))
def test_the_head_is_timms_classifier(family):
    backbone, image_size = FAMILIES[family]
    network = build(backbone, 3, image_size).eval()
    classifier = timm.get_pretrained_cfg(timm_name(backbone)).classifier
    assert network.get_submodule(classifier) is head(network)
    with torch.inference_mode():
        assert network(torch.rand(2, 3, image_size, image_size)).shape == (2, 3)
    theirs = timm.create_model(timm_name(backbone), num_classes=3).state_dict()
    assert list(network.state_dict()) == list(theirs)


@pytest.mark.parametrize("backbone", ["resnet18", "timm/test_resnet", "timm/test_convnext"])
def test_a_new_head_is_xavier(backbone):
    layer = head(network(backbone))
    bound = (6 / (layer.in_features + 3)) ** 0.5  # Glorot and Bengio 2010, equation 16
    assert 0.9 * bound < layer.weight.abs().max() <= bound
    # uniform numbers, at least 192
    assert layer.weight.std().item() == pytest.approx(bound / 3**0.5, rel=0.1)
    assert layer.bias.eq(0).all()


@pytest.mark.parametrize(
    ("backbone", "words"),
    [
        ("resnet81", r"'resnet81' .*did you mean .*resnet18"),
        ("squeezenet1_1", "squeezenet1_1 is not supported"),
        ("timm/resnet81", "did you mean 'resnet18'"),
        ("timm/resnet18.nowhere", "valid are .*tv_in1k"),
        ("timm/deit_tiny_distilled_patch16_224", "head_dist"),
        ("timm/coat_tiny", "share weights"),
        ("timm/dla34", "linear head"),
        # a name is never a place
        ("timm/hf-hub:somebody/theirs", "has no network"),
        ("timm/local-dir:/tmp", "has no network"),
    ],
)
def test_a_backbone_that_is_unsupported_is_reported_in_a_line(backbone, words):
    with pytest.raises(ValueError, match=words) as caught:
        skeleton(backbone)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("backbone", "image_size", "side"),
    [
        ("vit_b_16", 384, 24),
        ("timm/vit_small_patch16_224", 48, 3),
        ("timm/vit_small_patch16_224", None, 14),
    ],
)
def test_a_vit_has_positions_for_the_size_of_the_images(backbone, image_size, side):
    with torch.device("meta"):
        network = build(backbone, 3, image_size)
    positions = network.pos_embed if is_timm(backbone) else network.encoder.pos_embedding
    assert positions.shape[1] == 1 + side * side


def test_normalisation_is_torchvisions_and_part_of_the_classifier():
    model = build_image_classifier("resnet18", 2).eval()
    images = torch.randint(0, 256, (3, 3, 40, 40), dtype=torch.uint8)
    scaled = reference.to_dtype(images, torch.float32, scale=True)
    expected = reference.normalize(scaled, [0.485, 0.456, 0.406], [0.229, 0.224, 0.225])
    with torch.no_grad():
        logits = model(images)
        torch.testing.assert_close(logits, model.network(expected), rtol=1e-4, atol=1e-5)
        assert not torch.allclose(logits, model.network(scaled), rtol=1e-4, atol=1e-5)  # control
    for tensor in (model.normalized(images), model.network.conv1.weight):
        assert tensor.is_contiguous(memory_format=torch.channels_last)
    assert normalization("lenet") == ((0.0, 0.0, 0.0), (1.0, 1.0, 1.0))  # pixels as they are


# One of each way to be built: blocks with shortcuts, batch norm before, inverted residuals, branches, tokens, dropout.
FUSED = {
    "resnet18": 64,
    "densenet121": 64,
    "mobilenet_v2": 64,
    "efficientnet": 64,
    "googlenet": 64,
    "swin_t": 64,
    "vit": 32,
}


@pytest.mark.parametrize("backbone", sweep(FUSED, quick=["efficientnet", "vit"]))
@torch.no_grad()
def test_batch_norm_fused_into_convolutions_computes_the_same(backbone):
    torch.manual_seed(0)
    is_small = backbone in ("vit", "efficientnet")
    network = (few_blocks(backbone) if is_small else build(backbone, 4)).eval().double()
    make_per_image(network)  # as a fit does
    norms = [norm for norm in batch_norms(network) if isinstance(norm, nn.BatchNorm2d)]
    for norm in norms:
        for tensor in (norm.running_mean, norm.running_var, norm.weight, norm.bias):
            nn.init.uniform_(tensor, 0.5, 1.5)
    images = torch.rand(2, 3, FUSED[backbone], FUSED[backbone], dtype=torch.float64)
    expected, before = network(images), [p.clone() for p in network.parameters()]
    few = fuse_batch_norm(network)
    calls = [n for n in few.graph.nodes if n.op == "call_module"]
    left = [n for n in calls if isinstance(few.get_submodule(n.target), nn.BatchNorm2d)]
    assert len(left) < 0.6 * len(norms) or not norms  # densenet's stand before, not after
    torch.testing.assert_close(few(images), expected, rtol=1e-10, atol=1e-10)
    # it is a copy
    assert all(torch.equal(a, b) for a, b in zip(before, network.parameters(), strict=True))
    for norm in norms:
        norm.bias.sub_(0.1)
    # and so a difference would be seen
    assert not norms or not torch.allclose(few(images), network(images))


@pytest.mark.parametrize("backbone", ["timm/nest_tiny", "timm/hiera_tiny_224"])
def test_batch_norm_is_not_fused_where_a_network_can_not_be_followed(backbone):
    part = skeleton(backbone).eval()
    assert fuse_batch_norm(part) is part


DESCRIBED = [
    "timm/convnext_nano.in12k_ft_in1k",
    "timm/vit_tiny_patch16_224",
    "timm/vit_small_patch14_dinov2",
    "timm/focalnet_tiny_srf",
    *(name for name, _ in FAMILIES.values()),
]


@pytest.mark.parametrize("backbone", DESCRIBED)
def test_images_are_prepared_as_timm_itself_does(backbone):
    config = timm.get_pretrained_cfg(timm_name(backbone)).to_dict()
    theirs = resolve_data_config(pretrained_cfg=config)
    ours = describe(backbone)
    crop = (theirs["mean"], theirs["std"], theirs["crop_pct"])
    assert (ours.mean, ours.std, ours.preparation["crop_share"]) == crop
    assert ours.preparation["interpolation"] == theirs["interpolation"]
    assert (3, ours.image_size, ours.image_size) == theirs["input_size"]
    assert (
        ours.preparation["resize"]
        == {"center": "shorter_side", "squash": "squash"}[theirs["crop_mode"]]
    )
    assert normalization(backbone) == (ours.mean, ours.std)


def test_a_folder_of_timm_describes_itself(tmp_path):
    description = {"mean": [0.5] * 3, "std": [0.25] * 3, "input_size": [3, 96, 96]}
    description |= {"interpolation": "bilinear", "crop_pct": 0.9, "license": "cc-by-nc-4.0"}
    config = {"architecture": "resnet18", "num_classes": 2, "pretrained_cfg": description}
    (tmp_path / "config.json").write_text(json.dumps(config))
    found = describe("timm/resnet18", str(tmp_path))
    assert (found.mean, found.std, found.image_size) == ((0.5,) * 3, (0.25,) * 3, 96)
    preparation = {"image_size": 96, "resize": "shorter_side", "interpolation": "bilinear"}
    assert found.preparation == preparation | {"crop_share": 0.9}
    assert found.licence == "cc-by-nc-4.0"


@pytest.mark.parametrize("backbone", sweep(BUILT_IN, quick=[*BUILT_IN][:3]))
def test_networks_of_backbone_auto_have_the_sizes_that_are_said_and_free_licences(backbone):
    if is_timm(backbone):
        assert pretrained_cfg(backbone).license == "apache-2.0"
        with torch.device("meta"):
            network = timm.create_model(backbone.removeprefix("timm/"), pretrained=False)
        size = 4 * sum(parameter.numel() for parameter in network.parameters()) / 1e6
    else:
        assert not is_restricted(licence("DEFAULT", backbone))
        size = models.get_model_weights(backbone).DEFAULT.meta["_file_size"]
    assert BUILT_IN[backbone] == round(size)
    assert list(BUILT_IN.values()) == sorted(BUILT_IN.values())
    with torch.device("meta"):
        assert build(backbone, 3, 224) is not None
