"""Help pages: short, quick, and of the settings that there are. docs/reference.md as `make options` writes it."""

import json
import subprocess
import sys
import time

import pytest
import reference_page

from finetune.cli import SECTIONS, main
from finetune.settings.all_commands import COMMANDS
from finetune.settings.fields import has_flag, settings_of, words_of
from finetune.settings.layers import split_line
from finetune.settings.schema import FitSettings

LISTED = [command for commands in SECTIONS.values() for command in commands]


@pytest.fixture
def shown(capsys):
    """The help that a command line asks for, with code 0."""

    def page(*words: str) -> str:
        with pytest.raises(SystemExit) as ended:
            main([part for word in words for part in word.split()])
        assert ended.value.code == 0
        return capsys.readouterr().out

    return page


@pytest.mark.parametrize("command", sorted(COMMANDS))
def test_help_is_one_screen_with_examples_that_are_understood(command, shown):
    page = shown(command, "--help")
    lines = page.splitlines()
    assert len(lines) <= 42 and max(map(len, lines)) <= 80
    assert page == shown(command, "-h") and "for example:" in lines
    assert not {"null", "None"} & {*page.replace("null for random", "").split()}
    examples = [line.split()[1:] for line in lines if line.startswith("  finetune ")]
    assert 1 <= len(examples) <= 3
    for first, *rest in examples:
        is_two = f"{first} {rest[0]}" in COMMANDS if rest else False
        split_line(f"{first} {rest[0]}" if is_two else first, rest[is_two:]).layers()


@pytest.mark.parametrize("command", ["fit", "test", "predict", "benchmark"])
def test_help_all_has_each_option_once_with_its_default(command, shown):
    page = shown(command, "--help", "all")
    kind = COMMANDS[command].settings
    options = {name: one for name, one in settings_of(kind).items() if has_flag(kind, name)}
    for name, option in options.items():
        flags = [
            line for line in page.splitlines() if f"--{name} " in f"{line} " and line[2] == "-"
        ]
        assert len(flags) == 1, name
        if (
            option.about.word
            and words_of(COMMANDS[command].settings).get(option.about.word) == name
        ):
            assert f"--{option.about.word}, --{name}" in flags[0]
    assert max(map(len, page.splitlines())) <= 112
    assert ("over all devices. [32]" in page) == (command in ("fit", "benchmark"))


def test_the_list_of_commands_has_each_once(shown):
    lines = shown("--help").splitlines()
    assert len(lines) <= 40 and max(map(len, lines)) <= 80
    assert sorted(LISTED) == sorted(COMMANDS.keys() - {"runs rm"})


# Runs command lines in one process; its last line says of each how it ended, and what was imported by then.
_LINES = """
import json, sys
import finetune
finetune.__all__
codes, imported = [None], []
def look():
    imported.append(sorted({"PIL", "numpy", "pytorch_lightning", "torch"} & set(sys.modules)))
look()
from finetune.cli import main
for line in json.loads(sys.argv[1]):
    try:
        main(line)
    except SystemExit as ended:
        codes.append(ended.code)
    look()
print()
print(json.dumps([codes, imported]))
"""
BEFORE_TORCH = {
    "--help": 0,
    "--version": 0,
    "fit --help": 0,
    "fit --help all": 0,
    "fit x --epoch 3": 2,
    "fit --config hotdg.yaml": 2,
    "fit x --data.resize squosh": 2,
    "fit . --backbone resnet19": 2,
    "fit . --backbone resnet18,resnet19": 2,
    "fit . --name version_0": 2,
    "fit --config hotdog.yaml --print_config": 0,
    "check nowhere": 2,
    "fit . --threshold zzz": 2,
    "cache": 0,
    "serve some.ckpt --port 0 --precision 32": 2,
}


@pytest.mark.slow
def test_neither_the_package_nor_help_nor_an_error_line_waits_for_torch(tmp_path):
    (tmp_path / "some.ckpt").touch()
    lines = json.dumps([line.split() for line in [*BEFORE_TORCH, "fit --data.root nowhere"]])
    command = [sys.executable, "-c", _LINES, lines]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, timeout=60)
    codes, imported = json.loads(done.stdout.splitlines()[-1])
    assert codes == [None, *BEFORE_TORCH.values(), 1]
    for line, names in zip(["import finetune", *BEFORE_TORCH], imported[:-1], strict=True):
        is_light = line.startswith(("import", "fit", "--")) and "--threshold" not in line
        assert not names if is_light else not {"pytorch_lightning", "torch"} & set(names), line
    assert "torch" in imported[-1]  # the control: a right command line


def test_the_reference_is_as_make_options_writes_it():
    assert reference_page.PAGE.read_text("utf-8") == reference_page.page(), "run `make options`"


def test_each_short_page_names_options_that_there_are():
    for command, (kind, _) in COMMANDS.items():
        options = settings_of(kind)
        words = words_of(kind)
        assert set(words.values()) <= options.keys() and not set(words) & options.keys(), command
        listed = " ".join(kind.page.sections.values()).split()
        assert {words.get(name, name) for name in listed} <= options.keys(), command
        assert len(listed) == len(set(listed)), command
        assert all(option.help.endswith(".") for option in options.values()), command


def test_words_of_other_tools_are_answered_with_the_option(capsys):
    options = settings_of(FitSettings)
    words = words_of(FitSettings)
    for full, option in options.items():
        names = {word for word, name in words.items() if name == full} | {full}
        for word in option.about.also.split():
            with pytest.raises(SystemExit):
                main(["fit", "photos", f"--{word}", "x"])
            error = capsys.readouterr().err
            is_option = word in options.keys() | words.keys()
            assert is_option or any(f"--{each}" in error for each in names), (word, error)


@pytest.mark.parametrize(
    ("typed", "meant"),
    [
        ("--batch-size", "--batch (--data.batch_size)"),
        ("--epoch", "--epochs (--trainer.max_epochs)"),
        ("--imgsz", "--size (--data.image_size)"),
        ("--device", "--devices (--trainer.devices)"),
        ("--learning-rate", "--lr (--model.optimizer.lr)"),
        ("--pretrained", "--weights (--model.weights)"),
    ],
)
def test_an_option_of_another_tool_is_answered_with_ours(capsys, typed, meant):
    with pytest.raises(SystemExit):
        main(["fit", "photos", typed, "3"])
    assert f"did you mean {meant}?" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize("line", ["--help", "fit --help", "fit x --epoch 3", "fit x --batch 0"])
def test_help_and_a_typo_are_answered_at_once(line):
    command = [sys.executable, "-m", "finetune", *line.split()]
    seconds = []
    for _ in range(5):
        began = time.perf_counter()
        subprocess.run(command, capture_output=True, timeout=60)
        seconds.append(time.perf_counter() - began)
    assert min(seconds) < 1  # .2 s on a quiet core
