"""The settings of an optimizer that nobody gave: they depend on the optimizer, and on how the head starts."""

import inspect
from collections.abc import Iterator, Sequence
from importlib import import_module
from typing import Any

import yaml

from finetune.commands.parser import settings_in
from finetune.models.heads import resolved_head_init
from finetune.system.messages import WrongUsage

_COMMAND_LINE = "the command line"

# Rates to start from. Those of Adam and its kin are steps in the weights themselves, not multiples of a gradient: at
# SGD's rate the first steps throw a pretrained network away. Of others none is usual for fine-tuning.
USUAL = {
    "SGD": 3e-2,  # chosen by measurements (docs/benchmarks.md)
    "Adam": 1e-3,  # arXiv:1412.6980, algorithm 1; torch's default
    "AdamW": 1e-3,  # torch's default
    "Adamax": 2e-3,  # arXiv:1412.6980, section 7.1; torch's default
    "NAdam": 2e-3,  # torch's default
    "RAdam": 1e-3,  # torch's default
    # Hinton's, in lecture 6 of his course of 2012; torch's own, 1e-2, has no source
    "RMSprop": 1e-3,
}
# Where the head starts as one that was fitted on the features and batch norm keeps its statistics, less has to change,
# and more can be lost (docs/benchmarks.md).
USUAL_OF_FITTED_HEAD = {"AdamW": 1e-4, "Adam": 1e-4, "SGD": 3e-3}
# What else is usual for SGD; other optimizers have their own defaults.
_SGD = {"momentum": 0.9, "nesterov": True, "weight_decay": 2e-3}
CLIP_NORM = 1.0  # of the gradient of all parameters together
_DEFAULT = "AdamW"  # of `Classifier`


def settle_rate(config: Any, arguments: Sequence[str]) -> str:
    """Give a fit's optimizer its usual rate if its rate is meant for another case; return the message.

    Its other arguments get their usual values if nobody gave them: the parser leaves those of the default optimizer.

    Args:
        config: As parsed, with the subcommand; changed in place.
        arguments: The command line, configs before flags, their paths resolved.

    Raises:
        WrongUsage: No rate is usual for it, and none is given.
    """
    if config.subcommand != "fit":
        return ""
    model = config["fit"].model
    optimizer = model.optimizer
    name = optimizer.class_path.rpartition(".")[2]
    if name != _DEFAULT:
        _settle_other_arguments(optimizer, name, arguments)
    rate_is_for = _rate_is_for(arguments)
    if rate_is_for in (name, _COMMAND_LINE) or "lr" not in optimizer.init_args:
        return ""
    flag = "--model.optimizer.lr"
    before = f"{optimizer.init_args.lr:g} is for {rate_is_for or _DEFAULT}"
    usual = dict(USUAL)
    if resolved_head_init(model.head_init, model.weights, model.members) == "probe":
        usual |= USUAL_OF_FITTED_HEAD
    if name not in usual:
        raise WrongUsage(f"the learning rate {before}, not for {name}: give {flag}")
    optimizer.init_args.lr = usual[name]
    if rate_is_for is None and name == _DEFAULT:
        return ""
    return f"learning rate {usual[name]:g}, as is usual for {name}; {before}; {flag} sets another"


def _settle_other_arguments(optimizer: Any, name: str, arguments: Sequence[str]) -> None:
    """Give all arguments of an optimizer but its rate their usual values, except those that configs and flags give."""
    module, _, class_name = optimizer.class_path.rpartition(".")
    parameters = inspect.signature(getattr(import_module(module), class_name)).parameters
    given = _arguments_said(arguments)
    for argument in optimizer.init_args.as_dict().keys() & parameters.keys() - given - {"lr"}:
        value = _SGD.get(argument) if name == "SGD" else None
        optimizer.init_args[argument] = parameters[argument].default if value is None else value
    if name == "SGD" and not optimizer.init_args.momentum and "nesterov" not in given:
        optimizer.init_args.nesterov = False  # which needs momentum


def _arguments_said(arguments: Sequence[str]) -> set[str]:
    """Return the names of the optimizer's arguments that configs and flags give."""
    return {
        name for _, said in _said(arguments) for name in {**said, **(said.get("init_args") or {})}
    }


def settle_clipping(options: Any) -> None:
    """Let a fit from a fitted head, whose batch norm keeps its statistics, clip its gradients where nobody said.

    Such a network no longer normalises what it makes of an image, and a rare large gradient can ruin it
    (docs/benchmarks.md).

    Args:
        options: Those of `fit`, as parsed; changed in place.
    """
    model = options.model
    has_fitted_head = resolved_head_init(model.head_init, model.weights, model.members) == "probe"
    has_fixed_statistics = model.freeze_batch_norm is not False
    trains = model.freeze != "backbone"
    if (
        has_fitted_head
        and has_fixed_statistics
        and trains
        and options.trainer.gradient_clip_val is None
    ):
        options.trainer.gradient_clip_val = CLIP_NORM


def _rate_is_for(arguments: Sequence[str]) -> str | None:
    """Return the name of the optimizer that the last rate was given with, `_COMMAND_LINE`, or None for no rate."""
    name, rate_is_for = _DEFAULT, None
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
        elif flag.startswith("--model.optimizer."):
            said = {flag.rpartition(".")[2]: value}
        else:
            continue
        if said:
            yield flag != "--config", {"class_path": said} if isinstance(said, str) else said
