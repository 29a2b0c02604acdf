"""Parts of messages to the user."""

import logging

import pytest

from finetune.system.messages import (
    WrongUsage,
    as_wrong_usage,
    be_quiet,
    check_seed,
    did_you_mean,
    fault_of_names,
    reason,
)


def test_names_that_are_near_are_suggested_and_few_are_listed():
    assert did_you_mean("hotdgo", ["hotdog", "sample"]) == "; did you mean 'hotdog'?"
    assert did_you_mean("adamww", ["Adam", "AdamW"]) == "; did you mean 'AdamW' or 'Adam'?"
    assert did_you_mean("xyz", ["hotdog", "sample"]) == "; valid are hotdog, sample"
    assert did_you_mean("xyz", [f"name{i}" for i in range(20)]) == ""


def test_a_reason_is_one_line_with_the_place():
    assert reason(OSError(28, "No space left on device", "/a/b")) == "No space left on device: /a/b"
    assert (
        reason(OSError(28, "No space left on device"), "/cache")
        == "No space left on device: /cache"
    )
    assert reason(OSError(28, "No space left on device")) == "No space left on device"
    assert reason(ValueError("two\n  lines")) == "two lines"


def test_errors_about_a_value_are_wrong_usage_and_others_are_not():
    with (
        pytest.raises(WrongUsage, match=r"^model\.optimizer: bad lr$") as caught,
        as_wrong_usage("model.optimizer"),
    ):
        raise ValueError("bad\nlr")
    assert caught.value.exit_code == 2
    with pytest.raises(WrongUsage, match="^its own words$"), as_wrong_usage("model.optimizer"):
        raise WrongUsage("its own words")
    with pytest.raises(OSError, match="disk"), as_wrong_usage("model.optimizer"):
        raise OSError("disk")


@pytest.mark.parametrize("seed", [-1, 2**32])
def test_seeds_are_those_of_numpy_and_torch(seed):
    check_seed(0)
    check_seed(2**32 - 1)
    with pytest.raises(WrongUsage, match="4,294,967,295"):
        check_seed(seed)


def test_what_is_logged_reaches_the_terminal_without_control_characters(capsys, monkeypatch):
    root = logging.getLogger()
    monkeypatch.setattr(root, "handlers", [])
    be_quiet()
    logging.getLogger("finetune.some").warning("weights: %s\nand more", "a\x1b[2Jb")
    assert capsys.readouterr().err == "weights: a\\x1b[2Jb\nand more\n"


@pytest.mark.parametrize(
    ("names", "fault"),
    [
        (["a", "größe", "T-shirt/top", "hot dog"], ""),
        (["a"], "fewer than two classes"),
        (["a", "b", "a"], "a name more than once"),
        (["a", ""], "the name ''"),
        (["a", "b\x1b[2J"], "the name 'b\\x1b[2J'"),
    ],
)
def test_classes_have_different_names_that_can_be_shown(names, fault):
    assert fault_of_names(names) == fault
