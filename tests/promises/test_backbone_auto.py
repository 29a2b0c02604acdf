"""`--backbone auto` chooses the network on the training images once, and writes it into config.yaml.

The ranking itself: tests/unit/test_backbone_ranking.py.
"""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import processes
import pytest
import timm
import torch
import yaml
from colours import QUICKEST, draw_patients
from fit_words import QUICK

import finetune
from finetune.fitting import network_choice
from finetune.fitting.network_choice import Candidate
from finetune.models.library import Published
from finetune.runs import run_lock

OF_NETWORK = ("--model.backbone", "--model.weights")
REST = [word for i, word in enumerate(QUICKEST) if not {word, QUICKEST[i - 1]} & {*OF_NETWORK}]
LINE = ["--backbone", "auto", "--test_after_fit", "false", *REST]


@pytest.fixture(scope="module")
def files(fitted_runs: Any, tmp_path_factory: pytest.TempPathFactory) -> SimpleNamespace:
    """A run that sees colours, two networks that see nothing, and a checkpoint that names another network."""
    folder = tmp_path_factory.mktemp("weights")
    content = torch.load(fitted_runs.single / "checkpoints/best.ckpt", weights_only=True)
    blind = {
        name: value if name in ("mean", "std") else torch.zeros_like(value)
        for name, value in content["state_dict"].items()
    }
    torch.save({**content, "state_dict": blind}, folder / "blind.ckpt")
    settings = {**content["hyper_parameters"], "backbone": "lenet"}
    torch.save({**content, "hyper_parameters": settings}, folder / "lenet.ckpt")
    network = timm.create_model("test_resnet", num_classes=5)
    for parameter in network.parameters():
        torch.nn.init.zeros_(parameter)
    timm.models.save_for_hf(network, folder / "timm", safe_serialization=True)
    names = {name: folder / f"{name}.ckpt" for name in ("blind", "lenet")}
    return SimpleNamespace(seeing=fitted_runs.single, timm=folder / "timm", **names)


def model_of(run: Path) -> dict[str, Any]:
    return yaml.safe_load((run / "config.yaml").read_text())["model"]


def ranking_of(run: Path) -> dict[str, Any]:
    return json.loads((run / "run.json").read_text())["backbone_ranking"]


def weights_of(run: Path) -> dict[str, torch.Tensor]:
    return torch.load(run / "checkpoints/last.ckpt", weights_only=True)["state_dict"]


def test_backbone_auto_chooses_the_network_that_sees_the_classes(
    files, colours, cli, tmp_path, caplog
):
    given = f"{files.blind},{files.seeing},{files.lenet},{files.timm}"
    with caplog.at_level("INFO", "finetune"):
        cli("fit", colours, "--weights", given, *LINE)
    run_lock.release()
    chosen = tmp_path / "runs/fit/version_0"
    seeing = str(files.seeing / "checkpoints/best.ckpt")
    model = model_of(chosen)
    assert (model["backbone"], model["weights"]) == ("small_cnn", seeing)
    ranking = ranking_of(chosen)
    rows = {row["name"]: row["accuracy"] for row in ranking["rows"]}
    assert rows[f"small_cnn={seeing}"] > 0.9 and "timm/test_resnet" in rows
    assert rows[f"small_cnn={files.blind}"] < 0.5  # of three classes: the control
    assert list(ranking["unusable"]) == ["lenet"]
    (line,) = [text for text in caplog.messages if text.startswith("backbone ")]
    assert all(f"{row['name']} {row['loss']:.3f}" in line for row in ranking["rows"])
    (skipped,) = [text for text in caplog.messages if text.startswith("not ranked: ")]
    assert "lenet" in skipped
    # the choice takes no random number of the fit
    named = ["--backbone", "small_cnn", "--weights", seeing, *LINE[2:]]
    cli("fit", colours, *named)
    first, second = weights_of(chosen), weights_of(tmp_path / "runs/fit/version_1")
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_backbone_auto_does_not_recognise_the_patients_of_held_out_images(files, tmp_path):
    """Near copies of an image tell its patient, and nothing tells the class: a network is right by chance."""
    folder = draw_patients(tmp_path / "patients")
    (folder / "well/p0/0.png").write_bytes(b"no image")
    options = {"data.group_by": "folder", "data.on_bad_image": "skip", "test_after_fit": False}
    words = {**QUICK, "backbone": "auto", "weights": [files.seeing, str(files.blind)]}
    words["options"] = QUICK["options"] | options
    run = finetune.fit(folder, out=tmp_path / "runs", **words)
    assert max(row["accuracy"] for row in ranking_of(run.path)["rows"]) < 0.75


