"""The commands, options and links in README, docs, configs and messages exist."""

import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import yaml
from paths import ROOT
from torch.distributed.run import get_args_parser as torchrun_parser

from finetune.settings.all_commands import COMMANDS
from finetune.settings.configs import shipped
from finetune.settings.fields import has_flag, is_class, settings_of, words_of
from finetune.settings.layers import split_line

LINKING = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    ROOT / "llms.txt",
    *sorted((ROOT / "docs").glob("*.md")),
]
PAGES = [*LINKING, *sorted((ROOT / "configs").glob("*.yaml")), ROOT / "docs/skypilot.yaml"]
TYPED = re.compile(rf"\bfinetune ((?:{'|'.join(sorted(COMMANDS, reverse=True))})\b[^`|\n<]*)")
MANIFESTS = sorted((ROOT / "docs").glob("*.yaml"))


def check_line(command: str, arguments: list[str]) -> None:
    """Check that a command has these options; an own data class may have others."""
    words = [word for word in arguments if word != "…"]
    if [command, *words[:1]] == ["runs", "rm"]:
        command = "runs rm"
        del words[0]
    line = split_line(command, [*words, "X"])
    kind = COMMANDS[command].settings
    names = [name for name in line.flags if not ("data" in line.flags and name.startswith("data."))]
    assert [name for name in names if not has_flag(kind, name) and not is_class(kind, name)] == []
    assert set(line.configs) <= {*shipped(), "X"}


def typed_lines(text: str) -> list[list[str]]:
    """Return the command lines of `finetune` in a page, from the command on."""
    joined = re.sub(r"\\\n[# ]*", " ", text)
    return [
        shlex.split(line.partition(")")[0], comments=True)
        for line in TYPED.findall(joined)
        if "--" in line
    ]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_commands_on_pages_have_their_options(page):
    for command, *arguments in typed_lines(page.read_text("utf-8")):
        check_line(command, arguments)


def test_control_a_wrong_option_on_a_page_is_found():
    ((command, *arguments),) = typed_lines("`finetune fit FOLDER \\\n    --epoch 3`, and")
    with pytest.raises(AssertionError):
        check_line(command, arguments)


def test_torchrun_commands_have_their_options():
    page = re.sub(r"\\\n *", " ", (ROOT / "docs/cloud.md").read_text("utf-8"))
    lines = re.findall(r"torchrun +finetune +(--.*-m finetune fit .*)", page)
    assert lines
    for line in lines:
        flags = torchrun_parser().parse_args(shlex.split(line, comments=True))
        assert flags.module and "--resume" in line, "torchrun starts it again after a crash"


def command_lines(value: Any) -> list[list[str]]:
    """Return the lists of words in a manifest that begin with a command of finetune."""
    if isinstance(value, dict):
        return [line for inner in value.values() for line in command_lines(inner)]
    if not isinstance(value, list):
        return []
    if value and isinstance(value[0], str) and value[0] in COMMANDS:
        return [value]
    return [line for inner in value for line in command_lines(inner)]


@pytest.mark.parametrize("path", MANIFESTS, ids=lambda path: path.name)
def test_commands_in_manifests_have_their_options(path):
    text = path.read_text("utf-8")
    lines = [line for part in yaml.safe_load_all(text) for line in command_lines(part)]
    assert lines or typed_lines(text)
    for command, *arguments in lines:
        check_line(command, arguments)
        assert (command == "fit") == ("--resume" in arguments), "a container may start again"


SECTIONS = [kind for kind, _ in COMMANDS.values()]
KNOWN = {name for kind in SECTIONS for name in (*settings_of(kind), *words_of(kind))}
# of all commands, `docker`, `curl`, `tar` and TensorBoard, and settings of classes
KNOWN |= {"help", "version", "config", "print_config", "decided", "data"}
KNOWN |= {"trainer.callbacks"}  # of a script with a LightningCLI
KNOWN |= {"backend-store-uri", "data-binary", "dereference", "hard-dereference", "logdir"}
KNOWN |= {"model.scheduler.step_size", "shm-size"}


def options_in(text: str) -> set[str]:
    return set(re.findall(r"(?<![\w-])--([a-z_.-]+[a-z])", text))


PROSE = ("README", *(f"docs/{name}" for name in ("data", "training", "devices", "results")))
PROSE += ("docs/predict", "docs/python", "docs/faq")


def test_options_in_messages_and_prose_exist():
    """A hint that names an option that no command has would be refused when it is followed."""
    files = [*(ROOT / "finetune").rglob("*.py"), *(ROOT / f"{page}.md" for page in PROSE)]
    files.remove(ROOT / "finetune/reports/charts.py")  # has variables of CSS
    named = options_in("\n".join(path.read_text("utf-8") for path in files))
    assert {"data.on_bad_image", "out"} <= named  # the control: they are found
    assert named - KNOWN == set()


def anchors(page: Path) -> set[str]:
    """Return the anchors of a page: those of its headings, as GitHub makes them, and `<a id="…">`."""
    text = re.sub(r"^```.*?^```$", "", page.read_text("utf-8"), flags=re.S | re.M)
    headings = re.findall(r"^#+ (.+)$", text, re.M)
    of_headings = {re.sub(r"[^\w\- ]", "", each.lower()).replace(" ", "-") for each in headings}
    return of_headings | set(re.findall(r'<a id="([\w-]+)"></a>', text))


def broken_links(page: Path, text: str) -> list[str]:
    """Return the links to files or headings, and the named files of code, that do not exist."""
    named = re.findall(r"`((?:tests|finetune|tools)/[a-z_/]+\.py)`", text)
    broken = [name for name in named if not (ROOT / name).exists()]
    for link in re.findall(r"\]\((?!http)([^)\s]+)\)", text):
        name, _, anchor = link.partition("#")
        target = page.parent / name if name else page
        if not target.exists() or (anchor and anchor not in anchors(target)):
            broken.append(link)
    return broken


@pytest.mark.parametrize("page", LINKING, ids=lambda page: page.name)
def test_links_on_pages_lead_somewhere(page):
    assert broken_links(page, page.read_text("utf-8")) == []


def test_control_a_broken_link_is_found():
    text = "[a](docs/nothing.md) [b](docs/devices.md#nothing) [c](docs/devices.md#resume)"
    text += " [d](docs/reference.md#epochs)"
    assert broken_links(ROOT / "README.md", text) == ["docs/nothing.md", "docs/devices.md#nothing"]
