"""docs/parallelism.md: its commands parse, its files exist, and its differences are within the tolerance."""

import re
import shlex

import pytest
from command_lines import own_options, parse_typed
from parity_ways import WAYS
from paths import ROOT

from finetune.cli import OWN
from finetune.commands import config_files

PAGE = (ROOT / "docs/parallelism.md").read_text("utf-8")
BLOCKS = re.findall(r"^```sh\n(.*?)^```", PAGE, re.M | re.S)
COMMANDS = [line for block in BLOCKS for line in block.replace("\\\n", " ").splitlines() if line]


@pytest.mark.parametrize("line", [line for line in COMMANDS if line.startswith("finetune fit ")])
def test_fit_commands_parse(line, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    words = shlex.split(line)
    settings = parse_typed(words[1:])
    assert settings.trainer.devices == words[words.index("--devices") + 1]
    assert "FOLDER" in words or words[words.index("--config") + 1] in config_files.shipped()


def test_other_commands_exist_with_their_options():
    others = [shlex.split(line) for line in COMMANDS if not line.startswith("finetune fit ")]
    assert sorted(words[1] for words in others) == ["-m", "by-hand", "parity"]
    for words in others:
        if words[0] == "python":
            assert (ROOT / words[2].replace(".", "/") / "__main__.py").exists()
            continue
        assert words[1] in OWN
        assert {word.removeprefix("--") for word in words if word.startswith("--")} <= own_options(
            words[1]
        )


def test_the_shown_parity_has_every_way_within_its_tolerance():
    (block,) = re.findall(r"^```\n(way .*?)^```", PAGE, re.M | re.S)
    rows = {way: re.search(rf"^{way}  .*$", block, re.M) for way in WAYS}
    assert None not in rows.values()
    differences = [float(rows[way][0].split()[-3]) for way in WAYS[1:]]
    assert max(differences) <= 1e-10
    assert "At most 1e-10 is rounding, by sums in another order." in block


def test_files_that_the_page_names_exist():
    named = re.findall(r"`((?:tests|finetune)/[\w/]+\.py)`", PAGE)
    named += [f"docs/{link}" for link in re.findall(r"\]\(((?!http|#)[^)#]+)", PAGE)]
    assert len(named) > 10
    assert [name for name in named if not (ROOT / name).exists()] == []
