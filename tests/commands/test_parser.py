"""Typos in flags and configs end in one line with the key and the nearest valid one, and exit code 2."""

from finetune.commands.parser import OneLineErrorParser, explain


def test_any_message_becomes_one_short_line():
    parser = OneLineErrorParser()
    assert explain(parser, "Problem:\n  - one\n\n  - two ") == "Problem: - one - two"
    long = explain(parser, "begin " + "x" * 5000 + " Given value: 3")
    assert len(long) < 500 and long.startswith("begin") and long.endswith("Given value: 3")
