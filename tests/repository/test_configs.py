"""Configs by name, and every shipped one through the real parser."""

import pytest
from command_lines import ParseOnly
from paths import ROOT

from finetune.data.transforms import train_transform

SHIPPED = sorted((ROOT / "configs").glob("*.yaml"))


@pytest.fixture
def parsed(monkeypatch):
    monkeypatch.setenv("PL_GLOBAL_SEED", "0")  # which the parser sets: so that it is put back
    return lambda path: ParseOnly(["fit", "--config", str(path)]).config["fit"]


@pytest.mark.filterwarnings("ignore:LightningCLI's args parameter")
@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.name)
def test_every_shipped_config_is_understood(parsed, path):
    config = parsed(path)
    assert config.model.backbone and config.data.class_path.startswith("finetune.")
    # A list of transforms is checked where it is used, not where it is parsed.
    train_transform(config.data.init_args.image_size, config.data.init_args.augmentations or ())


def test_each_begins_with_its_purpose_and_its_command_and_says_nothing_of_the_machine():
    for path in SHIPPED:
        lines = path.read_text("utf-8").splitlines()
        header = [line for line in lines if line.startswith("#")]
        assert lines[0].startswith("# ") and lines[: len(header)] == header, path
        assert any(f"finetune fit --config {path.name}" in line for line in header), path
        keys = {line.split(":")[0].strip() for line in lines}
        assert not {"devices", "num_nodes", "accelerator", "logger"} & keys, path


@pytest.mark.filterwarnings("ignore:LightningCLI's args parameter")
@pytest.mark.parametrize("text", ["model: {freze: layer2}", "trainer: {max_epochs: many}", "data: {class_path: Nope}"])
def test_control_a_config_with_a_mistake_is_refused(parsed, tmp_path, capsys, text):
    (tmp_path / "a.yaml").write_text(text)
    with pytest.raises(SystemExit) as caught:
        parsed(tmp_path / "a.yaml")
    assert caught.value.code == 2 and len(capsys.readouterr().err.splitlines()) == 1
