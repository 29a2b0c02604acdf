"""What the README shows exists."""

import re
import shlex
from inspect import signature

import pytest
import yaml
from command_lines import own_options
from paths import ROOT

from finetune.cli import LIGHTNING, OWN
from finetune.commands import config_files
from finetune.commands.given_arguments import LOGGERS, taken_apart
from finetune.commands.known_flags import check_flags
from finetune.commands.lightning_cli import FinetuneCLI
from finetune.commands.parser import valid_keys
from finetune.commands.short_words import WORDS
from finetune.data.datamodule import ImageDataModule
from finetune.system.messages import WrongUsage
from finetune.training.run_length import usual_epochs

README = (ROOT / "README.md").read_text()
COMMANDS = re.findall(r"^finetune .+$", README, re.M)
TARGETS = re.findall(r"^make ([\w-]+)", README, re.M)


def test_it_opens_with_the_two_commands():
    assert TARGETS == ["demo", "test", "test-all"]
    makefile = (ROOT / "Makefile").read_text()
    assert all(re.search(rf"^{target}:", makefile, re.M) for target in TARGETS)
    ran = re.findall(r"^make ([\w-]+)", (ROOT / ".ci/run").read_text(), re.M)
    assert ran == ["test", "test-all"]  # as README says them


def options_of(command: str) -> set[str]:
    from unittest.mock import patch

    with (
        patch.object(FinetuneCLI, "parse_arguments", side_effect=InterruptedError),
        pytest.raises(InterruptedError),
    ):
        cli = FinetuneCLI.__new__(FinetuneCLI)
        cli.__init__([command])  # type: ignore[misc]
    return set(valid_keys(cli._subcommand_parsers[command]))


@pytest.mark.parametrize("line", COMMANDS)
def test_commands_exist_with_their_options(line):
    _, command, *rest = shlex.split(line, comments=True)
    assert command in {**LIGHTNING, **OWN}
    valid = options_of(command) if command in LIGHTNING else own_options(command)
    for option, value in zip(rest, [*rest[1:], ""], strict=True):
        if option.startswith("--"):
            name = option.removeprefix("--")
            is_word = name in WORDS.get(command, {})
            # the data's depend on its class
            assert is_word or name in valid or name.startswith("data."), option
        if option == "--config":
            assert value in config_files.shipped()


def test_options_in_the_table_exist():
    valid = (
        options_of("fit") | options_of("predict") | own_options("sheet") | own_options("by-hand")
    )
    valid |= (
        own_options("check")
        | own_options("serve")
        | {word for words in WORDS.values() for word in words}
    )
    valid |= {f"data.{name}" for name in signature(ImageDataModule).parameters}
    shown = set(re.findall(r"--([a-z_.]+[a-z])", README)) - {"help", *LOGGERS}
    assert shown - valid == set()


PAGES = [
    ROOT / "README.md",
    *sorted((ROOT / "docs").glob("*.md")),
    *sorted((ROOT / "configs").glob("*.yaml")),
]
TYPED = re.compile(rf"\bfinetune ((?:{'|'.join(WORDS)})\b[^`|\n<]*)")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_all_pages_show_options_that_exist(page):
    """In code, in the lines that commands print, and in the headers of configs."""
    text = re.sub(r"\\\n#? *", " ", page.read_text("utf-8"))
    for line in TYPED.findall(text):
        if "--" in line:
            command, *rest = shlex.split(line.partition(")")[0], comments=True)
            check_flags(
                command, taken_apart([*(argument for argument in rest if argument != "…"), "X"])
            )


def test_control_a_wrong_option_on_a_page_is_found():
    with pytest.raises(WrongUsage):
        check_flags(
            "fit",
            taken_apart(shlex.split(TYPED.findall("`finetune fit FOLDER --epoch 3`, and")[0])[1:]),
        )


def test_files_that_it_names_exist():
    named = re.findall(r"`((?:tests|finetune)/[\w/]+\.py)`", README) + re.findall(
        r"\]\(((?!http)[^)]+)\)", README
    )
    assert named
    assert [name for name in named if not (ROOT / name).exists()] == []


def test_the_recipes_have_as_many_epochs_as_it_says():
    epochs = r"(\d+) epochs \(`(\w+\.yaml)`: (\d+); `(\w+\.yaml)` has none\)"
    sentence = rf"shipped recipes give in {epochs}\s+on ([\d,]+) photographs"
    ((epochs, other, its_epochs, without, num),) = re.findall(sentence, README)
    others = {other: its_epochs}
    names = re.findall(r"^\| `(\w+\.yaml)`.* \| (?:0\.\d+ ± 0\.\d+|–) \|$", README, re.M)
    assert len(names) == 6 and set(others) < set(names)
    assert yaml.safe_load((ROOT / "configs" / without).read_text("utf-8"))["model"] == {
        "freeze": "backbone"
    }
    for name in sorted({*names} - {without}):
        trainer = yaml.safe_load((ROOT / "configs" / name).read_text("utf-8")).get("trainer", {})
        found = trainer.get("max_epochs") or usual_epochs(int(num.replace(",", "")))
        assert found == int(others.get(name, epochs)), name
