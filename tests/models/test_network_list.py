"""The list of networks is that of torchvision and timm, and their caches are found."""

import timm
import torch
from promise import control, promise
from torchvision import models

from finetune.models.backbones import build
from finetune.models.candidates import BUILT_IN
from finetune.models.network_list import ListedNetwork, timm_networks, torchvision_networks


@promise("backbones")
@control("backbones")
def test_the_networks_are_those_of_both_libraries():
    networks = {network.name: network for network in [*torchvision_networks(), *timm_networks()]}
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
    assert networks[name].num_parameters() == sum(p.numel() for p in network.parameters())
    # The control: another number of classes has other parameters.
    assert networks[name].num_parameters() != sum(p.numel() for p in other.parameters())


def test_weights_are_found_in_the_caches(tmp_path, monkeypatch):
    monkeypatch.setenv("TORCH_HOME", str(tmp_path))
    resnet = ListedNetwork("resnet18", 224, "")
    assert not resnet.is_local() and not ListedNetwork("lenet", 28, "").is_local()
    (tmp_path / "hub/checkpoints").mkdir(parents=True)
    url = models.ResNet18_Weights.DEFAULT.url
    (tmp_path / "hub/checkpoints" / url.rpartition("/")[2]).write_bytes(b"")
    assert resnet.is_local() and not ListedNetwork("resnet50", 224, "").is_local()
