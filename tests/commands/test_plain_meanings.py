"""What is plainly meant is done, and a name in the place of a table of settings is answered with the right option."""

import importlib.util

import pytest

from finetune.commands.command_line import in_full_spelling
from finetune.system.messages import WrongUsage

needs_timm = pytest.mark.skipif(
    importlib.util.find_spec("timm") is None, reason="timm is not installed"
)

MEANT = [
    (["--optimizer", "adamw"], ["--model.optimizer", "AdamW"]),
    (["--model.optimizer=SGD"], ["--model.optimizer", "SGD"]),
    (["--optimizer", "mine.Own"], ["--model.optimizer", "mine.Own"]),
    (["--backbone", "ResNet50"], ["--model.backbone", "resnet50"]),
    pytest.param(
        ["--backbone", "convnext_nano"],
        ["--model.backbone", "timm/convnext_nano"],
        marks=needs_timm,
    ),
    pytest.param(
        ["--backbone", "convnext_nano.in12k_ft_in1k"],
        ["--model.backbone", "timm/convnext_nano.in12k_ft_in1k"],
        marks=needs_timm,
    ),
    # torchvision's and timm's: torchvision's
    (["--backbone", "convnext_tiny"], ["--model.backbone", "convnext_tiny"]),
    (["--wandb"], ["--trainer.logger", "WandbLogger"]),
    (["--wandb", "--lr", "1"], ["--model.optimizer.lr", "1", "--trainer.logger", "WandbLogger"]),
    (["--tensorboard", "--mlflow"], ["--trainer.logger", "[TensorBoardLogger, MLFlowLogger]"]),
    (
        ["--trainer.logger", "MLFlowLogger", "--wandb"],
        ["--trainer.logger", "MLFlowLogger", "--trainer.logger+", "WandbLogger"],
    ),
    (["--wandb=false"], []),
]


@pytest.mark.parametrize(("typed", "full"), MEANT)
def test_what_is_plainly_meant_is_done(tmp_path, monkeypatch, typed, full):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "photos").mkdir()
    arguments = in_full_spelling(["fit", *typed, "photos"])
    assert arguments[1:] == [*full, "--data.root", "photos"]
    assert in_full_spelling(arguments) == arguments


def test_a_network_of_no_one_s_has_the_nearest_as_before():
    with pytest.raises(WrongUsage, match="can't be 'resnet19'; did you mean 'resnet18'"):
        in_full_spelling(["fit", "--backbone", "resnet19", "."])
    with pytest.raises(WrongUsage, match="finetune test has no option --wandb"):
        in_full_spelling(["test", "--wandb", "run"])


WRONG = [
    (["fit", "--model", "resnet18"], r"did you mean --backbone \(--model.backbone\) resnet18\?"),
    (
        ["fit", "--data", "photos"],
        r"not 'photos'; did you mean finetune fit FOLDER \(--data.root\)\?",
    ),
    (["fit", "--data", "../Photos"], r"did you mean finetune fit FOLDER"),
    (
        ["predict", "--data", "photos"],
        r"did you mean finetune predict CKPT PICTURES \(--data.predict\)\?",
    ),
    (
        ["fit", "--trainer", "gpu"],
        "--trainer takes a table of settings, or a YAML file of them, not 'gpu'",
    ),
    (
        ["fit", "--name", "first"],
        r"no option --name; did you mean --out \(--trainer.default_root_dir\)\?",
    ),
]


@pytest.mark.parametrize(("typed", "told"), WRONG)
def test_a_name_in_the_place_of_a_table_is_answered_with_the_option(
    tmp_path, monkeypatch, typed, told
):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(WrongUsage, match=told):
        in_full_spelling(typed)


@pytest.mark.parametrize(
    "right", [["--model", "{backbone: x}"], ["--model", "m.yaml"], ["--data", "ImageFolderData"]]
)
def test_tables_files_and_classes_are_left_to_the_parser(tmp_path, monkeypatch, right):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "m.yaml").write_text("backbone: resnet18")
    (tmp_path / "photos").mkdir()
    assert in_full_spelling(["fit", *right, "photos"])
