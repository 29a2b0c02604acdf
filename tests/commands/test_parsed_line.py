"""A command line is split as argparse would, and joined again."""

import argparse

import pytest

from finetune.commands.parsed_line import format_line, is_flag, parse_line


def test_flags_values_and_what_is_named_by_position():
    line = [
        "a",
        "--epochs",
        "3",
        "--lr=0.1",
        "b",
        "--resume",
        "c",
        "-c",
        "x.yaml",
        "-cy.yaml",
        "--",
        "--d",
        "-e",
    ]
    given = parse_line(line)
    assert given.flags == [
        ("epochs", "3"),
        ("lr", "0.1"),
        ("resume", None),
        ("config", "x.yaml"),
        ("config", "y.yaml"),
    ]
    assert given.positionals == ["a", "b", "c", "--d", "-e"]
    assert given.as_typed == ["--epochs", "--lr", "--resume", "-c", "-c"]
    assert given.last("config") == "y.yaml" and given.last("absent") is None
    assert given.has("lr", "absent") and not given.has("absent")


@pytest.mark.parametrize("value", ["-1", "-.5", "-", "", "two words", "-two words", "a=b", "x"])
def test_what_argparse_takes_for_a_value_is_one(value):
    parser = argparse.ArgumentParser()
    parser.add_argument("--flag")
    assert parser.parse_args(["--flag", value]).flag == value
    assert parse_line(["--flag", value]).flags == [("flag", value)]
    assert not is_flag(value)


@pytest.mark.parametrize("other", ["-x", "--other", "--other=3", "--", "-1x"])
def test_control_what_argparse_takes_for_none_is_none(other, capsys):
    parser = argparse.ArgumentParser()
    parser.add_argument("--flag")
    with pytest.raises(SystemExit):
        parser.parse_args(["--flag", other])
    assert parse_line(["--flag", other]).flags[0] == ("flag", None)


def test_what_is_put_together_comes_out_of_itself():
    line = [
        "--a",
        "1",
        "--b=--x",
        "--c",
        "",
        "--resume",
        "--print_config=comments",
        "--d",
        "-1",
        "p",
        "--",
        "-q",
        "--",
    ]
    once = format_line("fit", parse_line(line))
    assert once == [
        *(
            "fit",
            "--a",
            "1",
            "--b=--x",
            "--c",
            "",
            "--resume",
            "--print_config=comments",
            "--d",
            "-1",
        ),
        *("--", "p", "-q", "--"),
    ]
    assert format_line("fit", parse_line(once[1:])) == once
