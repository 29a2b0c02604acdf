"""Weights of timm (`--weights`): folders and files, compared with timm's own loading, without its hub."""

import logging
import shutil
from pathlib import Path

import pytest
import timm
import torch
from safetensors.torch import save_file
from small_timm import FAMILIES
from tiers import sweep
from timm.models import save_for_hf
from torch import nn

from finetune.models.backbones import build
from finetune.models.library import Pretrained
from finetune.models.stages import head, head_name
from finetune.models.timm_networks import create, timm_name
from finetune.models.weights import load_weights, read_weights

pytestmark = pytest.mark.slow

NAMES = ["eel", "fox", "gnu", "hen"]


def folder_of(backbone: str, place: Path, **options) -> nn.Module:
    """Write weights that are like no initialisation as timm does, for four classes, and return their network."""
    torch.manual_seed(0)
    network = timm.create_model(timm_name(backbone), num_classes=len(NAMES), **options).eval()
    with torch.no_grad():
        for value in network.state_dict().values():
            if value.is_floating_point():
                value += 0.01 * torch.rand(value.shape)
    save_for_hf(network, str(place), safe_serialization=True, model_config={"label_names": NAMES})
    return network


@pytest.fixture(scope="module")
def written(tmp_path_factory) -> tuple[nn.Module, Path]:
    """A network, and the folder of its weights."""
    place = tmp_path_factory.mktemp("resnet18")
    return folder_of("timm/resnet18", place), place


@pytest.fixture
def source(written, tmp_path) -> nn.Module:
    """The network whose weights are in `tmp_path`."""
    network, place = written
    shutil.copytree(place, tmp_path, dirs_exist_ok=True)
    return network


def with_their_head(network: nn.Module, weights: Pretrained) -> nn.Module:
    load_weights(network, weights)
    name = head_name(network)
    head(network).load_state_dict(
        {key: weights.state[f"{name}.{key}"] for key in ("weight", "bias")}
    )
    return network.eval()


@pytest.mark.parametrize("family", sweep(FAMILIES, quick=("resnet", "vit")))
def test_a_folder_gives_the_network_that_timm_would(family, tmp_path):
    backbone, image_size = FAMILIES[family]
    folder_of(backbone, tmp_path)
    fixed = timm.get_pretrained_cfg(timm_name(backbone)).fixed_input_size
    size = {"img_size": image_size} if fixed else {}
    theirs = timm.create_model(f"local-dir:{tmp_path}", pretrained=True, **size).eval()
    ours = build(backbone, len(NAMES), image_size).eval()
    x = torch.rand(2, 3, image_size, image_size)
    with torch.inference_mode():
        assert not torch.allclose(ours(x), theirs(x), atol=1e-3)
        weights = read_weights(str(tmp_path), backbone, image_size)
        assert with_their_head(ours, weights)(x).equal(theirs(x))  # the same code and weights
    reported = timm.get_pretrained_cfg(timm_name(backbone))
    assert weights.mean.flatten().tolist() == pytest.approx([255 * m for m in reported.mean])
    assert weights.std.shape == (3, 1, 1)


def test_files_of_other_networks_are_refused_in_a_line(source, tmp_path):
    state = source.state_dict()
    del state["layer1.0.conv1.weight"]
    save_file(state, tmp_path / "less.safetensors")
    for backbone, file, words in (
        ("timm/resnet18", "less.safetensors", "timm/resnet18"),
        ("timm/convnext_nano", "model.safetensors", "timm/convnext_nano"),
    ):
        with pytest.raises((ValueError, FileNotFoundError), match=words) as caught:
            read_weights(str(tmp_path / file), backbone)
        assert file in str(caught.value)
        assert "\n" not in str(caught.value) and len(str(caught.value)) < 500
    with pytest.raises(ValueError, match="timm/resnet18"):
        read_weights("tv_in1k", "timm/resnet18")
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(FileNotFoundError, match=r"model\.safetensors"):
        read_weights(str(tmp_path), "timm/resnet18")


def test_what_timm_would_leave_random_without_a_word_is_refused(tmp_path):
    backbone, logger = "timm/convnextv2_atto.fcmae", logging.getLogger("timm.models._builder")
    before = logger.level, list(logger.filters)
    state = create(backbone, 0, pretrained=False).state_dict()
    files = {
        # as published
        "whole": {key: value for key, value in state.items() if not key.startswith("head.norm.")},
        "less": {key: value for key, value in state.items() if not key.startswith("stages.0.")},
        "other": {"some.weight": torch.ones(3)},
    }
    for name, values in files.items():
        save_file(values, tmp_path / f"{name}.safetensors")
    read = read_weights(str(tmp_path / "whole.safetensors"), backbone).state
    assert all(read[key].equal(value) for key, value in files["whole"].items())
    for name, first in (("less", "stages.0.blocks.0.conv_dw.weight"), ("other", "stem.0.weight")):
        with pytest.raises(ValueError, match=rf"{name}.safetensors .*{first}"):
            read_weights(str(tmp_path / f"{name}.safetensors"), backbone)
    assert (logger.level, logger.filters) == before


HUB = "timm.models._builder.load_state_dict_from_hf"


def test_default_are_the_weights_of_the_hub_that_the_name_means(monkeypatch):
    torch.manual_seed(0)
    there = timm.create_model("convnext_nano").state_dict()
    asked = []
    monkeypatch.setattr(HUB, lambda name, *_, **__: asked.append(name) or dict(there))
    weights = read_weights("DEFAULT", "timm/convnext_nano.in12k_ft_in1k")
    assert asked == ["timm/convnext_nano.in12k_ft_in1k"]
    assert all(weights.state[key].equal(value) for key, value in there.items())
    assert weights.mean.flatten().tolist() == pytest.approx([255 * 0.485, 255 * 0.456, 255 * 0.406])


def test_a_hub_out_of_reach_is_a_line_that_says_what_else_to_do(monkeypatch, caplog):
    def fetch(*_, **__):
        logging.getLogger("huggingface_hub.utils._http").warning("Retrying in 1s [Retry 1/5].")
        raise ConnectionError("no route\nto the hub")

    monkeypatch.setattr(HUB, fetch)
    with pytest.raises(OSError, match="timm/resnet18 .*no route to the hub.*--model.weights"):
        read_weights("DEFAULT", "timm/resnet18")
    assert not caplog.messages
