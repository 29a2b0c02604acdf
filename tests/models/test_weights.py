"""Weights by name or file, and the network that they make."""

import hashlib
from urllib.error import URLError

import pytest
import torch
from networks import CATEGORIES, HEADS, SMALL, network, random_state
from tiers import sweep
from torchvision import models
from torchvision.models import Weights, WeightsEnum
from torchvision.transforms._presets import ImageClassification

from finetune.models.backbones import build
from finetune.models.ensemble import Ensemble
from finetune.models.image_classifier import ImageClassifier
from finetune.models.source_head import source_head
from finetune.models.stages import head
from finetune.models.weight_files import Pretrained
from finetune.models.weights import load_pretrained, load_weights, read_weights
from finetune.system.messages import WrongUsage


def pretrained(
    state: dict[str, torch.Tensor] | None = None, class_names: list[str] | None = CATEGORIES
) -> Pretrained:
    return Pretrained(state or random_state(SMALL, 7), class_names, "the file")


@pytest.mark.parametrize("backbone", sweep(HEADS, quick=("resnet18", SMALL)))
def test_load_weights_changes_everything_but_the_head(backbone):
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


def test_load_weights_forgives_only_the_head_and_the_counters():
    source = random_state(SMALL, 7)
    lean = {
        k: v
        for k, v in source.items()
        if not k.startswith("classifier.3") and "num_batches" not in k
    }
    load_weights(build(SMALL, 3), pretrained(lean))
    net = build(SMALL, 3)
    before = net.state_dict()["features.0.1.weight"].clone()
    bad = dict(source)
    for i in range(1, 6):
        del bad[f"features.{i}.block.0.0.weight"]
    bad |= {"features.99.weight": torch.zeros(1), "classifier.0.weight": torch.zeros(5, 576)}
    with pytest.raises(ValueError) as caught:
        load_weights(net, pretrained(bad))
    assert str(caught.value) == (
        "the file does not fit this network; missing: features.1.block.0.0.weight, features.2.block.0.0.weight, "
        "features.3.block.0.0.weight and 2 more; unexpected: features.99.weight; "
        "of another shape: classifier.0.weight (5, 576) instead of (1024, 576)"
    )
    assert net.state_dict()["features.0.1.weight"].equal(before)  # nothing was copied
    with pytest.raises(ValueError, match="NaN or infinite, in features.0.0.weight"):
        load_weights(
            net, pretrained({**source, "features.0.0.weight": torch.full((16, 3, 3, 3), torch.nan)})
        )


def test_load_weights_ignores_auxiliary_classifiers():
    theirs = models.googlenet(weights=None, aux_logits=True, init_weights=False).state_dict()
    assert any(key.startswith("aux1.") for key in theirs)
    ours = build("googlenet", 3)
    load_weights(ours, pretrained(theirs))
    assert ours.state_dict()["inception5b.branch4.1.conv.weight"].equal(
        theirs["inception5b.branch4.1.conv.weight"]
    )


def test_load_weights_into_mnasnet_without_version_numbers():
    state = dict(models.mnasnet0_5(weights=None).state_dict())  # a plain dict, as from safetensors
    net = build("mnasnet0_5", 3)
    with pytest.raises(ValueError, match="version"):  # what torchvision does with it
        net.load_state_dict(state)
    load_weights(net, pretrained(state))
    assert net.state_dict()["layers.0.weight"].equal(state["layers.0.weight"])


def test_weights_of_several_networks_are_refused_in_a_line_and_nothing_is_copied(tmp_path):
    state = {
        f"network.{key}": value
        for key, value in Ensemble([network(SMALL)] * 2).state_dict().items()
    }
    torch.save(
        {"state_dict": state, "hyper_parameters": {"class_names": ["a", "b", "c"]}},
        tmp_path / "two.ckpt",
    )
    ours = build(SMALL, 3)
    before = {key: value.clone() for key, value in ours.state_dict().items()}
    with pytest.raises(
        WrongUsage, match=r"two\.ckpt holds the networks of an ensemble, .*--members 1"
    ):
        load_weights(ours, read_weights(str(tmp_path / "two.ckpt"), SMALL))
    assert all(value.equal(before[key]) for key, value in ours.state_dict().items())


