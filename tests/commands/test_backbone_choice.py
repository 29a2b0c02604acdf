"""`--backbone auto` chooses the network on the images once, and writes it into config.yaml."""

import json
import os
import shutil
from functools import cache
from pathlib import Path
from types import SimpleNamespace

import processes
import pytest
import timm
import torch
import yaml
from colours import QUICKEST, draw_patients
from command_lines import ParseOnly
from fit_words import QUICK

import finetune
from finetune.api import fitting
from finetune.commands import backbone_choice
from finetune.commands.backbone_choice import describe_ranking, settle_backbone
from finetune.commands.explicit_settings import ExplicitSettings
from finetune.features.backbone_ranking import Ranking, Standing
from finetune.models.candidates import Candidate
from finetune.runs import run_lock
from finetune.system.messages import WrongUsage

OF_NETWORK = ("--model.backbone", "small_cnn", "--model.weights", "null")
# run_lightning would silence it
pytestmark = pytest.mark.filterwarnings("ignore:LightningCLI's args parameter")

REST = [
    option
    for i, option in enumerate(QUICKEST)
    if not {option, QUICKEST[i - 1]} & {"--model.backbone", "--model.weights"}
]
LINE = ["--test_after_fit", "false", *REST]


@pytest.fixture(scope="module")
def files(untested_run, tmp_path_factory):
    """Checkpoints of small_cnn: one that sees colours, one that sees nothing, one that names another network."""
    folder = tmp_path_factory.mktemp("weights")
    seeing = untested_run / "checkpoints/best.ckpt"
    content = torch.load(seeing, weights_only=True)
    blind = {
        name: value if name in ("mean", "std") else torch.zeros_like(value)
        for name, value in content["state_dict"].items()
    }
    torch.save({**content, "state_dict": blind}, folder / "blind.ckpt")
    settings = {**content["hyper_parameters"], "backbone": "lenet"}
    torch.save({**content, "hyper_parameters": settings}, folder / "lenet.ckpt")
    return SimpleNamespace(seeing=seeing, blind=folder / "blind.ckpt", lenet=folder / "lenet.ckpt")


@pytest.fixture(scope="module")
def timm_folder(tmp_path_factory):
    """A folder of a small network of timm's, as timm writes it, with random weights."""
    folder = tmp_path_factory.mktemp("timm") / "network"
    torch.manual_seed(0)
    network = timm.create_model("test_resnet", num_classes=5)
    timm.models.save_for_hf(network, folder, safe_serialization=True)
    return folder


@pytest.fixture(autouse=True)
def no_choice_before(monkeypatch):
    monkeypatch.delenv("FINETUNE_BACKBONE", raising=False)


@pytest.fixture
def never_ranked(monkeypatch):
    def rank(*_):
        raise AssertionError("ranked")

    monkeypatch.setattr(backbone_choice, "rank", rank)


@pytest.fixture
def budgets(monkeypatch):
    """What rank was asked for: the names of the networks and the seconds; the last network wins."""
    asked = []

    def rank(networks, labels, num_classes, seconds, seed, groups):
        asked.append(
            SimpleNamespace(
                names=list(networks), seconds=seconds, seed=seed, num_images=len(labels)
            )
        )
        standings = [
            Standing(name, 0.5, 1.0, len(labels), 1.0) for name in reversed(list(networks))
        ]
        return Ranking(standings, num_images=len(labels))

    monkeypatch.setattr(backbone_choice, "rank", rank)
    return asked


def settings(run: Path) -> dict:
    return yaml.safe_load((run / "config.yaml").read_text())


