"""`finetune backbones`: the table, patterns and JSON, without importing torch."""

import json
import re
import resource
import subprocess
import sys

import pytest

from finetune.commands import list_backbones as module
from finetune.commands.list_backbones import matching
from finetune.models.network_list import ListedNetwork, listed_networks
from finetune.system.messages import NotFound


def test_table(cli, capsys, monkeypatch):
    monkeypatch.setattr(ListedNetwork, "is_local", lambda network: network.name == "resnet18")
    cli("backbones")
    shown = capsys.readouterr().out
    (row,) = (line for line in shown.splitlines() if line.startswith("resnet18 "))
    assert row.split() == [
        *("resnet18", "11.7", "M", "45", "MB", "224", "px", "yes"),
        *("BSD-3-Clause", "code;", "ImageNet's", "terms"),
    ]
    assert "vit_b_16" in shown and "timm/" not in shown.rpartition("timm has")[0]
    cli("backbones", "--local")
    header, row = capsys.readouterr().out.splitlines()
    assert header.startswith("network") and row.startswith("resnet18 ")


def test_patterns(cli, capsys):
    cli("backbones", "*VIT*", "--json")
    found = [network["name"] for network in json.loads(capsys.readouterr().out)]
    assert {"vit_b_16", "timm/vit_small_patch16_224.augreg_in21k_ft_in1k"} <= {*found}
    assert all("vit" in name for name in found)
    names = [network.name for network in matching(listed_networks(), "resnet18")]
    assert {"resnet18", "timm/resnet18.tv_in1k"} <= {*names}
    with pytest.raises(NotFound, match="no network matches 'resnet19'"):
        cli("backbones", "resnet19")


def test_without_timm_its_networks_are_only_counted(cli, capsys, monkeypatch):
    monkeypatch.setattr(module, "has_timm", lambda: False)
    cli("backbones", "*vit*")
    shown = capsys.readouterr().out
    assert (
        "vit_b_16" in shown
        and "\ntimm/" not in shown
        and re.search(r"timm has [\d,]+ more and is not installed: pip", shown)
    )
    with pytest.raises(NotFound, match=r"no network matches 'convnextv2\*'; timm has some: pip"):
        cli("backbones", "convnextv2*")


def test_it_imports_no_torch_and_is_quick():
    code = "import sys; from finetune.cli import run; run(['backbones', '*vit*']); print('torch' in sys.modules)"
    before = resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60
    )
    seconds = resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime - before
    assert done.stdout.splitlines()[-1] == "False"
    assert (
        seconds < 3
    )  # of processor time, since other tests run next to it; 0.6 on a quiet machine
