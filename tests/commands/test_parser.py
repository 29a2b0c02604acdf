"""Typos in flags and configs end in one line with the key and the nearest valid one, and exit code 2."""

from functools import cache
from pathlib import Path
from typing import Literal

import pytest
from jsonargparse import ArgumentParser, Namespace, auto_cli
from option_list import lightning_parser, unparsed

from finetune.commands.flag_checks import check_flags
from finetune.commands.lightning_cli import FinetuneCLI
from finetune.commands.parsed_line import parse_line
from finetune.commands.parser import OneLineErrorParser, explain, valid_keys
from finetune.system.messages import WrongUsage

parser_of = cache(lightning_parser)
whole_parser = cache(lambda: unparsed("fit").parser)


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
        (("--max_epochs", "many"), ["max_epochs takes a whole number, such as 3, not 'many'"]),
        (("--max_epochs", "1e3"), ["max_epochs takes a whole number, such as 3, not '1000.0'"]),
        (
            ("--model.head_init", "prob"),
            ["model.head_init cannot be 'prob'; did you mean 'probe'?"],
        ),
        (("--max_epochs",), ["--max_epochs needs a value"]),
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
            demo,
            args=list(arguments),
            prog="finetune demo",
            parser_class=OneLineErrorParser,
            as_positional=False,
        )

    assert run("--seed", "3") == 3
    assert failing(capsys, lambda: run("--sed", "3")).endswith(
        "finetune demo has no option --sed; did you mean --seed?"
    )


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "one: 1\ntwo words: 2: 3\n",
            "a.yaml, line 2: not valid YAML: mapping values are not allowed",
        ),
        ("epoch 1/3  images 20\n", "a.yaml is not a config: it has no settings"),
    ],
)
def test_a_file_that_is_no_config_is_named(tmp_path, capsys, text, message):
    (tmp_path / "a.yaml").write_text(text)
    line = failing(capsys, lambda: parse("--config", str(tmp_path / "a.yaml")))
    assert message in line and "unicode string" not in line


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "FOLDER is missing: finetune check FOLDER|TABLE [options]"),
        (["x", "--sort", "size2"], "--sort cannot be 'size2'; did you mean 'size'?"),
    ],
)
def test_what_argparse_itself_refuses(capsys, arguments, message):
    parser = OneLineErrorParser(prog="finetune check")
    parser.add_argument("folder")
    parser.add_argument("--sort", choices=("when", "size"))
    assert failing(capsys, lambda: parser.parse_args(arguments)) == f"finetune: error: {message}"


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


def test_an_option_of_another_command_is_reported_as_such():
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


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--data", "nowhere.Data"], "data: No module named 'nowhere'"),
        (["--data", "os.path"], "data: os.path is not valid"),
        (["--model.optimizer.lr", "nan"], "lr: nan is not valid; expected float"),
        (
            ["--model.scheduler", "ReduceLROnPlateau"],
            "model.scheduler: Multiple subclasses with name ReduceLROnPlateau. Give the full class path to avoid "
            "ambiguity: torch.optim.lr_scheduler.ReduceLROnPlateau, pytorch_lightning.cli.ReduceLROnPlateau.",
        ),
    ],
)
def test_a_class_that_cannot_be_taken_is_reported_with_the_reason(
    capsys, tmp_path, arguments, message
):
    line = failing(capsys, lambda: FinetuneCLI(["fit", "--data.root", str(tmp_path), *arguments]))
    assert line == f"finetune: error: {message}"


def test_any_message_becomes_one_short_line():
    parser = OneLineErrorParser()
    assert explain(parser, "Problem:\n  - one\n\n  - two ") == "Problem: - one - two"
    long = explain(parser, "begin " + "x" * 5000 + " Given value: 3")
    assert len(long) < 500 and long.startswith("begin") and long.endswith("Given value: 3")