def test_weights_that_are_nowhere(tmp_path):
    with pytest.raises(FileNotFoundError, match="there is no weights file .*none.pt$"):
        read_weights(str(tmp_path / "none.pt"), "resnet50")
    with pytest.raises(
        ValueError,
        match=r"are a folder, and only networks of timm's \(--model.backbone timm/NAME\)",
    ):
        read_weights(str(tmp_path), "resnet50")
    valid = "valid are: IMAGENET1K_V1, IMAGENET1K_V2, DEFAULT, a file, and null$"
    for wrong in ("IMAGENET1K_V3", "ResNet18_Weights.IMAGENET1K_V1"):
        with pytest.raises(ValueError, match=valid):
            read_weights(wrong, "resnet50")
    with pytest.raises(
        ValueError, match="none are published: pass a file, or --model.weights null$"
    ):
        read_weights("DEFAULT", "lenet")


@pytest.fixture
def published(tmp_path, monkeypatch):
    """Weights as torchvision publishes them, with the right hash in the name, and an empty place for downloads."""
    torch.save(random_state(SMALL, 7), tmp_path / "source.pth")
    digest = hashlib.sha256((tmp_path / "source.pth").read_bytes()).hexdigest()[:8]

    class Tiny_Weights(WeightsEnum):
        IMAGENET1K_V1 = Weights(
            url=f"https://models.invalid/tiny-{digest}.pth",
            transforms=lambda: ImageClassification(crop_size=224),
            meta={"categories": CATEGORIES},
        )
        DEFAULT = IMAGENET1K_V1

    monkeypatch.setattr(models, "get_model_weights", lambda backbone: Tiny_Weights)
    monkeypatch.setattr(torch.hub, "get_dir", lambda: str(tmp_path / "hub"))
    return tmp_path / "source.pth", tmp_path / "hub" / "checkpoints" / f"tiny-{digest}.pth"


@pytest.mark.parametrize("name", ["model_best.pth.tar", "pytorch_model.bin", "none.CKPT"])
def test_a_missing_file_of_any_trainer_is_reported_as_such(name):
    with pytest.raises(FileNotFoundError, match=f"there is no weights file {name}$"):
        read_weights(name, "resnet18")


@pytest.mark.parametrize("name", ["DEFAULT", "IMAGENET1K_V1", "Tiny_Weights.IMAGENET1K_V1"])
def test_published_weights_come_with_names_and_normalisation(name, published):
    source, target = published
    target.parent.mkdir(parents=True)
    target.write_bytes(source.read_bytes())
    read = read_weights(name, SMALL)
    assert read.state["features.0.0.weight"].equal(random_state(SMALL, 7)["features.0.0.weight"])
    assert (read.class_names, read.origin) == (CATEGORIES, "Tiny_Weights.IMAGENET1K_V1")
    for value, expected in (read.mean, (0.485, 0.456, 0.406)), (read.std, (0.229, 0.224, 0.225)):
        # as in `Classifier`, bit for bit
        assert value.equal(255 * torch.tensor(expected).view(3, 1, 1))


