"""The measurement of `--backbone auto` prints the accuracies of heads on frozen features."""

import sys

import timm
import torch

from benchmarks.choice import __main__ as choice


def test_the_network_that_sees_colours_is_chosen_on_every_split(
    colours, tmp_path, monkeypatch, capsys
):
    for name in ("blind", "seeing"):
        torch.manual_seed(0)
        network = timm.create_model("test_resnet", num_classes=5)
        if name == "blind":
            network.load_state_dict({k: 0 * v for k, v in network.state_dict().items()})
        timm.models.save_for_hf(network, tmp_path / name, safe_serialization=True)
    weights = f"{tmp_path / 'blind'},{tmp_path / 'seeing'}"
    line = [
        "benchmarks.choice",
        str(colours),
        "--weights",
        weights,
        "--size",
        "28",
        "--splits",
        "2",
    ]
    monkeypatch.setattr(sys, "argv", line)
    choice.main()
    _, row = capsys.readouterr().out.splitlines()
    names = ("set", "blind", "seeing", "chosen", "own", "behind")
    cells = dict(zip(names, row.strip("| ").split(" | "), strict=True))
    assert (
        cells["set"] == "colours"
        and cells["chosen"] == f"timm/test_resnet={tmp_path / 'seeing'} 2x"
    )
    assert float(cells["blind"]) < 0.5 < 0.9 < float(cells["seeing"]) == float(cells["own"])
    assert float(cells["behind"]) == 0.0