def test_the_network_that_sees_the_classes_is_chosen_and_written_down(
    files, colours, cli, tmp_path, caplog
):
    given = f"{files.blind},{files.seeing},{files.lenet}"
    cli("fit", colours, "--backbone", "auto", "--weights", given, *LINE)
    run = tmp_path / "runs/fit/version_0"
    model = settings(run)["model"]
    assert (model["backbone"], model["weights"]) == ("small_cnn", str(files.seeing))
    ranking = json.loads((run / "about.json").read_text())["backbone_ranking"]
    seeing, blind = ranking["rows"]
    assert seeing["name"] == f"small_cnn={files.seeing}" and seeing["accuracy"] > 0.9
    assert blind["accuracy"] < 0.5  # of three classes: the control
    assert list(ranking["unusable"]) == ["lenet"]
    (line,) = [text for text in caplog.messages if text.startswith("backbone ")]
    assert (
        f"backbone small_cnn={files.seeing}, chosen in" in line and "of 56 training images" in line
    )
    for row in (seeing, blind):
        assert f"{row['name']} {row['loss']:.3f}, {100 * row['accuracy']:.1f} % (" in line
    (skipped,) = [text for text in caplog.messages if text.startswith("not ranked: ")]
    assert "lenet" in skipped and "does not fit" in skipped
    assert "; log loss and accuracy there: " in line
    # with several labels the head predicts the rarest one
    (line, *_) = describe_ranking({**ranking, "metric": "accuracy on the rarest label"})
    assert "; log loss and accuracy on the rarest label there: " in line


def test_the_ranking_does_not_recognise_the_patients_of_held_out_images(files, tmp_path):
    """Near copies of an image tell its patient, and nothing tells the class: a network is right by chance."""
    folder = draw_patients(tmp_path / "patients")
    asked = config(folder, weights=f"{files.seeing},{files.blind}")
    asked["fit"].data.init_args.group_by = "folder"
    asked["fit"].data.init_args.image_size = 28
    choice = settle_backbone(asked, ExplicitSettings())
    assert max(row["accuracy"] for row in choice.record["rows"]) < 0.75


@pytest.mark.slow
def test_a_run_that_continues_or_is_repeated_does_not_rank_again(
    files, colours, cli, tmp_path, request
):
    given = ["--backbone", "auto", "--weights", f"{files.seeing},{files.lenet}"]
    cli("fit", colours, *given, *LINE)
    run_lock.release()
    run = tmp_path / "runs/fit/version_0"
    before = settings(run)
    ranking = json.loads((run / "about.json").read_text())["backbone_ranking"]
    request.getfixturevalue("never_ranked")
    longer = ["--trainer.max_epochs", 2]
    cli("fit", colours, *given, *LINE, *longer, "--resume")
    run_lock.release()
    assert settings(run)["model"] == before["model"]
    assert json.loads((run / "about.json").read_text())["backbone_ranking"] == ranking
    cli("fit", colours, *given, *LINE, "--trainer.max_epochs", 3, "--resume", run)
    run_lock.release()
    cli("fit", "--config", run / "config.yaml")
    assert settings(tmp_path / "runs/fit/version_1")["model"] == before["model"]


@pytest.mark.slow
def test_resume_passes_over_a_run_whose_network_was_named(
    files, colours, cli, tmp_path, caplog, budgets
):
    cli("fit", colours, *LINE, *OF_NETWORK)
    run_lock.release()
    given = ["--backbone", "auto", "--weights", str(files.seeing)]
    cli("fit", colours, *given, *LINE, "--resume")
    assert (tmp_path / "runs/fit/version_1").is_dir() and len(budgets) == 1
    assert any("of a chosen network, small_cnn" in text for text in caplog.messages)


@pytest.mark.slow
def test_the_random_numbers_of_the_fit_are_those_of_a_fit_without_a_choice(
    files, colours, cli, tmp_path
):
    cli(
        "fit",
        colours,
        "--backbone",
        "auto",
        "--weights",
        f"{files.blind},{files.seeing}",
        *LINE,
    )
    run_lock.release()
    cli("fit", colours, "--model.backbone", "small_cnn", "--model.weights", files.seeing, *LINE)
    runs = [tmp_path / f"runs/fit/version_{i}" for i in range(2)]
    first, second = (
        torch.load(run / "checkpoints/last.ckpt", weights_only=True)["state_dict"] for run in runs
    )
    assert all(torch.equal(first[name], second[name]) for name in first)