def test_our_own_checkpoint_brings_its_normalisation(tmp_path):
    mean, std = (
        torch.tensor([[[1.5]], [[2.5]], [[0.1]]]),
        torch.tensor([[[51.0]], [[5.1]], [[0.3]]]),
    )
    state = {f"network.{key}": value for key, value in random_state(SMALL, 3).items()} | {
        "mean": mean,
        "std": std,
    }
    torch.save(
        {"state_dict": state, "hyper_parameters": {"class_names": ["a", "b", "c"]}},
        tmp_path / "our.ckpt",
    )
    read = read_weights(str(tmp_path / "our.ckpt"), SMALL)
    model = ImageClassifier(network(SMALL), torch.zeros(3, 1, 1), torch.zeros(3, 1, 1))
    load_pretrained(model, str(tmp_path / "our.ckpt"), SMALL)
    assert model.mean.equal(mean) and model.std.equal(std) and "mean" not in read.state
    for name, value in ("mean", torch.zeros(4)), ("std", torch.zeros(())):
        torch.save(
            {"state_dict": {**state, name: value}, "hyper_parameters": {}}, tmp_path / "odd.ckpt"
        )
        with pytest.raises(
            ValueError, match=f"odd.ckpt is not a checkpoint of finetune: its {name} has the shape"
        ):
            read_weights(str(tmp_path / "odd.ckpt"), SMALL)
    # says nothing of who made it: its buffers may be in any unit
    torch.save(state, tmp_path / "plain.pt")
    assert read_weights(str(tmp_path / "plain.pt"), SMALL).mean is None


@pytest.mark.parametrize(
    ("backbone", "name", "side", "other"),
    [
        ("vit_h_14", "DEFAULT", 518, 224),
        ("vit_h_14", "DEFAULT", 518, None),
        ("vit_b_16", "IMAGENET1K_SWAG_E2E_V1", 384, 224),
        ("vit_b_16", "DEFAULT", 224, 384),
    ],
)
def test_weights_of_a_vit_are_for_one_size_which_is_reported_before_they_are_fetched(
    backbone, name, side, other, monkeypatch
):
    monkeypatch.setattr("finetune.models.weights._read_published", lambda found: found)
    assert read_weights(name, backbone, side).meta["min_size"] == (side, side)
    wrong = other or 224  # which is what a ViT is made for unless a size is said
    with pytest.raises(
        WrongUsage,
        match=f"V1 is for images of .*, not {wrong}x{wrong}: image_size must be {side}$",
    ):
        read_weights(name, backbone, other)
    assert read_weights("DEFAULT", "resnet50", 64).name == "IMAGENET1K_V2"  # which takes any


def test_no_network_says_where_to_put_the_file(published, monkeypatch):
    def fail(*args, **kwargs):
        raise URLError("no route to host")

    monkeypatch.setattr(torch.hub, "download_url_to_file", fail)
    target = published[1]
    with pytest.raises(OSError) as caught:
        read_weights("DEFAULT", SMALL)
    assert str(caught.value).endswith(
        f": put https://models.invalid/{target.name} at {target} by hand"
    )
    assert "pass other weights with --model.weights FILE" in str(caught.value)
    assert "no route to host" in str(caught.value) and "\n" not in str(caught.value)


def test_a_wrong_hash_is_refused(published, monkeypatch):
    def fail(*args, **kwargs):
        raise RuntimeError('invalid hash value (expected "a", got "b")')

    monkeypatch.setattr(torch.hub, "download_url_to_file", fail)
    with pytest.raises(OSError, match="invalid hash value"):
        read_weights("DEFAULT", SMALL)
    source, target = published
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_bytes(source.read_bytes()[:-100])  # a copy that broke off
    with pytest.raises(ValueError, match="is broken: its sha256 does not begin with"):
        read_weights("DEFAULT", SMALL)


def test_source_head_gives_the_source_classifier_restricted_to_the_classes():
    source = pretrained()
    teacher = build(SMALL, 7)
    teacher.load_state_dict(source.state)
    torch.manual_seed(0)
    ours = build(SMALL, 3)
    load_weights(ours, source)
    images = torch.rand(4, 3, 32, 32)
    with torch.inference_mode():
        expected = teacher.eval()(images)[:, [6, 0, 3]]
        # a Xavier head is no match
        assert not torch.allclose(ours.eval()(images), expected, rtol=0.1)
        matched = source_head(ours, source, ["Paper Towel", "hot-dog", "icecream"])
        got = ours(images)
    assert matched == {
        "Paper Towel": ["paper-towel"],
        "hot-dog": ["hot dog"],
        "icecream": ["ice_cream"],
    }
    # The same products summed in another order, for another number of rows: 1,024 float32 terms, measured 2e-7.
    torch.testing.assert_close(got, expected, rtol=2e-6, atol=0)


