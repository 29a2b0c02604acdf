"""Weights by name or file, and the network and the head that start from them."""

import hashlib
from urllib.error import URLError

import pytest
import torch
from networks import CATEGORIES, HEADS, SMALL, network, random_state
from small_fits import write_checkpoints
from tiers import sweep
from torchvision import models
from torchvision.models import Weights, WeightsEnum

from finetune.models.backbones import build
from finetune.models.image_classifier import ImageClassifier, build_image_classifier
from finetune.models.library import Pretrained
from finetune.models.weights import load_pretrained, load_weights, read_weights
from finetune.system.messages import WrongUsage


def pretrained(state: dict[str, torch.Tensor]) -> Pretrained:
    return Pretrained(state, "the file")


@pytest.mark.parametrize("backbone", sweep(HEADS, quick=("resnet18", SMALL)))
def test_weights_change_everything_but_the_head(backbone):
    net, source = network(backbone), random_state(backbone, 7)
    before = {key: value.clone() for key, value in net.state_dict().items()}
    load_weights(net, pretrained(source))
    after = net.state_dict()
    kept = {key for key in after if after[key].equal(before[key])}
    assert kept == {f"{HEADS[backbone]}.weight", f"{HEADS[backbone]}.bias"}
    assert all(
        after[key].equal(source[key].to(after[key].dtype)) for key in after if key not in kept
    )
    net.load_state_dict(before)


def test_weights_that_do_not_fit_are_named_and_none_is_copied():
    source = random_state(SMALL, 7)
    # forgiven are the head and the counters of batch norm
    lean = {k: v for k, v in source.items() if not k.startswith("classifier.3")}
    lean = {k: v for k, v in lean.items() if "num_batches" not in k}
    load_weights(build(SMALL, 3), pretrained(lean))
    bad = dict(source)
    for i in range(1, 6):
        del bad[f"features.{i}.block.0.0.weight"]
    bad |= {"features.99.weight": torch.zeros(1), "classifier.0.weight": torch.zeros(5, 576)}
    two = {f"members.0.{key}": value for key, value in source.items()}
    not_finite = {**source, "features.0.0.weight": torch.full((16, 3, 3, 3), torch.nan)}
    net = build(SMALL, 3)
    before = {key: value.clone() for key, value in net.state_dict().items()}
    for state, words in (
        (bad, ["features.3.block.0.0.weight and 2 more", "features.99", "(5, 576)"]),
        (not_finite, ["NaN", "features.0.0.weight"]),
        (two, ["ensemble", "a member"]),
    ):
        with pytest.raises(ValueError, match="the file") as caught:
            load_weights(net, pretrained(state))
        assert all(word in str(caught.value) for word in words)
        assert all(value.equal(before[key]) for key, value in net.state_dict().items())


def test_weights_with_auxiliary_classifiers_and_without_versions_of_modules():
    theirs = models.googlenet(weights=None, aux_logits=True, init_weights=False).state_dict()
    assert any(key.startswith("aux1.") for key in theirs)
    ours = build("googlenet", 3)
    load_weights(ours, pretrained(theirs))
    name = "inception5b.branch4.1.conv.weight"
    assert ours.state_dict()[name].equal(theirs[name])
    state = dict(models.mnasnet0_5(weights=None).state_dict())  # a plain dict, as from safetensors
    net = build("mnasnet0_5", 3)
    with pytest.raises(ValueError, match="version"):  # what torchvision does with it
        net.load_state_dict(state)
    load_weights(net, pretrained(state))
    assert net.state_dict()["layers.0.weight"].equal(state["layers.0.weight"])


def test_weights_that_are_nowhere(tmp_path):
    for weights, backbone, word in (
        (str(tmp_path), "resnet50", "timm/NAME"),
        ("ResNet18_Weights.IMAGENET1K_V1", "resnet50", "weights of resnet50"),
        ("DEFAULT", "lenet", "null"),
        # of another size than the images, before a file of a gigabyte is fetched
        ("IMAGENET1K_SWAG_E2E_V1", "vit_b_16", "image_size must be 384"),
    ):
        with pytest.raises(WrongUsage, match=word):
            read_weights(weights, backbone)


@pytest.fixture
def published(tmp_path, monkeypatch):
    """Weights as torchvision publishes them, with the right hash in the name, and an empty place for downloads."""
    torch.save(random_state(SMALL, 7), tmp_path / "source.pth")
    digest = hashlib.sha256((tmp_path / "source.pth").read_bytes()).hexdigest()[:8]

    class Tiny_Weights(WeightsEnum):
        IMAGENET1K_V1 = Weights(
            url=f"https://models.invalid/tiny-{digest}.pth",
            transforms=models.MobileNet_V3_Small_Weights.DEFAULT.transforms,
            meta={"categories": CATEGORIES},
        )
        DEFAULT = IMAGENET1K_V1

    monkeypatch.setattr(models, "get_model_weights", lambda backbone: Tiny_Weights)
    monkeypatch.setenv("TORCH_HOME", str(tmp_path))
    return tmp_path / "source.pth", tmp_path / "hub" / "checkpoints" / f"tiny-{digest}.pth"


@pytest.mark.parametrize("name", ["DEFAULT", "IMAGENET1K_V1", "Tiny_Weights.IMAGENET1K_V1"])
def test_published_weights_come_with_names_and_normalisation(name, published):
    source, target = published
    target.parent.mkdir(parents=True)
    target.write_bytes(source.read_bytes())
    read = read_weights(name, SMALL)
    assert read.state["features.0.0.weight"].equal(random_state(SMALL, 7)["features.0.0.weight"])
    assert read.origin == "Tiny_Weights.IMAGENET1K_V1"
    model = build_image_classifier(SMALL, 2)
    assert read.mean.equal(model.mean) and read.std.equal(model.std)
    target.write_bytes(source.read_bytes()[:-100])  # a copy that broke off
    with pytest.raises(ValueError, match="sha256"):
        read_weights(name, SMALL)


def test_weights_that_can_not_be_fetched_say_where_to_put_them(published, monkeypatch):
    def fail(*args, **kwargs):
        raise URLError("no route to host")

    monkeypatch.setattr(torch.hub, "download_url_to_file", fail)
    with pytest.raises(OSError, match="--weights FILE") as caught:
        read_weights("DEFAULT", SMALL)
    line = str(caught.value)
    assert str(published[1]) in line and "no route to host" in line and "\n" not in line


def test_our_own_checkpoint_brings_its_normalisation(colours, tmp_path):
    content = torch.load(
        write_checkpoints(tmp_path, colours, SMALL, 32) / "plain.ckpt", weights_only=True
    )
    mean = torch.tensor([[[1.5]], [[2.5]], [[0.1]]])
    std = torch.tensor([[[51.0]], [[5.1]], [[0.3]]])
    content["state_dict"] |= {"mean": mean, "std": std}
    torch.save(content, tmp_path / "our.ckpt")
    model = ImageClassifier(network(SMALL), torch.zeros(3, 1, 1), torch.zeros(3, 1, 1))
    load_pretrained(model, str(tmp_path / "our.ckpt"), SMALL)
    assert model.mean.equal(mean) and model.std.equal(std)
    # says nothing of who made it: its buffers may be in any unit
    torch.save(content["state_dict"], tmp_path / "plain.pt")
    assert read_weights(str(tmp_path / "plain.pt"), SMALL).mean is None
