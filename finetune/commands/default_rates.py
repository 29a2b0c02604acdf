"""The learning rate where a command line names another optimizer than its config: the config's rate is not for it."""

from collections.abc import Iterator, Sequence
from typing import Any

import yaml

from finetune.commands.parser import settings_in
from finetune.system.messages import WrongUsage

_COMMAND_LINE = "the command line"

# Rates to start from. Those of Adam and its kin are steps in the weights themselves, not multiples of a gradient: at
# SGD's rate the first steps throw a pretrained network away. Of others none is usual for fine-tuning.
USUAL = {
    "SGD": 3e-2,  # our default, chosen by measurements (docs/benchmarks.md)
    "Adam": 1e-3,  # arXiv:1412.6980, algorithm 1; torch's default
    "AdamW": 1e-4,  # the scale of what large networks are fine-tuned at: 5e-5 in ConvNeXt (arXiv:2201.03545, A.2)
    "Adamax": 2e-3,  # arXiv:1412.6980, section 7.1; torch's default
    "NAdam": 2e-3,  # torch's default
    "RAdam": 1e-3,  # torch's default
    "RMSprop": 1e-3,  # Hinton's, in lecture 6 of his course of 2012; torch's own, 1e-2, has no source
}


def settle_rate(config: Any, arguments: Sequence[str]) -> str:
    """Give a fit's optimizer its usual rate if the one that it was left with is another's; return what to tell of it.

    Args:
        config: As parsed, with the subcommand; changed in place.
        arguments: The command line, configs before flags, their paths resolved.

    Raises:
        WrongUsage: No rate is usual for it, and none is given.
    """
    if config.subcommand != "fit":
        return ""
    optimizer = config["fit"].model.optimizer
    name = optimizer.class_path.rpartition(".")[2]
    rate_is_for = _rate_is_for(arguments)
    if rate_is_for in (name, _COMMAND_LINE) or "lr" not in optimizer.init_args:
        return ""
    flag, left = "--model.optimizer.lr", optimizer.init_args.lr
    if name not in USUAL:
        raise WrongUsage(f"the learning rate {left:g} is for {rate_is_for}, not for {name}: give {flag}")
    optimizer.init_args.lr = USUAL[name]
    return f"learning rate {USUAL[name]:g}, as is usual for {name}; {left:g} is for {rate_is_for}; {flag} sets another"


def _rate_is_for(arguments: Sequence[str]) -> str:
    """Return the name of the optimizer that the last rate was given with, or `_COMMAND_LINE`."""
    name = rate_is_for = "SGD"  # the default
    for is_flag, said in _said(arguments):
        name = str(said.get("class_path", name)).rpartition(".")[2]
        if "lr" in {**said, **(said.get("init_args") or {})}:
            rate_is_for = _COMMAND_LINE if is_flag else name
    return rate_is_for


def _said(arguments: Sequence[str]) -> Iterator[tuple[bool, dict[str, Any]]]:
    """Yield what configs and flags say of the optimizer, in their order, and whether it is a flag that does."""
    for argument, following in zip(arguments, [*arguments[1:], ""], strict=True):
        flag, has_value, value = argument.partition("=")
        value = value if has_value else following
        if flag == "--config":
            model = settings_in(value).get("model") or {}
            said: Any = (settings_in(model) if isinstance(model, str) else model).get("optimizer")
        elif flag == "--model":
            said = settings_in(value).get("optimizer")
        elif flag == "--model.optimizer":
            said = settings_in(value) or value
        elif flag in ("--model.optimizer.class_path", "--model.optimizer.init_args"):
            said = {flag.rpartition(".")[2]: yaml.safe_load(value)}
        elif flag in ("--model.optimizer.lr", "--model.optimizer.init_args.lr"):
            said = {"lr": value}
        else:
            continue
        if said:
            yield flag != "--config", {"class_path": said} if isinstance(said, str) else said