def test_source_head_means_exact_names_and_classes_without_a_match():
    source = pretrained()
    weight, bias = source.state["classifier.3.weight"], source.state["classifier.3.bias"]
    net = build(SMALL, 6)
    before = head(net).weight.clone()
    classes = ["zebra", "cardigan", "CARDIGAN", "sweet", "CRANE", "ice cream"]
    mapping: dict[str, str | list[str]] = {"sweet": ["Ice-Cream", "hot dog"], "ice cream": []}
    matched = source_head(net, source, classes, mapping)
    assert list(matched.values()) == [
        [],
        ["cardigan"],  # written the same: not the dog
        ["Cardigan", "cardigan"],
        ["hot dog", "ice_cream"],
        ["crane", "Crane"],
        [],  # by the mapping's wish
    ]
    for row, rows in {1: [2], 2: [1, 2], 3: [0, 3], 4: [4, 5]}.items():
        torch.testing.assert_close(head(net).weight[row], weight[rows].mean(0))
        torch.testing.assert_close(head(net).bias[row], bias[rows].mean())
    for row in (0, 5):
        assert head(net).weight[row].equal(before[row]) and head(net).bias[row] == 0


@pytest.mark.parametrize(("name", "typed"), [("café", "cafe\u0301"), ("cafe\u0301", "café")])
def test_a_mapping_names_classes_in_either_unicode_composition(name, typed):
    assert source_head(build(SMALL, 1), pretrained(), [name], {typed: "crane"}) == {name: ["crane"]}


def test_source_head_takes_names_from_the_caller():
    net = build(SMALL, 1)
    matched = source_head(net, pretrained(class_names=None), ["b"], source_classes=list("abcdefg"))
    assert matched == {"b": ["b"]}
    assert head(net).weight[0].equal(random_state(SMALL, 7)["classifier.3.weight"][1])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            {"pretrained": pretrained(class_names=None)},
            r"of shape \(7, 1024\) and 0 names: .*--model.source_classes FILE",
        ),
        ({"source_classes": ["a", "b"]}, r"of shape \(7, 1024\) and 2 names"),
        ({"mapping": {"hotdgo": "crane"}}, "unknown class 'hotdgo'; did you mean 'hotdog'"),
        (
            {"mapping": {"hotdog": "carne"}},
            "no source category is called 'carne'; did you mean 'crane'",
        ),
        (
            {"pretrained": pretrained({"a": torch.zeros(1)})},
            r"copies a head of 1024 features .* of shape \(0,\)",
        ),
        (
            {"pretrained": pretrained({"classifier.3.weight": torch.zeros(7, 5)})},
            r"has one of shape \(7, 5\)",
        ),
    ],
)
def test_source_head_errors(arguments, message):
    arguments = {"pretrained": pretrained(), "class_names": ["hotdog", "other"], **arguments}
    with pytest.raises(ValueError, match=message):
        source_head(build(SMALL, 2), **arguments)


def test_class_names_of_weights_that_no_class_can_have_are_not_taken(tmp_path):
    for name, names in {"escape": ["a", "\x1b[2Jb"], "double": ["a", "a"], "text": "ab"}.items():
        about = {"hyper_parameters": {"class_names": names}}
        torch.save(
            {"state_dict": {"network.weight": torch.zeros(2)}, **about},
            path := tmp_path / f"{name}.ckpt",
        )
        assert read_weights(str(path), "resnet18").class_names is None
    about = {"hyper_parameters": {"class_names": ["a", "b"]}}  # control
    torch.save({"state_dict": {"network.weight": torch.zeros(2)}, **about}, path)
    assert read_weights(str(path), "resnet18").class_names == ["a", "b"]
