"""Default settings of a fit that depend on its other settings.

- The learning rate depends on the optimizer.
- Gradient clipping depends on how the head begins.
- The preparation of images depends on timm's weights.
- The number of stages whose features the head takes depends on whether the backbone is frozen.
"""

import inspect
from importlib import import_module
from pathlib import Path
from typing import Any

from finetune.commands.explicit_settings import ExplicitSettings
from finetune.data.transforms import PREPARATION
from finetune.models.backbones import skeleton
from finetune.models.candidates import is_choice
from finetune.models.heads import SOLVED_STAGES, resolved_head_init
from finetune.models.hub import is_hub, name_with_commit
from finetune.models.multi_stage import most_stages
from finetune.models.timm_backbones import backbone_of, describe, folder_of, is_timm
from finetune.runs.resume import Start
from finetune.system.messages import WrongUsage

_COMMAND_LINE = "the command line"
_OPTIMIZER = "model.optimizer"

# Usual learning rates by optimizer; others have no usual rate for fine-tuning. Adam and similar optimizers normalise
# the gradient, so that the rate is the size of a step. With SGD's rate their first steps would destroy pretrained
# weights.
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
        raise WrongUsage(f"the learning rate {before}, not for {name}: pass {flag}")
    optimizer.init_args.lr = usual[name]
    if rate_is_for is None and name == _DEFAULT:
        return ""
    return f"learning rate {usual[name]:g}, as is usual for {name}; {before}; {flag} sets another"


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


def _settle_other_arguments(optimizer: Any, name: str, explicit: ExplicitSettings) -> None:
    """Set the usual values of an optimizer's arguments, except its rate and those that configs and flags give."""
    module, _, class_name = optimizer.class_path.rpartition(".")
    parameters = inspect.signature(getattr(import_module(module), class_name)).parameters
    explicit_names = _explicit_arguments(explicit)
    common = optimizer.init_args.as_dict().keys() & parameters.keys()
    for argument in common - explicit_names - {"lr"}:
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


def settle_hub_backbone(model: Any, explicit: ExplicitSettings) -> str:
    """Download weights from the hub and set their network, unless the command names one; return a message.

    Args:
        model: The settings of the model, as parsed; changed in place.
        explicit: The settings that configs and flags give.

    Raises:
        WrongUsage: timm has no such network.
    """
    if not is_hub(model.weights) or is_choice(model.backbone):
        return ""
    folder = folder_of(model.weights)
    assert folder is not None, "an address on the hub has a folder"
    if "backbone" not in explicit.arguments_of("model"):
        model.backbone = backbone_of(folder)
    return f"weights: {name_with_commit(model.weights, Path(folder))}, {model.backbone}"


def settle_preparation(config: Any, explicit: ExplicitSettings, start: Start | None = None) -> str:
    """Set the preparation of images with which timm's weights were trained; return a message about it.

    Flags and configs take precedence. A resumed run prepares images as before, since the folder of the weights may have
    changed or disappeared.

    Args:
        config: As parsed, with the subcommand; changed in place.
        explicit: The settings that configs and flags give.
        start: The checkpoint from which training starts; None for none.

    Raises:
        ValueError: The weights require a preparation that is not supported.
    """
    if config.subcommand != "fit" or not is_timm(config["fit"].model.backbone):
        return ""
    data = config["fit"].data.init_args
    name_of, values = _recommended(config["fit"].model, start)
    explicit_names = explicit.arguments_of("data")
    settings = []
    for name, value in values.items():
        if name not in data:
            settings.append(f"not {name}, which its class does not take")
            continue
        if name in explicit_names:
            if data[name] != value:
                settings.append(f"{name} {data[name]}, not {value}")
            continue
        data[name] = value
        settings.append(f"{name} {value}")
    return f"images are prepared as defined by {name_of}: {', '.join(settings)}" if settings else ""


def _recommended(model: Any, start: Start | None) -> tuple[str, dict[str, Any]]:
    """Return the source of the recommended preparation, and its values for `PREPARATION`."""
    if start is not None and start.content["hyper_parameters"].get("backbone") == model.backbone:
        before = start.content["datamodule_hyper_parameters"]
        return str(start.path), {name: before[name] for name in PREPARATION if name in before}
    about = describe(model.backbone, folder_of(model.weights))
    source = model.weights if is_hub(model.weights) else about.name
    return source, {name: getattr(about, name) for name in PREPARATION}


def settle_head_stages(model: Any, explicit: ExplicitSettings) -> str:
    """Set the number of stages for a fit that solves the head, and return a message if only the last one counts.

    Args:
        model: The settings of the model, as parsed; changed in place.
        explicit: The settings that configs and flags give.
    """
    if model.freeze != "backbone" or "head_stages" in explicit.arguments_of("model"):
        return ""
    most = most_stages(skeleton(model.backbone))
    model.head_stages = min(SOLVED_STAGES, most)
    if most > 1:
        return ""
    return (
        "the head takes the features of the last stage only: those of earlier stages are not supported for "
        + model.backbone
    )