@pytest.mark.slow
def test_runs_checkpoints_and_folders_of_timm_are_candidates(
    files, timm_folder, untested_run, colours, cli, tmp_path, budgets
):
    given = f"{untested_run},{files.lenet},{timm_folder}"
    cli("fit", colours, "--backbone", "auto", "--weights", given, *LINE, "--size", 48)
    assert budgets[0].names == ["small_cnn", "lenet", "timm/test_resnet"]
    found = settings(tmp_path / "runs/fit/version_0")
    assert (found["model"]["backbone"], found["model"]["weights"]) == (
        "timm/test_resnet",
        str(timm_folder),
    )
    # Images are prepared as the weights say, except for the size, which the command line sets.
    assert found["data"]["init_args"]["image_size"] == 48
    assert found["data"]["init_args"]["crop_share"] == 0.95


@pytest.mark.slow
def test_images_are_ranked_as_the_fit_prepares_them(timm_folder, files, colours, cli, monkeypatch):
    seen = []
    original = backbone_choice.eval_transform

    def eval_transform(**prepare):
        seen.append(prepare)
        return original(**prepare)

    monkeypatch.setattr(backbone_choice, "eval_transform", eval_transform)
    Path("auto.yaml").write_text(
        f"model: {{backbone: auto, weights: '{timm_folder},{files.seeing}'}}\n"
        "data: {init_args: {resize: whole}}"
    )
    cli("fit", colours, "--config", "auto.yaml", *REST, "--test_after_fit", "false")
    # A config that leaves the choice to the data means its settings for every candidate.
    assert [prepare["resize"] for prepare in seen] == ["whole", "whole"]
    assert [prepare["image_size"] for prepare in seen] == [28, 28]  # of the command line
    # as the weights of timm say
    assert [prepare["crop_share"] for prepare in seen] == [0.95, 0.875]


@pytest.mark.slow
@pytest.mark.parametrize(("minutes", "seconds"), [(None, 120.0), (10, 120.0), (1, 12.0)])
def test_the_budget_is_a_fifth_of_the_minutes_or_two_minutes(
    files, colours, tmp_path, budgets, minutes, seconds
):
    settle_backbone(config(colours, minutes=minutes, weights=str(files.seeing)), ExplicitSettings())
    assert budgets[0].seconds == pytest.approx(seconds) and budgets[0].seed == 7


@cache
def parsed(colours):
    line = ["fit", "--data.root", str(colours), "--seed_everything", "7"]
    return ParseOnly([*line, *QUICKEST[:6]]).config


def config(colours, backbone="auto", weights="DEFAULT", minutes=None):
    """What the parser would have made of a command line."""
    found = parsed(colours).clone()
    found["fit"].model.backbone = backbone
    found["fit"].model.weights = weights
    found["fit"].minutes = minutes
    return found


def test_the_processes_of_other_devices_take_the_choice_of_the_first(
    files, colours, monkeypatch, never_ranked
):
    monkeypatch.setenv("LOCAL_RANK", "1")
    asked = config(colours)
    with pytest.raises(WrongUsage, match="must start the processes"):
        settle_backbone(asked, ExplicitSettings())
    monkeypatch.setenv("FINETUNE_BACKBONE", json.dumps(["small_cnn", str(files.seeing)]))
    settle_backbone(asked, ExplicitSettings())
    assert (asked["fit"].model.backbone, asked["fit"].model.weights) == (
        "small_cnn",
        str(files.seeing),
    )


