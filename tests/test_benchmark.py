"""`finetune benchmark`: what it measures, what it says of it, and that it leaves nothing."""

import json
from pathlib import Path

import pytest
import torch
from conftest import QUICK

from finetune import recorder
from finetune.benchmark_text import advice, scaling, text

SMALL = [*QUICK, "--model.backbone", "lenet", "--data.image_size", "28", "--trainer.max_epochs", "60"]


def result(**seconds: list[float]) -> dict:
    """Seconds of a batch of 32."""
    about = {"device": "Some CPU", "device_type": "cpu", "num_devices": 1, "cores": 2, "precision": "32-true"}
    about |= {"batch_size": 32, "image_size": 128, "num_workers": 1, "cache": "nothing", "compiled": False}
    parts = {"forward": [0.1], "backward": [0.2], "optimizer": [0.02], "plain": [0.32], "whole": [0.32]}
    return {"about": about, "seconds": {**parts, **seconds}, "waited": [0.0], "other": {}, "floor": {}}


@pytest.fixture(autouse=True)
def soon(monkeypatch):
    monkeypatch.setattr(recorder, "_SECONDS", 0.01)


def test_a_fit_is_measured_and_leaves_nothing_but_the_output(cli, colours, capsys):
    cli("benchmark", "--data.root", colours, *SMALL, "--repeats", "3", "--output", "out.json")
    shown = capsys.readouterr().out
    assert [path.name for path in Path().iterdir()] == ["out.json"]
    found = json.loads(Path("out.json").read_text())
    assert found["about"]["precision"] == "32-true" and found["about"]["batch_size"] == 16
    seconds = found["seconds"]
    for part in ("decode", "augment", "forward", "backward", "optimizer", "plain", "whole"):
        assert len(seconds[part]) == 3 and min(seconds[part]) > 0, part
        assert part in shown
    assert all(0 <= share < 1 for share in found["waited"])
    assert found["floor"]["operations"] > 0
    assert "bf16-mixed" in found["other"]
    assert "waiting for data" in shown and "bottleneck" in shown


def test_kept_activations_are_what_is_trained_on(cli, colours):
    freeze = ["--model.freeze", "conv2", "--data.crop_and_flip", "false", "--data.batch_size", "4"]
    cli("benchmark", "--data.root", colours, *SMALL, *freeze, "--repeats", "1", "--output", "out.json")
    found = json.loads(Path("out.json").read_text())
    assert found["about"]["cache"] == "activations"
    assert not {"decode", "augment"} & found["seconds"].keys()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--trainer.max_epochs", "1"], "the fit ended after 0 of 5 measurements.*--trainer.max_epochs"),
        (["--devices", "1,x"], "--devices takes numbers such as 1,2, not '1,x'"),
        (["--devices", "0"], "--devices takes numbers"),
    ],
)
def test_what_can_not_be_measured_is_told(cli, colours, options, message):
    with pytest.raises(ValueError, match=message):
        cli("benchmark", "--data.root", colours, *SMALL, *options)


def test_a_wrong_number_of_repeats_is_wrong_usage(cli, colours, capsys):
    with pytest.raises(SystemExit, match="2"):
        cli("benchmark", "--data.root", colours, *SMALL, "--repeats", "0")
    assert "repeats must be at least 1, not 0" in capsys.readouterr().err


def test_numbers_of_devices_are_held_beside_each_other(cli, colours, capsys):
    cli("benchmark", "--data.root", colours, *SMALL, "--repeats", "1", "--devices", "1,2", "--output", "out.json")
    rows = json.loads(Path("out.json").read_text())["scaling"]
    assert [row["devices"] for row in rows] == [1, 2]
    assert rows[0]["efficiency"] == 1 and rows[1]["rate"] > 0
    assert "2 devices:" in capsys.readouterr().out
    assert [path.name for path in Path().iterdir()] == ["out.json"]


def test_the_table_gives_median_spread_and_pictures_per_second():
    shown = text(result(whole=[0.5, 0.4, 0.6], plain=[0.4, 0.4, 0.4]))
    assert "500.0 (400.0 to 600.0), 3" in shown
    assert next(line for line in shown.splitlines() if line.startswith("whole")).split()[-1] == "64"  # 32 / 0.5
    assert "speed beside the plain loop: 80.0 % (66.7 to 100.0)" in shown


def test_advice_names_the_bottleneck_and_what_was_measured_to_help():
    assert advice(result())[0] == "bottleneck: the network, its backward most, 62 % of a step"
    faster = {**result(), "other": {"bf16-mixed": 0.16}}
    assert "would help: --trainer.precision bf16-mixed, measured 2.0 times as fast" in advice(faster)
    assert not any("precision" in line for line in advice({**result(), "other": {"bf16-mixed": 0.31}}))
    slow = {**result(decode=[0.3], augment=[0.1], whole=[0.8]), "waited": [0.5]}
    assert advice(slow)[0] == "bottleneck: reading pictures"
    assert "decoding is 75 % of it" in advice(slow)[1]
    slow["about"] |= {"cache": "pictures", "cores": 8}
    assert advice(slow)[1:] == ["would help: --data.num_workers 7, as many as cores are free"]
    slow["about"] |= {"cores": 2}
    assert "smaller --data.image_size" in advice(slow)[1]
    assert "what is not the network takes 20 % of a step" in advice(result(whole=[0.4]))


@pytest.mark.parametrize(("device_type", "efficiency"), [("cpu", 0.9), ("cuda", 0.45)])
def test_efficiency_is_beside_what_the_devices_could_do(device_type, efficiency):
    one, two = result(whole=[0.45]), result(whole=[0.5])
    for found, num in ((one, 1), (two, 2)):
        found["about"] |= {"device_type": device_type, "num_devices": num}
    rows = scaling([one, two])
    assert rows[1]["speed_up"] == pytest.approx(0.9)
    assert rows[1]["efficiency"] == pytest.approx(efficiency)
    assert rows[1]["rate"] == 64


def test_torch_was_left_as_it_was(cli, colours):
    before = torch.get_default_dtype()
    cli("benchmark", "--data.root", colours, *SMALL, "--trainer.precision", "64-true", "--repeats", "1")
    assert torch.get_default_dtype() == before
