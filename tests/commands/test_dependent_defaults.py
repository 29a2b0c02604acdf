"""The default learning rate of an optimizer that the command line names instead of the config's."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
from command_lines import ParseOnly

from finetune.commands import dependent_defaults
from finetune.commands.dependent_defaults import USUAL, USUAL_OF_FITTED_HEAD
from finetune.commands.explicit_settings import read_explicit_settings


@pytest.fixture
def optimizer(tmp_path, monkeypatch):
    """The optimizer settings that a command line results in, and the message about them."""
    monkeypatch.setenv("PL_GLOBAL_SEED", "0")
    monkeypatch.chdir(tmp_path)
    Path("adam.yaml").write_text("model: {optimizer: {class_path: torch.optim.Adam}}")
    Path("adam_rate.yaml").write_text(
        "model: {optimizer: {class_path: torch.optim.Adam, init_args: {lr: 0.3}}}"
    )
    Path("rate.yaml").write_text("model: {optimizer: {init_args: {lr: 0.4}}}")

    def parse(*arguments: str):
        cli = ParseOnly(["fit", *arguments])
        rates = [message for message in cli.plan.messages if message.startswith("learning rate")]
        return cli.config["fit"].model.optimizer, rates[0] if rates else ""

    return parse


HOTDOG = ("--config", "hotdog.yaml")  # SGD at 0.01
TAKEN = {  # the rate is the usual one, and is reported
    ("--model.optimizer", "Adam"): ("Adam", "0.0001 is for AdamW"),
    (*HOTDOG, "--model.optimizer", "Adam"): ("Adam", "0.01 is for SGD"),
    (*HOTDOG, "--model.optimizer.class_path", "RAdam"): ("RAdam", "0.01 is for SGD"),
    (*HOTDOG, "--config", "adam.yaml"): ("Adam", "0.01 is for SGD"),
    (
        *HOTDOG,
        "--model.optimizer",
        '{"class_path": "torch.optim.Adam", "init_args": {"betas": [0.8, 0.9]}}',
    ): (
        "Adam",
        "0.01 is for SGD",
    ),
    ("--config", "adam_rate.yaml", "--model.optimizer", "SGD"): ("SGD", "0.3 is for Adam"),
    ("--config", "rate.yaml", "--model.optimizer", "Adam"): ("Adam", "0.4 is for AdamW"),
}
LEFT = {  # it is the optimizer's own, or the user's
    (): 1e-4,
    ("--model.weights", "null"): 1e-3,
    ("--model.members", "2"): 1e-3,
    HOTDOG: 0.01,
    ("--config", "adam_rate.yaml"): 0.3,
    (*HOTDOG, "--config", "adam_rate.yaml"): 0.3,
    ("--config", "adam.yaml", "--config", "rate.yaml"): 0.4,
    (*HOTDOG, "--model.optimizer.lr=0.02", "--model.optimizer", "Adam"): 0.02,
    (*HOTDOG, "--model.optimizer.init_args.lr", "0.02", "--model.optimizer", "LBFGS"): 0.02,
    (
        *HOTDOG,
        "--model.optimizer",
        '{"class_path": "torch.optim.Adam", "init_args": {"lr": 0.02}}',
    ): 0.02,
}


# run_lightning would silence it; here it is an error.
pytestmark = pytest.mark.filterwarnings("ignore:LightningCLI's args parameter")


def sweep_lines(lines: Iterable[tuple[str, ...]], num: int) -> list[Any]:
    """Mark all but the first lines as slow, since the parser takes its time."""
    first, others = list(lines)[:num], list(lines)[num:]
    return [*first, *(pytest.param(line, marks=pytest.mark.slow) for line in others)]


@pytest.mark.parametrize("arguments", sweep_lines(TAKEN, 2), ids=" ".join)
def test_another_optimizer_gets_its_own_rate_and_a_line(optimizer, arguments):
    name, reported = TAKEN[arguments]
    parsed, output = optimizer(*arguments)
    usual = {**USUAL, **USUAL_OF_FITTED_HEAD}  # but of hotdog.yaml, whose head is random
    rate = (USUAL if HOTDOG[1] in arguments else usual)[name]
    assert parsed.class_path == f"torch.optim.{name}" and parsed.init_args.lr == rate
    assert (
        f"learning rate {rate:g}, as is usual for {name}; {reported}; --model.optimizer.lr sets another"
        in output
    )
    assert len(output.splitlines()) == 1


@pytest.mark.parametrize("arguments", sweep_lines(LEFT, 5), ids=" ".join)
def test_a_rate_that_is_its_own_or_was_set_stays_and_nothing_is_reported(optimizer, arguments):
    parsed, output = optimizer(*arguments)
    assert parsed.init_args.lr == LEFT[arguments] and output == ""


def test_another_optimizer_takes_nothing_else_of_the_default_one(optimizer):
    sgd, _ = optimizer("--model.optimizer", "SGD", "--model.optimizer.momentum", "0.8")
    assert (sgd.init_args.momentum, sgd.init_args.nesterov, sgd.init_args.weight_decay) == (
        0.8,
        True,
        2e-3,
    )
    adam, _ = optimizer("--model.optimizer", "Adam")
    assert adam.init_args.weight_decay == 0  # where 0.05 would be added to the loss


@pytest.mark.parametrize(
    ("arguments", "values"),
    [
        (
            ("--model.optimizer", "SGD", "--model.optimizer.lr", "0.03"),
            {"momentum": 0.9, "weight_decay": 2e-3},
        ),
        (
            ("--model.optimizer", "SGD", "--model.optimizer.momentum", "0"),
            {"momentum": 0, "nesterov": False},
        ),
        (("--model.optimizer", "Adam", "--model.optimizer.lr", "0.001"), {"weight_decay": 0}),
        # its own default
        (("--model.optimizer", "Muon", "--model.optimizer.lr", "0.02"), {"weight_decay": 0.1}),
        (("--config", "adam_rate.yaml"), {"weight_decay": 0}),
        (("--config", "rate.yaml"), {"weight_decay": 0.05}),  # of the default optimizer
    ],
)
def test_a_rate_that_is_given_leaves_the_other_arguments_as_usual(optimizer, arguments, values):
    parsed, _ = optimizer(*arguments)
    assert {name: parsed.init_args[name] for name in values} == values


@pytest.mark.slow
def test_a_fit_from_a_fitted_head_clips_its_gradients(optimizer):
    def clip(*arguments: str) -> float | None:
        return ParseOnly(["fit", *arguments]).config["fit"].trainer.gradient_clip_val

    assert clip() == 1.0 and clip("--trainer.gradient_clip_val", "0") == 0
    assert clip("--model.weights", "null") is None and clip(*HOTDOG) is None
    assert clip("--model.freeze_batch_norm", "false") is None


def test_what_else_the_config_says_is_kept(optimizer):
    parsed, _ = optimizer(*HOTDOG, "--model.optimizer", "AdamW")
    assert parsed.init_args.weight_decay == 2e-3


@pytest.mark.parametrize("arguments", [["--config", "nested.yaml"], ["--model.optimizer", "LONG"]])
def test_files_within_files_and_long_texts_are_read(tmp_path, monkeypatch, arguments):
    monkeypatch.chdir(tmp_path)
    Path("nested.yaml").write_text("model: model.yaml\n")
    Path("model.yaml").write_text(
        "optimizer: {class_path: torch.optim.Adam, init_args: {lr: 0.5}}\n"
    )
    text = '{"class_path": "torch.optim.Adam", "init_args": {"lr": 0.5, "eps": 1.0%s}}' % (
        "0" * 300
    )
    given = read_explicit_settings(
        ["fit", *(text if word == "LONG" else word for word in arguments)]
    )
    rate_is_for = dependent_defaults._rate_is_for(given)
    assert rate_is_for == (
        "Adam" if arguments[0] == "--config" else dependent_defaults._COMMAND_LINE
    )