# The messages of the parser that users meet: LightningCLI's, with subcommands, classes by class_path, callables.
LIGHTNING = {
    (
        "--trainer.max_epoch",
        "3",
    ): "no option --trainer.max_epoch; did you mean --epochs (--trainer.max_epochs)?",
    ("--data.rot", "x"): "there is no option 'rot'; did you mean 'root'?",
    ("--data.resize", "squosh"): "resize cannot be 'squosh'; did you mean 'squash'?",
    (
        "--model",
        "{freze: x}",
    ): "finetune fit has no option 'model.freze'; did you mean 'model.freeze'?",
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
    (
        "--epochs",
        "3",
    ): "finetune fit has no option --epochs; did you mean --epochs (--trainer.max_epochs)?",
    (
        "--modle.freeze",
        "layer2",
    ): "no option --modle.freeze; did you mean --freeze (--model.freeze)?",
    ("--trainer.default-root-dir=x",): "did you mean --out (--trainer.default_root_dir)?",
    ("--model.lr", "3"): "did you mean --lr (--model.optimizer.lr)?",
    ("--model.optimizer.learning_rate", "3"): "'learning_rate'; did you mean 'lr'?",
    ("--data.size", "3"): "'size'; did you mean 'image_size'?",
    ("--dropout", "0.5"): "no option --dropout; finetune fit --help has those that people use",
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
def test_typos_as_the_parser_itself_reports_them(capsys, monkeypatch, tmp_path, arguments):
    """Those that a first look leaves to it, and all in configs."""
    monkeypatch.chdir(tmp_path)
    line = failing(capsys, lambda: whole_parser().parse_args(["fit", *arguments]))
    assert LIGHTNING[arguments] in f"{line}\n"
    assert not Path("runs").exists()


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (["--num", "many"], "--num takes a whole number, such as 3, not 'many'"),
        (["--kind", "c"], "--kind cannot be 'c'; valid are a, b"),
        (["--num", "2.5"], "--num takes a whole number, such as 3, not '2.5'"),
    ],
)
def test_a_value_of_a_function_s_argument_that_does_not_fit(capsys, value, message):
    def command(num: int = 1, kind: Literal["a", "b"] = "a") -> None:
        """Do it."""

    line = failing(
        capsys,
        lambda: auto_cli(
            command,
            args=value,
            prog="finetune do",
            parser_class=OneLineErrorParser,
            as_positional=False,
        ),
    )
    assert line == f"finetune: error: {message}"


MISTAKES = [
    ("--epoch", "3"),
    ("--trainer.max_epoch", "3"),
    ("--modle.freeze", "layer2"),
    ("--top_k", "3"),
    ("--zzz", "3"),
    ("--trainer.max_epochs", "ten"),
    ("--model.head_init", "prob"),
    ("--trainer.precision", "fp17"),
    ("--minutes", "ten"),
    ("--trainer.max_epochs",),
]


@pytest.mark.filterwarnings("ignore:LightningCLI's args parameter")
@pytest.mark.parametrize("command", ["fit", "benchmark"])
@pytest.mark.parametrize("arguments", MISTAKES, ids=" ".join)
def test_a_mistake_is_reported_in_the_same_words_before_and_after_torch_is_imported(
    capsys, monkeypatch, tmp_path, arguments, command
):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(WrongUsage) as before:
        check_flags(command, parse_line(arguments))
    after = failing(capsys, lambda: parser_of(command).parse_args(list(arguments)))
    assert after == f"finetune: error: {before.value}"


@pytest.mark.filterwarnings("ignore:LightningCLI's args parameter")
def test_an_argument_of_another_class_is_not_taken_for_an_option(capsys, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    callback = "{class_path: EarlyStopping, init_args: {monitor: a, patience: ten}}"
    line = failing(capsys, lambda: FinetuneCLI(["fit", "--trainer.callbacks", f"[{callback}]"]))
    assert "--patience" not in line and "ten" in line, line
