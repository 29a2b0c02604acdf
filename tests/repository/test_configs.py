"""Configs by name, and every shipped one through the real parser."""

from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml
from command_lines import ParseOnly
from paths import ROOT

from finetune.commands.command_line import in_full_spelling
from finetune.data.transforms import train_transform

SHIPPED = sorted((ROOT / "configs").glob("*.yaml"))


@pytest.fixture
def parsed(monkeypatch):
    monkeypatch.setenv("PL_GLOBAL_SEED", "0")  # which the parser sets: so that it is put back
    return parse


@cache
def parse(path: Path) -> Any:
    return ParseOnly(["fit", "--config", str(path)]).config["fit"]


@pytest.mark.filterwarnings("ignore:LightningCLI's args parameter")
@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.name)
def test_every_shipped_config_is_understood(parsed, path):
    config = parsed(path)
    assert config.model.backbone and config.data.class_path.startswith("finetune.")
    # A list of transforms is checked where it is used, not where it is parsed.
    train_transform(config.data.init_args.image_size, config.data.init_args.augmentations or ())


def of_training(config: Any) -> dict[str, Any]:
    """Return the settings of a fit that its result depends on."""
    settings = config.as_dict()
    data = settings["data"]
    return {**settings, "data": {"class_path": data["class_path"], **data["init_args"]}}


def agrees(settings: Any, golden: Any) -> bool:
    """Return whether settings hold all golden ones."""
    if isinstance(golden, dict):
        return isinstance(settings, dict) and all(
            agrees(settings.get(key), golden[key]) for key in golden
        )
    return settings == golden


@pytest.mark.filterwarnings("ignore:LightningCLI's args parameter")
@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.name)
def test_each_trains_as_its_header_says_whatever_the_defaults_become(parsed, path):
    golden = yaml.safe_load((ROOT / "tests/golden/shipped_configs.yaml").read_text("utf-8"))[
        path.name
    ]
    settings = of_training(parsed(path))
    for group in golden:
        for key, value in golden[group].items():
            assert agrees(settings[group].get(key), value), (
                group,
                key,
                settings[group].get(key),
                value,
            )
    assert not agrees(settings, {"model": {**golden["model"], "layer_decay": 0.5}})  # the control


@pytest.mark.filterwarnings("ignore:LightningCLI's args parameter")
def test_a_config_that_names_only_data_trains_as_a_folder_does(parsed, tmp_path):
    named = {
        "data": {"class_path": "finetune.ImageFolderData", "init_args": {"root": str(tmp_path)}}
    }
    (tmp_path / "mine.yaml").write_text(yaml.safe_dump(named))
    folder = ParseOnly(in_full_spelling(["fit", str(tmp_path)])).config["fit"].as_dict()
    folder.pop("config", None)
    for path in (tmp_path / "mine.yaml", ROOT / "configs/image_folder.yaml"):
        by_config = parsed(path).as_dict()
        by_config.pop("config")
        by_config["data"]["init_args"]["root"] = str(tmp_path)
        assert by_config == folder


def test_each_begins_with_its_purpose_and_its_command_and_says_nothing_of_the_machine():
    for path in SHIPPED:
        lines = path.read_text("utf-8").splitlines()
        header = [line for line in lines if line.startswith("#")]
        assert lines[0].startswith("# ") and lines[: len(header)] == header, path
        assert any(f"finetune fit --config {path.name}" in line for line in header), path
        keys = {line.split(":")[0].strip() for line in lines}
        assert not {"devices", "num_nodes", "accelerator", "logger"} & keys, path


@pytest.mark.filterwarnings("ignore:LightningCLI's args parameter")
@pytest.mark.parametrize(
    "text", ["model: {freze: layer2}", "trainer: {max_epochs: many}", "data: {class_path: Nope}"]
)
def test_control_a_config_with_a_mistake_is_refused(parsed, tmp_path, capsys, text):
    (tmp_path / "a.yaml").write_text(text)
    with pytest.raises(SystemExit) as caught:
        parsed(tmp_path / "a.yaml")
    assert caught.value.code == 2 and len(capsys.readouterr().err.splitlines()) == 1
