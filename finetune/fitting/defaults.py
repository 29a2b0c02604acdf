"""Default settings of a fit that depend on its other settings.

- The learning rate and other arguments depend on the optimizer.
- Gradient clipping depends on how the head begins.
- The preparation of images depends on timm's weights.
- The number of stages whose features the head takes depends on whether the backbone is frozen.

Each rule returns the values that it sets, by full name, and a note for the user ("" for none).
"""

from pathlib import Path
from typing import Any

from finetune.data.transforms import preparation
from finetune.fitting.build import arguments_in_effect, takes
from finetune.fitting.resume import Start
from finetune.models.backbones import skeleton
from finetune.models.hub import is_hub, name_with_commit
from finetune.models.multi_stage import most_stages
from finetune.models.network_names import is_choice, is_timm
from finetune.models.timm_networks import backbone_of
from finetune.models.weights import describe_weights, folder_of
from finetune.settings.fields import ClassSettings, import_class, takes_argument
from finetune.settings.layers import Layers
from finetune.settings.schema import Data, FitSettings, ModelSettings
from finetune.system.messages import WrongUsage
from finetune.training.fitted_head import resolved_head_init

Rule = tuple[dict[str, Any], str]
NOTHING: Rule = ({}, "")

_OPTIMIZER = "model.optimizer"
# Usual learning rates by optimizer; others have no usual rate for fine-tuning. Adam and similar optimizers normalise
# the gradient, so that the rate is the size of a step. With SGD's rate their first steps would destroy pretrained
# weights.
USUAL = {
    "SGD": 3e-2,  # chosen by measurements (docs/decisions.md)
    "Adam": 1e-3,  # arXiv:1412.6980, algorithm 1; torch's default
    "AdamW": 1e-3,  # torch's default
    "Adamax": 2e-3,  # arXiv:1412.6980, section 7.1; torch's default
    "NAdam": 2e-3,  # torch's default
    "RAdam": 1e-3,  # torch's default
    # Hinton's, in lecture 6 of his course of 2012; torch's own, 1e-2, has no source
    "RMSprop": 1e-3,
}
# With a head that was fitted on the features, and fixed statistics of batch norm, less has to change, and more can be
# lost (docs/decisions.md).
USUAL_OF_FITTED_HEAD = {"AdamW": 1e-4, "Adam": 1e-4, "SGD": 3e-3}
# Other usual settings; for optimizers that are not named torch's defaults apply.
_USUAL_ARGUMENTS = {
    "AdamW": {"weight_decay": 0.05},
    "SGD": {"momentum": 0.9, "nesterov": True, "weight_decay": 2e-3},
}
CLIP_NORM = 1.0  # maximum norm of the gradient of all parameters
_DEFAULT = "AdamW"
# Stages whose features a solved head takes (docs/decisions.md).
_SOLVED_STAGES = 3


def settle_optimizer(settings: FitSettings, layers: Layers) -> Rule:
    """Set the usual learning rate of the optimizer, unless its rate was set for it, and its other usual arguments.

    Raises:
        WrongUsage: There is no such optimizer, it does not take an argument, or it has no usual rate and none is set.
    """
    explicit = layers.explicit_class(_OPTIMIZER)
    assert explicit.chosen is not None, "there is always an optimizer"
    class_path, given = explicit.chosen.class_path, explicit.chosen.init_args
    kind = import_class(class_path, _OPTIMIZER)
    name = kind.__name__
    arguments = {**_USUAL_ARGUMENTS.get(name, {}), **given}
    if name == "SGD" and not arguments["momentum"] and "nesterov" not in given:
        arguments["nesterov"] = False  # which needs momentum
    notes = [
        f"{key} {value} is for {is_for.rpartition('.')[2]}, not for {name}; --{_OPTIMIZER}.{key} sets it"
        for key, (value, is_for) in explicit.dropped.items()
        if key != "lr" and key not in given and takes_argument(kind, key)
    ]
    if "lr" not in given and takes_argument(kind, "lr"):
        usual = dict(USUAL)
        model = settings.model
        if resolved_head_init(model.head_init, model.weights) == "probe":
            usual |= USUAL_OF_FITTED_HEAD
        rate, is_for = explicit.dropped.get("lr", (USUAL_OF_FITTED_HEAD[_DEFAULT], _DEFAULT))
        before = f"{rate:g} is for {is_for.rpartition('.')[2]}"
        if name not in usual:
            raise WrongUsage(f"is needed: {before}, not for {name}", f"{_OPTIMIZER}.lr")
        arguments["lr"] = usual[name]
        if name != _DEFAULT or "lr" in explicit.dropped:
            usually = f"learning rate {usual[name]:g}, as is usual for {name}"
            notes.insert(0, f"{usually}; {before}; --lr sets another")
    return {_OPTIMIZER: ClassSettings(class_path, arguments)}, "; ".join(notes)


