"""The files, commands and links in README and docs exist."""

import ast
import re
import shlex
from inspect import signature
from pathlib import Path

import pytest
import yaml
from command_lines import own_options
from paths import ROOT

from finetune.cli import LIGHTNING, OWN
from finetune.commands import config_files
from finetune.commands.flag_checks import check_flags
from finetune.commands.lightning_cli import FinetuneCLI
from finetune.commands.options import WORDS
from finetune.commands.parsed_line import parse_line
from finetune.commands.parser import valid_keys
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


OURS = ["README.md", *(f"docs/{name}.md" for name in ("data", "training", "devices", "results"))]
OURS += [f"docs/{name}.md" for name in ("predict", "python", "faq")]
OTHERS = {"help", "check", "shm-size"}  # of every command, of `report`, of docker
OTHERS |= {"json", "sort", "yes"}  # of `runs` and `runs rm`


def every_option() -> set[str]:
    valid = options_of("fit") | options_of("predict")
    ours = (
        "by-hand",
        "check",
        "review",
        "serve",
        "report",
        "cache",
        "benchmark",
        "export",
    )
    for command in ours:
        valid |= own_options(command)
    valid |= {word for words in WORDS.values() for word in words}
    return valid | {f"data.{name}" for name in signature(ImageDataModule).parameters}


def options_in(text: str) -> set[str]:
    return set(re.findall(r"(?<![\w-])--([a-z_.-]+[a-z])", text)) - OTHERS


@pytest.mark.parametrize("page", OURS)
def test_options_in_the_text_exist(page):
    assert options_in((ROOT / page).read_text("utf-8")) - every_option() == set()


# of other commands, of curl, tar and TensorBoard, and settings of classes
ELSEWHERE = {"version", "repeats", "steps", "local"}
ELSEWHERE |= {"data-binary", "dereference", "hard-dereference", "logdir"}
ELSEWHERE |= {"trainer.logger.tracking_uri", "trainer.logger.save_dir", "trainer.strategy.timeout"}
ELSEWHERE |= {"data.init_args.image_size"}


def test_options_in_messages_exist():
    """A hint that names an option that no command has would be refused when it is followed."""
    texts = [
        node.value
        for path in (ROOT / "finetune").rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text("utf-8")))
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and " " in node.value
    ]
    named = set().union(*map(options_in, texts))
    assert {"data.on_bad_image", "out"} <= named  # the control: they are found
    assert named - every_option() - ELSEWHERE == set()


PAGES = [
    ROOT / "README.md",
    ROOT / "benchmarks/NOTEBOOK.md",
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
                command, parse_line([*(argument for argument in rest if argument != "…"), "X"])
            )


def test_control_a_wrong_option_on_a_page_is_found():
    with pytest.raises(WrongUsage):
        check_flags(
            "fit",
            parse_line(shlex.split(TYPED.findall("`finetune fit FOLDER --epoch 3`, and")[0])[1:]),
        )


LINKING = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    ROOT / "llms.txt",
    ROOT / "benchmarks/NOTEBOOK.md",
    *sorted((ROOT / "docs").glob("*.md")),
]


def anchors(page: Path) -> set[str]:
    """Return the anchors of a page: those of its headings, as GitHub makes them, and `<a id="…">`."""
    text = re.sub(r"^```.*?^```$", "", page.read_text("utf-8"), flags=re.S | re.M)
    headings = re.findall(r"^#+ (.+)$", text, re.M)
    of_headings = {
        re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings
    }
    return of_headings | set(re.findall(r'<a id="([\w-]+)"></a>', text))


def broken_links(page: Path, text: str) -> list[str]:
    """Return the links to files or headings that do not exist."""
    broken = []
    for link in re.findall(r"\]\((?!http)([^)\s]+)\)", text):
        name, _, anchor = link.partition("#")
        target = page.parent / name if name else page
        if not target.exists() or (anchor and anchor not in anchors(target)):
            broken.append(link)
    return broken


@pytest.mark.parametrize("page", LINKING, ids=lambda page: page.name)
def test_links_lead_somewhere(page):
    text = page.read_text("utf-8")
    assert broken_links(page, text) == []
    named = re.findall(r"`((?:tests|finetune)/[a-z_/]+\.py)`", text)
    assert [name for name in named if not (ROOT / name).exists()] == []


def test_control_a_broken_link_is_found():
    page = ROOT / "README.md"
    text = "[a](docs/nothing.md) [b](docs/devices.md#nothing) [c](docs/devices.md#resume)"
    text += " [d](docs/promises.md#batch-norm)"
    assert broken_links(page, text) == ["docs/nothing.md", "docs/devices.md#nothing"]


def test_the_recipes_have_as_many_epochs_as_the_benchmarks_say():
    page = (ROOT / "benchmarks/NOTEBOOK.md").read_text("utf-8")
    sentence = r"Five epochs\s+\(`(\w+\.yaml)`: (\d+); `(\w+\.yaml)`, measured on an Intel Xeon, has none\)"
    ((other, its_epochs, without),) = re.findall(sentence, page)
    names = set(re.findall(r"^\| (hotdog\w*\.yaml|image_folder\.yaml) \|", page, re.M))
    assert len(names) == 6
    frozen = yaml.safe_load((ROOT / "configs" / without).read_text("utf-8"))
    assert frozen["model"] == {"freeze": "backbone"}
    for name in {*names, other} - {without}:
        trainer = yaml.safe_load((ROOT / "configs" / name).read_text("utf-8")).get("trainer", {})
        epochs = trainer.get("max_epochs") or usual_epochs(2000)
        assert epochs == (int(its_epochs) if name == other else 5), name


def test_it_is_short():
    assert len(README.splitlines()) <= 180
    assert len(README.encode()) <= 9000
