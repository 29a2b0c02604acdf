"""The list of networks is that of torchvision and timm, and their caches are found."""

import json

import pytest
import timm
import torch
from huggingface_hub import try_to_load_from_cache
from network_table import num_parameters, own_rows, torchvision_rows
from torchvision import models

from finetune.models import network_list
from finetune.models.backbones import build
from finetune.models.candidates import BUILT_IN
from finetune.models.network_list import ListedNetwork, hub_cache, listed_networks, torch_cache

NETWORKS = {network.name: network for network in listed_networks()}


def test_torchvisions_networks_are_those_of_the_installed_version():
    rows = [*own_rows(), *torchvision_rows()]
    assert [[*vars(network).values()] for network in NETWORKS.values()][: len(rows)] == rows
    assert {"lenet", "resnet18", "vit_h_14"} <= NETWORKS.keys()
    assert not any(name.startswith("squeezenet") for name in NETWORKS)  # it has no linear head
    assert NETWORKS["regnet_y_128gf"].licence == "CC-BY-NC-4.0"


def test_timms_networks_are_those_of_the_installed_version():
    named = {name.removeprefix("timm/") for name in NETWORKS if name.startswith("timm/")}
    if network_list.versions()["timm"] == timm.__version__:
        assert named <= {*timm.list_pretrained()} and len(named) > 1000
    assert set(BUILT_IN) <= NETWORKS.keys()  # the candidates of --backbone auto
    for name in ("timm/convnext_nano.in12k_ft_in1k", "timm/convnextv2_atto.fcmae_ft_in1k"):
        config = timm.get_pretrained_cfg(name.removeprefix("timm/"))
        listed = NETWORKS[name]
        assert (listed.licence, listed.image_size) == (config.license, config.input_size[1])
        assert listed.parameters == num_parameters(name)
        # The control: another number of classes has other parameters.
        assert listed.parameters != sum(p.numel() for p in build(name, 10).parameters())
    # refused by a fit: two heads, no linear head
    assert not {name for name in named if name.startswith(("deit_tiny_distilled", "resnetv2_"))}


@pytest.mark.parametrize(
    "variables", [{}, {"TORCH_HOME": "{}/t", "HF_HOME": "{}/h"}, {"XDG_CACHE_HOME": "{}/x"}]
)
def test_weights_are_found_in_the_caches(variables, tmp_path, monkeypatch):
    for name in ("TORCH_HOME", "HF_HOME", "HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    for name, value in variables.items():
        monkeypatch.setenv(name, value.format(tmp_path))
    assert str(torch_cache().parent) == torch.hub.get_dir()

    resnet = NETWORKS["resnet18"]
    assert not resnet.is_local()
    torch_cache().mkdir(parents=True)
    url = models.ResNet18_Weights.DEFAULT.url
    (torch_cache() / url.rpartition("/")[2]).write_bytes(b"")
    assert resnet.is_local() and not NETWORKS["resnet50"].is_local()

    network = NETWORKS["timm/convnext_nano.in12k_ft_in1k"]
    repository = hub_cache() / f"models--{network.location.replace('/', '--')}"
    (repository / "snapshots/abc").mkdir(parents=True)
    (repository / "snapshots/abc/model.safetensors").write_bytes(b"")
    assert not network.is_local()  # a download that did not end
    (repository / "refs").mkdir()
    (repository / "refs/main").write_text("abc")
    assert network.is_local()
    cached = try_to_load_from_cache(network.location, "model.safetensors", cache_dir=hub_cache())
    assert cached == str(repository / "snapshots/abc/model.safetensors")


def test_a_network_without_published_weights_is_never_local():
    network = ListedNetwork("lenet", 1, None, 28, "", "")
    assert not network.is_local() and json.dumps(network.as_dict())
