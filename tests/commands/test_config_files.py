"""Configs by name: local files and shipped ones."""

from pathlib import Path

import pytest

from finetune.commands import config_files
from finetune.commands.config_files import find, put_configs_first, shipped
from finetune.commands.parsed_line import format_line, parse_line


@pytest.fixture
def package(tmp_path, monkeypatch) -> Path:
    """A package with two configs, and an empty folder to work in."""
    for name in ("hotdog.yaml", "sample.yaml", "notes.txt"):
        (tmp_path / "checkout/configs").mkdir(parents=True, exist_ok=True)
        (tmp_path / "checkout/configs" / name).write_text("{}")
    (tmp_path / "checkout/finetune").mkdir()
    monkeypatch.setattr(
        config_files, "__file__", str(tmp_path / "checkout/finetune/commands/config_files.py")
    )
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    return tmp_path / "checkout"


def test_the_shipped_ones_are_next_to_the_package_in_a_checkout(package):
    assert shipped() == {
        name: package / "configs" / name for name in ("hotdog.yaml", "sample.yaml")
    }


def test_and_inside_it_once_installed(package):
    inside = package / "finetune/configs/own.yaml"
    inside.parent.mkdir()
    inside.write_text("{}")
    # The folder next to an installed package belongs to others.
    assert shipped() == {"own.yaml": inside}


@pytest.mark.parametrize("name", ["hotdog.yaml", "hotdog"])
def test_a_name_that_is_no_file_here_is_looked_up(package, name):
    assert find(name) == str(package / "configs/hotdog.yaml")


def test_a_file_here_comes_first(package):
    Path("hotdog.yaml").write_text("{}")
    Path("sample").mkdir()  # a folder is no config
    assert find("hotdog.yaml") == "hotdog.yaml" and find("./hotdog.yaml") == "./hotdog.yaml"
    assert find("hotdog") == str(package / "configs/hotdog.yaml")
    assert find("sample") == str(package / "configs/sample.yaml")


@pytest.mark.parametrize("flag", ["--config", "-c"])
def test_configs_stand_first_with_their_paths_so_that_flags_win(package, flag):
    def moved(*arguments: str) -> list[str]:
        given = parse_line(arguments)
        put_configs_first(given)
        return format_line("fit", given)[1:]

    path = str(package / "configs/sample.yaml")
    for named in ([flag, "sample.yaml"], [f"{flag}=sample"]):
        first = ["--config", path, "--data.root", "x"]
        assert moved(*named, "--data.root", "x") == first
        assert moved("--data.root", "x", *named) == first
    second = str(package / "configs/hotdog.yaml")
    assert moved(flag, "sample", flag, "hotdog") == ["--config", path, "--config", second]
    assert moved(flag) == ["--config"]  # the parser reports that its value is missing
    others = ["--x.config", "sample", "--resume"]
    assert moved(*others) == others
