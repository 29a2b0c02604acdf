"""Default settings of an optimizer, which depend on the optimizer and on the initialisation of the head."""

import inspect
from importlib import import_module
from typing import Any

from finetune.commands.explicit_settings import ExplicitSettings
from finetune.models.heads import resolved_head_init
from finetune.system.messages import WrongUsage

_COMMAND_LINE = "the command line"
_OPTIMIZER = "model.optimizer"

# Usual learning rates. Adam and similar optimizers normalise the gradient, so that the rate is the size of a step: with
# SGD's rate the first steps would destroy pretrained weights. Other optimizers have no usual rate for fine-tuning.
USUAL = {
    "SGD": 3e-2,  # chosen by measurements (benchmarks/NOTEBOOK.md)
    "Adam": 1e-3,  # arXiv:1412.6980, algorithm 1; torch's default
    "AdamW": 1e-3,  # torch's default
    "Adamax": 2e-3,  # arXiv:1412.6980, section 7.1; torch's default
    "NAdam": 2e-3,  # torch's default
    "RAdam": 1e-3,  # torch's default
    # Hinton's, in lecture 6 of his course of 2012; torch's own, 1e-2, has no source
    "RMSprop": 1e-3,
}
# With a head that was fitted on the features, and fixed statistics of batch norm, less has to change, and more can be
# lost (benchmarks/NOTEBOOK.md).
USUAL_OF_FITTED_HEAD = {"AdamW": 1e-4, "Adam": 1e-4, "SGD": 3e-3}
# Other usual settings of SGD; for other optimizers torch's defaults apply.
_SGD = {"momentum": 0.9, "nesterov": True, "weight_decay": 2e-3}
CLIP_NORM = 1.0  # maximum norm of the gradient of all parameters
_DEFAULT = "AdamW"  # of `Classifier`


def settle_rate(config: Any, explicit: ExplicitSettings) -> str:
    """Set the usual learning rate of a fit's optimizer if its rate is for another optimizer; return a message.

    Its other arguments get their usual values if they are not set: the parser leaves those of the default optimizer.

    Args:
        config: As parsed, with the subcommand; changed in place.
        explicit: The settings that configs and flags give.

    Raises:
        WrongUsage: The optimizer has no usual rate, and none is set.
    """
    if config.subcommand != "fit":
        return ""
    model = config["fit"].model
    optimizer = model.optimizer
    name = optimizer.class_path.rpartition(".")[2]
    if name != _DEFAULT:
        _settle_other_arguments(optimizer, name, explicit)
    rate_is_for = _rate_is_for(explicit)
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


def _settle_other_arguments(optimizer: Any, name: str, explicit: ExplicitSettings) -> None:
    """Set the usual values of an optimizer's arguments, except its rate and those that configs and flags give."""
    module, _, class_name = optimizer.class_path.rpartition(".")
    parameters = inspect.signature(getattr(import_module(module), class_name)).parameters
    explicit_names = _explicit_arguments(explicit)
    for argument in optimizer.init_args.as_dict().keys() & parameters.keys() - explicit_names - {
        "lr"
    }:
        value = _SGD.get(argument) if name == "SGD" else None
        optimizer.init_args[argument] = parameters[argument].default if value is None else value
    if name == "SGD" and not optimizer.init_args.momentum and "nesterov" not in explicit_names:
        optimizer.init_args.nesterov = False  # which needs momentum


def _explicit_arguments(explicit: ExplicitSettings) -> set[str]:
    """Return the names of the optimizer's arguments that configs and flags give."""
    prefix = f"{_OPTIMIZER}."
    sources = [explicit.flags, *(config.settings for config in explicit.configs)]
    names = (name for settings in sources for name in settings)
    return {name.removeprefix(prefix) for name in names if name.startswith(prefix)}


def settle_clipping(options: Any) -> None:
    """Clip gradients by default in a fit from a fitted head with fixed statistics of batch norm.

    Such a network does not normalise its activations by the batch, and a rare large gradient can ruin it
    (benchmarks/NOTEBOOK.md).

    Args:
        options: The options of `fit`, as parsed; changed in place.
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


def _rate_is_for(explicit: ExplicitSettings) -> str | None:
    """Return the optimizer that the last explicit rate is for; `_COMMAND_LINE` for a flag, None for no rate."""
    if f"{_OPTIMIZER}.lr" in explicit.flags:
        return _COMMAND_LINE
    name = _DEFAULT
    rate_is_for = None
    for config in explicit.configs:
        name = str(config.settings.get(f"{_OPTIMIZER}.class_path", name)).rpartition(".")[2]
        if f"{_OPTIMIZER}.lr" in config.settings:
            rate_is_for = name
    return rate_is_for
