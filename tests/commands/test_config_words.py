"""Short words in configs mean the same as full names."""

import pytest
import yaml
from command_lines import ParseOnly

from finetune.commands.config_files import has_words, in_full_names

SHORT = """
size: 32
optimizer: SGD
lr: 1e-3
epochs: 3
patience: 4
model: {label_smoothing: 0.1}
"""
FULL = """
data: {init_args: {image_size: 32}}
model: {optimizer: {class_path: SGD, init_args: {lr: 1e-3}}, label_smoothing: 0.1}
trainer: {max_epochs: 3}
patience: 4
"""

# run_lightning would silence it; here it is an error.
pytestmark = pytest.mark.filterwarnings("ignore:LightningCLI's args parameter")


def test_a_config_with_short_words_is_parsed_as_one_with_full_names(tmp_path, monkeypatch):
    monkeypatch.setenv("PL_GLOBAL_SEED", "0")
    parser = ParseOnly(["fit", "--data.root", "."]).parser
    parsed = []
    for name, text in (("short", SHORT), ("full", FULL)):
        path = tmp_path / f"{name}.yaml"
        path.write_text(text)
        options = parser.parse_args(["fit", "--config", str(path), "--data.root", "."])["fit"]
        del options["config"]
        parsed.append(options.as_dict())
    assert parsed[0] == parsed[1]
    assert parsed[0]["model"]["optimizer"]["init_args"]["lr"] == 0.001


def test_a_word_for_a_class_joins_its_arguments():
    config = {"optimizer": "SGD", "model": {"optimizer": {"init_args": {"momentum": 0.9}}}}
    optimizer = {"class_path": "SGD", "init_args": {"momentum": 0.9}}
    assert in_full_names("fit", config) == {"model": {"optimizer": optimizer}}
    assert "class_path" not in config["model"]["optimizer"]  # the argument is not changed


def test_only_the_words_of_a_command_are_replaced():
    config = yaml.safe_load(SHORT)
    assert has_words("fit", config)
    assert in_full_names("fit", config) == yaml.safe_load(FULL)
    assert not has_words("test", {"epochs": 3})
    assert in_full_names("test", {"epochs": 3}) == {"epochs": 3}
