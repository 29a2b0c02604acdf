"""Typos in flags and configs end in one line that names the key and the nearest right one, with exit code 2."""

from pathlib import Path
from typing import Literal

import pytest
from jsonargparse import ArgumentParser, Namespace, auto_cli

from finetune.commands.lightning_cli import FinetuneCLI
from finetune.commands.parser import OneLineErrorParser, explain, valid_keys


class Model:
    """A network.

    Args:
        freeze: Last frozen stage.
        head_init: Start of the head.
        hidden: Units.
    """

    def __init__(
        self,
        freeze: str | None = None,
        head_init: Literal["xavier", "probe"] = "xavier",
        hidden: int = 8,
    ):
        self.freeze = freeze


class Deep(Model):
    """Another one."""

    def __init__(self, depth: int = 2, **kwargs):
        super().__init__(**kwargs)


def parse(*arguments: str) -> Namespace:
    """What LightningCLI makes: plain options, a class's arguments, and a class by its class_path."""
    parser = OneLineErrorParser()
    parser.add_argument("--config", action="config")
    parser.add_argument("--max_epochs", type=int, default=5)
    parser.add_argument("--default_root_dir", type=str, default="runs")
    parser.add_class_arguments(Model, "model")
    parser.add_subclass_arguments(Model, "other", required=False)
    return parser.parse_args(list(arguments))


def failing(capsys, run) -> str:
    with pytest.raises(SystemExit) as caught:
        run()
    shown = capsys.readouterr()
    assert caught.value.code == 2 and shown.out == ""
    (line,) = shown.err.splitlines()
    return line


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("model: {freze: layer2}", ["'freze'", "did you mean 'model.freeze'?"]),
        ("max_epoch: 3", ["max_epoch", "did you mean 'max_epochs'?"]),
        (
            f"other: {{class_path: {__name__}.Deep, init_args: {{hiden: 3}}}}",
            ["'hiden'", "did you mean 'hidden'?"],
        ),
    ],
)
def test_a_misspelt_key_in_a_config(tmp_path, capsys, text, words):
    (tmp_path / "a.yaml").write_text(text)
    line = failing(
        capsys,
        lambda: parse("--config", str(tmp_path / "a.yaml")),
    )
    assert all(word in line for word in words), line


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--max_epochs", "many"), ["max_epochs", "int", "many"]),
        (("--max_epochs", "1e3"), ["max_epochs: 1", "is not valid; expected int"]),
        (("--model.head_init", "prob"), ["model.head_init", "'xavier', 'probe'", "prob"]),
        (("stray",), ["unrecognized arguments", "stray"]),
    ],
)
def test_a_wrong_value_names_the_key_the_valid_ones_and_what_was_given(capsys, arguments, words):
    line = failing(capsys, lambda: parse(*arguments))
    assert all(word in line for word in words), line


def test_a_function_s_own_flags(capsys):
    def demo(seed: int = 0) -> int:
        """Run."""
        return seed

    def run(*arguments: str) -> int:
        return auto_cli(
            demo, args=list(arguments), parser_class=OneLineErrorParser, as_positional=False
        )

    assert run("--seed", "3") == 3
    assert failing(capsys, lambda: run("--sed", "3")).endswith(
        "there is no option '--sed'; did you mean 'seed'?"
    )


def test_right_arguments_pass(tmp_path):
    (tmp_path / "a.yaml").write_text("model: {freeze: layer2}\nmax_epochs: 7\n")
    arguments = ["--config", str(tmp_path / "a.yaml")]
    assert parse(*arguments).model.freeze == "layer2" and parse(*arguments).max_epochs == 7
    assert parse(*arguments, "--max_epochs", "9").max_epochs == 9


def test_control_jsonargparse_itself_shows_usage_and_guesses_beginnings(capsys):
    parser = ArgumentParser(allow_abbrev=True)
    parser.add_argument("--max_epochs", type=int)
    assert parser.parse_args(["--max_epoch", "3"]).max_epochs == 3
    with pytest.raises(SystemExit):
        parser.parse_args(["--maxepochs", "3"])
    assert len(capsys.readouterr().err.splitlines()) > 1


