"""What fit makes of Lightning's Trainer; test_commands.py, test_configs.py and test_resume.py run all of it."""

import csv
import json
import shutil
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
import yaml
from colours import QUICKEST

from finetune.commands.options import OPTIONS
from finetune.models.backbones import build
from finetune.training.classifier import Classifier


@pytest.mark.slow
def test_a_run_that_continues_needs_no_weights_and_every_process_knows_its_checkpoint(
    colours, cli, tmp_path
):
    weights = tmp_path / "weights.pt"
    torch.save(build("small_cnn", 3).state_dict(), weights)
    options = [
        "fit",
        "--resume",
        "--data.root",
        str(colours),
        *QUICKEST,
        "--model.weights",
        str(weights),
    ]
    cli(*options)
    weights.unlink()
    seen = []
    with patch.object(
        Classifier, "setup", lambda model, stage: seen.append((stage, model.trainer.ckpt_path))
    ):
        cli(*options, "--trainer.max_epochs", 2)
    # known in `setup`, where processes on other machines tell whether they see the same checkpoint
    assert seen[0] == ("fit", Path("runs/fit/version_0/checkpoints/last.ckpt"))


OWN_DATA = """
from finetune import ImageFolderData
class OwnData(ImageFolderData):
    def __init__(self, root: str | None = None, batch_size: int = 5, image_size: int = 64):
        super().__init__(root, batch_size=batch_size, image_size=image_size)
"""


@pytest.mark.parametrize("is_in_config", [False, True])
def test_a_data_class_of_the_user_has_its_own_defaults(
    colours, cli, monkeypatch, capsys, is_in_config
):
    Path("own_data.py").write_text(OWN_DATA)
    monkeypatch.syspath_prepend(Path.cwd())
    Path("own.yaml").write_text("data: {class_path: own_data.OwnData}")
    named = ["--config", "own.yaml"] if is_in_config else ["--data", "own_data.OwnData"]
    with pytest.raises(SystemExit):
        cli("fit", *named, "--data.root", colours, "--data.image_size", 48, "--print_config")
    data = yaml.safe_load(capsys.readouterr().out)["data"]
    assert data["init_args"] == {"root": str(colours), "batch_size": 5, "image_size": 48}


def rate_in(config: Path) -> float:
    return yaml.safe_load(config.read_text())["model"]["optimizer"]["init_args"]["lr"]


@pytest.mark.slow
def test_what_changed_since_a_run_began_is_reported_and_config_yaml_says_what_holds(
    colours, cli, tmp_path, caplog
):
    fit = ["fit", "--resume", "--data.root", colours, *QUICKEST, "--test_after_fit", "false"]
    sgd = ["--model.optimizer", "torch.optim.SGD", "--model.optimizer.lr"]
    cli(*fit, *sgd, 0.02)
    assert (
        f"--resume found no run with a last.ckpt in {tmp_path}/runs/fit: a new run begins"
        in caplog.text
    )
    folder = tmp_path / "runs/fit/version_0"
    before = (folder / "config.yaml").read_text()
    adam = ["--model.optimizer", "torch.optim.Adam"]
    with pytest.raises(ValueError, match=r"continue with .*class_path .*Adam"):
        cli(*fit, *adam, "--trainer.max_epochs", 2)
    assert "is usual for" not in caplog.text  # nothing holds of it
    with pytest.raises(ValueError, match=r"data\.val_fraction 0\.2 \(was 0\.1\)"):
        cli(*fit, *sgd, 0.02, "--trainer.max_epochs", 2, "--data.val_fraction", 0.2)
    assert (folder / "config.yaml").read_text() == before
    cli(*fit, *sgd, 0.5, "--trainer.max_epochs", 2)
    assert "model.optimizer.lr stays 0.02, not 0.5" in caplog.text
    assert "changed: trainer.max_epochs 2 (was 1)" in caplog.text
    assert rate_in(folder / "config.yaml") == 0.02
    last = torch.load(folder / "checkpoints/last.ckpt", weights_only=True)
    assert [group["lr"] for group in last["optimizer_states"][0]["param_groups"]] == [0.02] * 4
    cli(
        *fit,
        *sgd,
        0.02,
        "--trainer.max_epochs",
        3,
        "--data.batch_size",
        8,
        "--allow_changes",
        "true",
    )
    config = yaml.safe_load((folder / "config.yaml").read_text())
    assert config["data"]["init_args"]["batch_size"] == 8 and config["allow_changes"] is False