def settle_clipping(settings: FitSettings) -> Rule:
    """Clip gradients by default in a fit from a fitted head with fixed statistics of batch norm.

    Such a network does not normalise its activations by the batch, and a rare large gradient can ruin it
    (docs/decisions.md).
    """
    model = settings.model
    has_fitted_head = resolved_head_init(model.head_init, model.weights) == "probe"
    has_fixed_statistics = model.freeze_batch_norm is not False
    is_given = settings.trainer.gradient_clip_val is not None
    if is_given or not has_fitted_head or not has_fixed_statistics or model.freeze == "backbone":
        return NOTHING
    return {"trainer.gradient_clip_val": CLIP_NORM}, ""


def settle_hub_backbone(model: ModelSettings, layers: Layers) -> Rule:
    """Download weights from the hub, and set their network, unless the command names one.

    Raises:
        WrongUsage: timm has no such network.
    """
    if not is_hub(model.weights) or is_choice(model.backbone):
        return NOTHING
    folder = folder_of(model.weights)
    assert folder is not None and model.weights is not None, "an address on the hub has a folder"
    backbone = model.backbone if layers.layer_of("model.backbone") else backbone_of(folder)
    note = f"weights: {name_with_commit(model.weights, Path(folder))}, {backbone}"
    return {"model.backbone": backbone}, note


def settle_preparation(
    data: Data, model: ModelSettings, layers: Layers, start: Start | None = None
) -> Rule:
    """Set the preparation of images with which timm's weights were trained.

    What the user sets takes precedence. A resumed run prepares images as before, since the folder of the weights may
    have changed or disappeared.

    Raises:
        ValueError: The weights require a preparation that is not supported.
    """
    if not is_timm(model.backbone):
        return NOTHING
    name_of, recommended = _recommended(model, start)
    current = arguments_in_effect(data)
    defined = {}
    differences = []
    for name, value in recommended.items():
        if not takes(data, name):
            differences.append(f"without {name} (its class does not take it)")
        elif layers.layer_of(f"data.{name}") is None:
            defined[name] = value
        elif current[name] != value:
            differences.append(f"{name} {current[name]} (not {value})")
    if not defined and not differences:
        return NOTHING
    note = f"images are prepared as defined by {name_of}"
    if differences:
        note += f", but {', '.join(differences)}"
    if defined:
        note += ": " + ", ".join(f"{name} {value}" for name, value in defined.items())
    return {f"data.{name}": value for name, value in defined.items()}, note


def _recommended(model: ModelSettings, start: Start | None) -> tuple[str, dict[str, Any]]:
    """Return the source of the recommended preparation, and its values for `PREPARATION`."""
    if start is not None and start.content["hyper_parameters"].get("backbone") == model.backbone:
        return str(start.path), preparation(start.content["datamodule_hyper_parameters"])
    about = describe_weights(model.weights, model.backbone)
    source = model.weights if is_hub(model.weights) else about.name
    return str(source), about.preparation


def settle_head_stages(model: ModelSettings, layers: Layers) -> Rule:
    """Set the number of stages for a fit that solves the head; the note says if only the last one counts."""
    if model.freeze != "backbone" or layers.layer_of("model.head_stages") is not None:
        return NOTHING
    most = most_stages(skeleton(model.backbone))
    note = (
        "the head takes the features of the last stage only: those of earlier stages are not supported for "
        + model.backbone
    )
    return {"model.head_stages": min(_SOLVED_STAGES, most)}, "" if most > 1 else note
