"""What command lines mean: of each shipped config, and of each `finetune fit` in README and docs."""

import re
import shlex
from typing import Any

import pytest
import yaml
from paths import ROOT

from finetune.commands.places import with_places
from finetune.settings.configs import shipped, to_config
from finetune.settings.layers import split_line

GOLDEN = yaml.safe_load((ROOT / "tests/golden/settings.yaml").read_text("utf-8"))


def flat(table: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in table.items():
        name = prefix if key == "init_args" else f"{prefix}.{key}".strip(".")
        is_table = isinstance(value, dict) and value and name != "model.class_weights"
        found |= flat(value, name) if is_table else {name: value}
    return found


def settings(line: str) -> dict[str, Any]:
    read = split_line("fit", shlex.split(line))
    layers = with_places(read.layers(), read.places)
    return flat(to_config(layers.parse(layers.kind)))


@pytest.fixture(autouse=True)
def places(tmp_path, monkeypatch):
    """A folder with the places that the lines name."""
    monkeypatch.chdir(tmp_path)
    for folder in ("FOLDER", "WEIGHTS"):
        (tmp_path / folder).mkdir()
    for file in ("labels.csv", "photos.tar", "weak.pt"):
        (tmp_path / file).touch()


@pytest.mark.parametrize("line", GOLDEN)
def test_a_command_line_sets_what_it_says(line):
    usual = settings("FOLDER")
    found = settings(line)
    changed = {
        name: found.get(name, "absent")
        for name in {**usual, **found}
        if found.get(name, "absent") != usual.get(name, "absent")
    }
    assert changed == GOLDEN[line]


def test_each_line_of_the_docs_is_held():
    pages = [ROOT / "README.md", *(ROOT / "docs").glob("*.md")]
    text = "\n".join(page.read_text("utf-8") for page in pages)
    lines = {
        " ".join(line.split()) for line in re.findall(r"^ *finetune fit ([^`|#\n]*)", text, re.M)
    }
    local = {line for line in lines if "://" not in line and line[0] not in '/"'}
    assert local | {f"--config {name}" for name in shipped()} <= GOLDEN.keys() and len(local) > 15