# As a person types it, with image_folder.yaml, in a second.
TYPED = [
    *("--backbone", "small_cnn", "--weights", "null", "--size", 28, "--epochs", 1, "--workers", 0)
]
TYPED += ["--trainer.accelerator", "cpu", "--report", "false", "--test_after_fit", "false"]


@pytest.mark.parametrize(("optimizer", "rate"), [([], 0.001), (["--optimizer", "SGD"], 0.03)])
def test_another_optimizer_than_the_config_s_trains_at_its_own_rate(
    colours, cli, tmp_path, optimizer, rate
):
    # Of 7 steps one is the warm-up, at the full rate already.
    cli("fit", colours, *TYPED, "--batch", 8, "--trainer.log_every_n_steps", 1, *optimizer)
    name = optimizer[1] if optimizer else "AdamW"
    with open(tmp_path / "runs/fit/version_0/steps.csv", newline="", encoding="utf-8") as file:
        first = next(csv.DictReader(file))
    assert float(first[f"lr-{name}/head"]) == float(first[f"lr-{name}/backbone"]) == rate


@pytest.mark.slow
def test_what_a_checkpoint_decides_holds_and_a_config_that_says_otherwise_is_reported_so(
    cli, tmp_path, run_to_go_on, caplog
):
    checkpoint = ["--ckpt_path", "runs/fit/version_0/checkpoints/best.ckpt"]
    quiet = ["--trainer.accelerator", "cpu", "--data.num_workers", "0"]
    given = yaml.safe_load((run_to_go_on / "config.yaml").read_text())
    for name in OPTIONS["fit"].keys() - OPTIONS["test"].keys() | {"ckpt_path"}:
        given.pop(name, None)  # `test` has them not
    (tmp_path / "same.yaml").write_text(yaml.safe_dump(given))
    given["model"]["backbone"], given["data"]["init_args"]["image_size"] = "lenet", 64
    (tmp_path / "other.yaml").write_text(yaml.safe_dump(given))
    cli("test", *checkpoint, *quiet, "--config", "same.yaml", "--model.backbone", "small_cnn")
    assert "the checkpoint decides" not in caplog.text
    cli("test", *checkpoint, *quiet, "--config", "other.yaml")
    reported = (
        "the checkpoint decides: model.backbone small_cnn, not lenet, data.image_size 28, not 64"
    )
    assert reported in caplog.messages
    results = [
        json.loads((tmp_path / f"runs/test/version_{i}/test.json").read_text()) for i in range(2)
    ]
    assert results[0] == results[1]


OTHER_NAMES = [pytest.param(name, marks=pytest.mark.slow) for name in ("[2024]", "1e5", "🌭")]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["Dogs: 2024", *OTHER_NAMES])
def test_a_folder_has_its_own_name_though_that_is_yaml(colours, cli, tmp_path, name):
    """On the command line, and in config.yaml, which repeats the run."""
    Path(name).symlink_to(colours)
    cli("fit", name, *QUICKEST, "--trainer.max_steps", 1, "--test_after_fit", "false")
    config = Path("runs/fit/version_0/config.yaml")
    assert yaml.safe_load(config.read_text())["data"]["init_args"]["root"] == name
    cli("fit", "--config", config)
    assert Path("runs/fit/version_1/checkpoints/last.ckpt").exists()


@pytest.mark.slow
def test_images_have_their_own_names_too(colours, cli, untested_run):
    image = next(colours.rglob("*.png"))
    for given in (["🌭.png", "b.png"], ["Scene 2: beach.png"]):
        for name in given:
            shutil.copy(image, name)
        cli("predict", untested_run, *given, "--out", "found.csv")
        with open("found.csv", encoding="utf-8") as file:
            assert [row["path"] for row in csv.DictReader(file)] == given