@pytest.mark.slow
def test_two_processes_have_one_choice(files, colours, tmp_path):
    given = [
        "--backbone",
        "auto",
        "--weights",
        f"{files.blind},{files.seeing}",
        *LINE,
    ]
    result = processes.finetune("fit", colours, *given, "--devices", 2, cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    assert (
        result.stderr.count("chosen in") == 1
        and result.stderr.count("ranking 2 networks by features") == 1
    )
    assert settings(tmp_path / "runs/fit/version_0")["model"]["weights"] == str(files.seeing)


@pytest.mark.slow
def test_a_checkpoint_to_continue_from_decides(untested_run, colours, cli, tmp_path, never_ranked):
    cli(
        "fit",
        colours,
        *LINE,
        "--backbone",
        "auto",
        "--ckpt_path",
        untested_run,
        "--trainer.max_epochs",
        2,
    )
    assert settings(tmp_path / "runs/fit/version_0")["model"]["backbone"] == "small_cnn"


@pytest.mark.slow
def test_python_takes_lists(files, colours, tmp_path, monkeypatch, budgets):
    monkeypatch.chdir(tmp_path)
    words = {
        **QUICK,
        "backbone": "auto",
        "weights": [files.lenet, str(files.seeing)],
    }
    run = finetune.fit(colours, **words)
    assert settings(run.path)["model"]["weights"] == str(files.seeing)
    assert budgets[0].names == ["lenet", "small_cnn"]
    lines = []
    monkeypatch.setattr(fitting, "_run_here", lambda line, _: lines.append(line) or run.path)
    finetune.fit(colours, backbone=["resnet18", "timm/test_resnet"])
    assert lines == [["fit", str(colours), "--backbone", "resnet18,timm/test_resnet"]]


def test_a_list_of_names_is_a_choice_among_them(colours, monkeypatch, budgets):
    monkeypatch.setattr(backbone_choice, "cached_file", lambda candidate: Path(candidate.backbone))
    settle_backbone(
        config(colours, "resnet50,resnet18,resnet50", "IMAGENET1K_V1"), ExplicitSettings()
    )
    assert budgets[0].names == ["resnet50", "resnet18"]


def test_what_is_on_this_machine_is_tried_first(colours, monkeypatch, budgets):
    here = "timm/convnext_nano.in12k_ft_in1k"
    monkeypatch.setattr(
        backbone_choice, "cached_file", lambda c: Path(here) if c.backbone == here else None
    )
    settle_backbone(config(colours), ExplicitSettings())
    assert budgets[0].names[:3] == [
        here,
        "efficientnet_b0",
        "timm/mobilenetv4_conv_medium.e500_r256_in1k",
    ]


@pytest.mark.slow
def test_offline_what_is_not_here_is_skipped_and_named(files, colours, cli, monkeypatch, caplog):
    asked = []
    some = [
        Candidate("small_cnn", str(files.seeing)),
        Candidate("resnet18"),
        Candidate("resnet50", "IMAGENET1K_V1"),
    ]
    monkeypatch.setattr(backbone_choice, "built_in_candidates", lambda: some)
    monkeypatch.setattr(backbone_choice, "cached_file", lambda candidate: None)
    monkeypatch.setattr(backbone_choice, "is_reachable", lambda address: asked.append(address))
    cli("fit", colours, "--backbone", "auto", "--model.weights", "DEFAULT", *LINE)
    (skipped,) = [text for text in caplog.messages if text.startswith("not ranked: ")]
    why = "not on this machine, and https://download.pytorch.org cannot be reached"
    assert skipped == f"not ranked: resnet18, resnet50 ({why})"
    assert asked == ["https://download.pytorch.org"]  # once


def test_without_any_network_there_is_one_error(colours, cli, monkeypatch, tmp_path):
    monkeypatch.setattr(backbone_choice, "cached_file", lambda candidate: None)
    monkeypatch.setattr(backbone_choice, "is_reachable", lambda address: False)
    with pytest.raises(OSError) as reported:
        cli("fit", colours, "--backbone", "auto", *LINE)
    words = ("--backbone auto", "huggingface.co", "--weights A,B")
    assert [word for word in words if word not in str(reported.value)] == []
    assert not (tmp_path / "runs").exists()


@pytest.mark.slow
def test_an_unreadable_image_does_not_end_the_ranking(files, colours, cli, tmp_path):
    folder = shutil.copytree(colours, tmp_path / "some")
    (folder / "train/red/00.png").write_bytes(b"no image")
    given = f"{files.blind},{files.seeing}"
    cli(
        "fit",
        folder,
        "--backbone",
        "auto",
        "--weights",
        given,
        *LINE,
        "--data.on_bad_image",
        "skip",
    )
    assert settings(tmp_path / "runs/fit/version_0")["model"]["weights"] == str(files.seeing)


def test_the_environment_of_an_earlier_choice_is_no_choice(files, colours, budgets, monkeypatch):
    monkeypatch.setenv("FINETUNE_BACKBONE", json.dumps(["lenet", None]))
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    asked = config(colours, weights=str(files.seeing))
    settle_backbone(asked, ExplicitSettings())
    assert asked["fit"].model.backbone == "small_cnn"
    assert json.loads(os.environ["FINETUNE_BACKBONE"])[0] == "small_cnn"
