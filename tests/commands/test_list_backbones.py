"""`finetune backbones`: the table, patterns and JSON."""

import json

from promise import promise

from finetune.models.network_list import ListedNetwork


@promise("backbones")
def test_table(cli, capsys, monkeypatch):
    monkeypatch.setattr(ListedNetwork, "is_local", lambda network: network.name == "resnet18")
    cli("backbones", "resnet18*")
    shown = capsys.readouterr().out
    (row,) = (line for line in shown.splitlines() if line.startswith("resnet18 "))
    assert row.split() == [
        *("resnet18", "11.7", "M", "224", "px", "yes"),
        *("BSD-3-Clause", "code;", "ImageNet's", "terms"),
    ]
    assert "timm/resnet18.tv_in1k" in shown
    cli("backbones", "--local")
    header, row = capsys.readouterr().out.splitlines()
    assert header.startswith("network") and row.startswith("resnet18 ")


def test_patterns(cli, capsys):
    cli("backbones", "*VIT*", "--json")
    found = [network["name"] for network in json.loads(capsys.readouterr().out)]
    assert {"vit_b_16", "timm/vit_small_patch16_224.augreg_in21k_ft_in1k"} <= {*found}
    assert all("vit" in name for name in found)
