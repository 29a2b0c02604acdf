"""The measurement of `--backbone auto` prints the accuracies of heads on frozen features."""

import sys

import torch

from benchmarks.choice import __main__ as choice
from finetune.models.backbones import build


def test_the_network_that_sees_colours_is_chosen_on_every_split(
    colours, tmp_path, monkeypatch, capsys
):
    torch.manual_seed(0)
    state = build("small_cnn", 2).state_dict()
    torch.save(state, tmp_path / "seeing.pt")
    torch.save(
        {name: torch.zeros_like(value) for name, value in state.items()}, tmp_path / "blind.pt"
    )
    weights = f"small_cnn={tmp_path / 'blind.pt'},small_cnn={tmp_path / 'seeing.pt'}"
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
    assert cells["set"] == "colours" and cells["chosen"] == f"small_cnn={tmp_path / 'seeing.pt'} 2x"
    assert float(cells["blind"]) < 0.5 < 0.9 < float(cells["seeing"]) == float(cells["own"])
    assert float(cells["behind"]) == 0.0