@pytest.mark.slow
def test_backbone_auto_does_not_choose_again_in_a_run_that_continues_or_is_repeated(
    files, colours, cli, tmp_path, caplog
):
    given = [*LINE, "--weights", f"{files.seeing},{files.lenet}"]
    cli("fit", colours, *given)
    run_lock.release()
    run = tmp_path / "runs/fit/version_0"
    model, ranking = model_of(run), ranking_of(run)
    caplog.clear()
    with caplog.at_level("INFO", "finetune"):
        for more in (["--resume"], ["--resume", run], ["--ckpt_path", run]):
            epochs = len((run / "metrics.csv").read_text().splitlines())
            cli("fit", colours, *given, *more, "--epochs", epochs)
            run_lock.release()
        cli("fit", "--config", run / "config.yaml")
    assert model_of(run) == model and ranking_of(run) == ranking
    assert model_of(tmp_path / "runs/fit/version_1")["backbone"] == "small_cnn"
    assert model_of(tmp_path / "runs/fit/version_2") == model
    assert not [text for text in caplog.messages if "chosen in" in text]


@pytest.mark.slow
def test_backbone_auto_on_two_devices_is_one_choice(files, colours, tmp_path):
    given = [*LINE, "--weights", f"{files.blind},{files.seeing}"]
    result = processes.finetune("fit", colours, *given, "--devices", 2, cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    assert result.stderr.count("chosen in") == 1
    weights = model_of(tmp_path / "runs/fit/version_0")["weights"]
    assert weights == str(files.seeing / "checkpoints/best.ckpt")


def test_backbone_auto_offline_names_what_is_not_here(files, colours, cli, monkeypatch, caplog):
    asked = []
    seeing = files.seeing / "checkpoints/best.ckpt"
    some = [Candidate("small_cnn", str(seeing)), Candidate("resnet18")]
    some += [Candidate("resnet50", "IMAGENET1K_V1")]
    monkeypatch.setattr(network_choice, "built_in_candidates", lambda: some)
    server = Published(None, "https://download.pytorch.org")
    published = {"resnet18": server, "resnet50": server}
    monkeypatch.setattr(network_choice, "published_of", lambda one: published.get(one.backbone))
    monkeypatch.setattr(network_choice, "is_reachable", lambda address: asked.append(address))
    cli("fit", colours, *LINE)
    (skipped,) = [text for text in caplog.messages if text.startswith("not ranked: ")]
    assert "resnet18, resnet50 (not on this machine" in skipped
    assert asked == ["https://download.pytorch.org"]  # once


def test_backbone_auto_without_any_network_is_one_error(colours, cli, monkeypatch, tmp_path):
    server = Published(None, "https://huggingface.co")
    monkeypatch.setattr(network_choice, "published_of", lambda candidate: server)
    monkeypatch.setattr(network_choice, "is_reachable", lambda address: False)
    with pytest.raises(OSError) as reported:
        cli("fit", colours, *LINE)
    words = ("--backbone auto", "huggingface.co", "--weights A,B")
    assert [word for word in words if word not in str(reported.value)] == []
    assert not (tmp_path / "runs").exists()