def test_valid_keys_are_those_of_all_subcommands():
    parser, sub = OneLineErrorParser(), OneLineErrorParser()
    sub.add_argument("--lr", type=float)
    sub.add_class_arguments(Model, "model")
    parser.add_argument("--seed", type=int)
    parser.add_subcommands().add_subcommand("fit", sub)
    assert {"seed", "lr", "model.freeze", "model.head_init", "model.hidden"} <= set(
        valid_keys(parser)
    )
    assert not any(key.startswith("-") for key in valid_keys(parser))


def test_an_option_of_another_command_is_told_as_such():
    parser = OneLineErrorParser()
    fit = OneLineErrorParser()
    predict = OneLineErrorParser()
    fit.add_argument("--resume", type=bool)
    commands = parser.add_subcommands()
    commands.add_subcommand("fit", fit)
    commands.add_subcommand("predict", predict)
    assert (
        explain(parser, "Key 'resume' is not expected")
        == "'resume' is an option of another command"
    )


def test_any_message_becomes_one_short_line():
    parser = OneLineErrorParser()
    assert explain(parser, "Problem:\n  - one\n\n  - two ") == "Problem: - one - two"
    long = explain(parser, "begin " + "x" * 5000 + " Given value: 3")
    assert len(long) < 500 and long.startswith("begin") and long.endswith("Given value: 3")


# The messages of the parser that users meet: LightningCLI's, with subcommands, classes by class_path, callables.
LIGHTNING = {
    ("--trainer.max_epoch", "3"): "'--trainer.max_epoch'; did you mean 'trainer.max_epochs'?",
    ("--data.rot", "x"): "'rot'; did you mean 'root'?",
    (
        "--data",
        "finetune.Hotdog",
        "--data.batchsize",
        "3",
    ): "'batchsize'; did you mean 'batch_size'?",
    (
        "--model.optimizer",
        "Adam",
        "--model.optimizer.weightdecay",
        "0.1",
    ): "did you mean 'weight_decay'?",
    # What other tools call it.
    ("--epochs", "3"): "'--epochs'; did you mean 'trainer.max_epochs'?",
    ("--modle.freeze", "layer2"): "'--modle.freeze'; did you mean 'model.freeze'?",
    ("--trainer.default-root-dir=x",): "did you mean 'trainer.default_root_dir'?",
    ("--model.lr", "3"): "did you mean 'model.optimizer.lr'?",
    ("--model.optimizer.learning_rate", "3"): "'learning_rate'; did you mean 'lr'?",
    ("--data.size", "3"): "'size'; did you mean 'image_size'?",
    ("--dropout", "0.5"): "there is no option '--dropout'\n",
    (
        "--model.optimizer",
        "SDG",
    ): "model.optimizer (--optimizer): there is no class 'SDG'; did you mean 'SGD'?",
    ("--model.optimizer", "torch.optim.Foo"): "there is no class 'Foo'; valid are ASGD, Adadelta,",
    (
        "--model.scheduler",
        "CosineAnealingLR",
    ): "there is no class 'CosineAnealingLR'; did you mean 'CosineAnnealingLR'",
    ("--data", "Foo"): "data: there is no class 'Foo'\n",
}


# be_quiet of the command line would silence them; here they are errors.
@pytest.mark.filterwarnings("ignore:LightningCLI's args parameter")
@pytest.mark.parametrize("arguments", LIGHTNING, ids=" ".join)
def test_typos_as_the_parser_itself_tells_them(capsys, monkeypatch, tmp_path, arguments):
    """Those that a first look leaves to it, and all in configs."""
    monkeypatch.chdir(tmp_path)
    line = failing(capsys, lambda: FinetuneCLI(["fit", *arguments]))
    assert LIGHTNING[arguments] in f"{line}\n"
    assert not Path("runs").exists()


@pytest.mark.parametrize(
    ("value", "expected"), [(["--num", "many"], "int"), (["--kind", "c"], "'a', 'b'")]
)
def test_a_value_of_a_function_s_argument_that_does_not_fit(capsys, value, expected):
    def command(num: int = 1, kind: Literal["a", "b"] = "a") -> None:
        """Do it."""

    line = failing(
        capsys,
        lambda: auto_cli(command, args=value, parser_class=OneLineErrorParser, as_positional=False),
    )
    assert line == f"finetune: error: {value[0][2:]}: {value[1]} is not valid; expected {expected}"
