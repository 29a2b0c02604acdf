"""validate, test and predict: measure a checkpoint, or classify images with it, by the settings that it has.

A checkpoint may choose our data modules and the transforms of albumentations, and nothing else: importing a module runs
its code, and a checkpoint may be untrusted. The user may choose a module, by naming the data class on the command line.
"""

import logging
import os
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pytorch_lightning import Trainer, seed_everything
from pytorch_lightning.callbacks import Callback

from finetune.data.data_place import address_in, at_place, for_other_place, place_of
from finetune.data.datamodule import ImageDataModule, open_data
from finetune.data.datasets.image_folder import ImageFolderData
from finetune.data.drawn_splits import BY_FOLDER
from finetune.data.seen import exclude_seen
from finetune.data.transforms import preparation
from finetune.fitting.build import (
    arguments_in_effect,
    build_trainer,
    closing,
    local_root,
    stopped_at_once,
    takes,
)
from finetune.fitting.resume import check_trusted
from finetune.inference.onnx_network import put_exported
from finetune.inference.tta import AverageFlip
from finetune.runs.checkpoint_io import read_checkpoint
from finetune.runs.folder import Run
from finetune.runs.local_copies import shown_place
from finetune.settings.all_commands import COMMANDS
from finetune.settings.configs import config_text
from finetune.settings.fields import ClassSettings, find_setting, import_class
from finetune.settings.layers import Layer, Layers, replaced
from finetune.settings.schema import (
    DATA_CLASSES,
    IMAGE_FOLDER,
    EvaluateSettings,
    PredictSettings,
    SetSettings,
)
from finetune.system.messages import WrongUsage, shown
from finetune.training.classifier import Classifier
from finetune.training.first_pass import check_fit
from finetune.training.precision import automatic_precision
from finetune.training.prediction_files import PredictionWriter, group_file
from finetune.training.prediction_rows import Rows

log = logging.getLogger(__name__)

_OF_THE_MACHINE = ("num_workers", "cache_limit_gb", "predict")
_EVALUATED = {"validate": "val", "test": "test"}  # the split that a command evaluates


def run_evaluation(layers: Layers, *_: Any) -> None:
    """Run validate, test or predict. Lightning starts the processes of other devices with the same command line."""
    with stopped_at_once():
        evaluate(layers)


def evaluate(layers: Layers) -> Run:
    """Run validate, test or predict, and return its run.

    Raises:
        ValueError: The checkpoint or the images cannot be used, or settings contradict the checkpoint.
    """
    command = layers.command
    path = layers.value("ckpt_path")
    checkpoint = read_checkpoint(path)
    layers = layers.below_configs(
        Layer(str(path), "checkpoint", _data_settings(checkpoint, layers))
    )
    settings = layers.parse(COMMANDS[command].settings)
    assert isinstance(settings, EvaluateSettings), "of a command that evaluates"
    _check_images(command, settings, layers)
    settings = _with_checkpoint(settings, checkpoint, layers)
    root = local_root(settings.trainer.default_root_dir, command)
    precision = settings.trainer.precision or automatic_precision(
        settings.trainer.accelerator, checkpoint, False
    )
    values = {"trainer.default_root_dir": root, "trainer.precision": precision}
    settings = replaced(settings, values)
    seed_everything(settings.seed_everything, workers=True, verbose=False)
    data = open_data(settings.data)
    model = Classifier(**checkpoint["hyper_parameters"], compile=settings.model.compile)
    put_exported(model.image_classifier, checkpoint)
    if isinstance(settings, SetSettings):
        model.coverage = settings.coverage
    if isinstance(settings, PredictSettings):
        model.abstain_below = settings.abstain_below or 0.0
        model.none_below = settings.none_below or 0.0
    model.on_load_checkpoint(checkpoint)
    rule = model.rule  # so that an error comes before the work
    data.read()
    run = Run(root, command)
    callbacks: list[Callback] = [AverageFlip()] if settings.tta else []
    if isinstance(settings, PredictSettings):
        # the prediction for a single image is printed
        samples = data.splits["predict"]
        run.leaves_folder = len(samples) > 1 and settings.output is None
        _check_inputs_stay(settings, data)
        rows = Rows(rule, top_k=settings.top_k, has_groups=samples.groups is not None)
        callbacks.append(PredictionWriter(run, rows, settings.output))
    config = config_text(replaced(settings, {"trainer.default_root_dir": shown_place(root)}))
    trainer = build_trainer(settings.trainer, run, config, callbacks)
    with closing(trainer, run):
        check_fit(trainer, model, data, command)
        _leave_out_seen(command, data, checkpoint, trainer)
        how = {"return_predictions": False} if command == "predict" else {"verbose": False}
        getattr(trainer, command)(model, datamodule=data, ckpt_path=path, **how)
    return run


def _check_inputs_stay(settings: PredictSettings, data: ImageDataModule) -> None:
    """Refuse to replace a table that is predicted by the predictions for images or for groups."""
    if not settings.output or not isinstance(data, ImageFolderData):
        return
    target = Path(settings.output)
    named = [data.predict] if isinstance(data.predict, str) else data.predict or []
    inputs = {os.path.realpath(os.path.expanduser(place)) for place in named}
    has_groups = data.splits["predict"].groups is not None
    for path in (target, group_file(target)) if has_groups else (target,):
        if os.path.realpath(path) in inputs:
            raise WrongUsage(
                f"--out {target} would replace {path}, which is predicted: name another file"
            )


def _leave_out_seen(
    command: str, data: ImageDataModule, checkpoint: Mapping[str, Any], trainer: Trainer
) -> None:
    """Leave out images that the checkpoint was trained on, and say which corrections hold."""
    if command not in _EVALUATED:
        return
    exclude_seen(data, _EVALUATED[command], checkpoint, trainer.is_global_zero)
    corrections = data.scanned.corrections
    if corrections is not None and trainer.is_global_zero:
        log.info("%s", corrections.line())


def _with_checkpoint(
    settings: EvaluateSettings, checkpoint: Mapping[str, Any], layers: Layers
) -> EvaluateSettings:
    """Return settings with the network and the preparation of images that the checkpoint has.

    Raises:
        WrongUsage: A flag, not a config, contradicts the checkpoint.
    """
    of_model = checkpoint["hyper_parameters"]
    of_data = checkpoint["datamodule_hyper_parameters"]
    decided = {f"model.{name}": value for name, value in of_model.items()}
    decided |= {f"data.{name}": value for name, value in preparation(of_data).items()}
    decided["data.class_names"] = of_model["class_names"]
    # a table need not show which kind its labels are
    decided["data.labels"] = of_model.get("label_kind", "single")
    decided = {
        name: value
        for name, value in decided.items()
        if not name.startswith("data.") or takes(settings.data, name.removeprefix("data."))
    }
    for name, value in decided.items():
        typed = layers.typed.get(name, value)
        if typed != value:
            raise WrongUsage(f"{typed}: the checkpoint decides that it is {value}; omit it", name)
    known = {name: value for name, value in decided.items() if find_setting(layers.kind, name)}
    return replaced(settings, known)


def _data_settings(checkpoint: Mapping[str, Any], layers: Layers) -> dict[str, Any]:
    """Return the settings of the data module of a checkpoint, after checking that they are safe to import.

    Args:
        checkpoint: As returned by `read_checkpoint`.
        layers: Who has set what: a class that the command line names is trusted.

    Raises:
        ValueError: The checkpoint names another module, which is not trusted.
    """
    typed = layers.typed
    settings = checkpoint["datamodule_hyper_parameters"]
    settings = for_other_place(settings, typed.get("data.table") or typed.get("data.root"))
    # Images to predict lie otherwise than those of the run, so the user says how they are grouped.
    unused = (*_OF_THE_MACHINE, "group_by") if layers.command == "predict" else _OF_THE_MACHINE
    for name in unused:  # a data class of the user may have saved those of the machine
        settings.pop(name, None)
    if layers.is_explicit("data.augmentations"):
        settings.pop("augmentations", None)
    class_path = checkpoint["finetune"].get("data_class")
    named = {"data.class_path": class_path, "data.augmentations": settings.get("augmentations")}
    check_trusted(layers.value("ckpt_path"), named, layers)
    if class_path not in DATA_CLASSES:
        by_user = layers.layer_of("data.class_path")  # which may have another name now
        if by_user is None:
            raise ValueError("the checkpoint has no data class: pass --data with your own")
        class_path = by_user.values["data.class_path"]
    explicit = [name for name in ("root", "table") if layers.is_explicit(f"data.{name}")]
    arguments = at_place(settings, explicit)
    if class_path not in DATA_CLASSES:  # it may take fewer than ours, of which it is one
        of_user = ClassSettings(class_path)
        arguments = {name: value for name, value in arguments.items() if takes(of_user, name)}
    return {
        f"data.{name}": value for name, value in {"class_path": class_path, **arguments}.items()
    }


def _check_images(command: str, settings: EvaluateSettings, layers: Layers) -> None:
    """Make sure that the images are chosen by the user, or are those of the checkpoint and exist.

    A checkpoint must not start a download. A regular expression that groups the images must be the user's: a nested one
    can take for ever.

    Raises:
        WrongUsage: Images to classify are passed to another command than predict.
        ValueError: The data set is not in its folder, or the checkpoint has chosen an address or a regular expression.
    """
    arguments = arguments_in_effect(settings.data)
    if command == "predict":
        if arguments.get("predict") is None:
            raise WrongUsage("finetune predict needs images: finetune predict CKPT IMAGES")
        return
    group_by = arguments.get("group_by")
    if group_by not in (None, BY_FOLDER) and not layers.is_explicit("data.group_by"):
        raise ValueError(
            "the images of the checkpoint's run are grouped by a regular expression, and one of a checkpoint could "
            f"take for ever: if you trust it, pass it as --data.group_by {shown(shlex.quote(str(group_by)))}"
        )
    if settings.data.class_path in DATA_CLASSES and "data.class_path" not in layers.typed:
        _check_place(settings.data.class_path, arguments, layers)


def _check_place(class_path: str, arguments: Mapping[str, Any], layers: Layers) -> None:
    """Make sure that the data set of a checkpoint exists; see `_check_images`.

    Args:
        class_path: Its class, which is ours and which the user has not named: another one may download.
        arguments: Its arguments.
        layers: Who has set what.
    """
    kind: type[ImageDataModule] = import_class(class_path, "data.class_path")
    root = place_of(arguments) or kind.default_root
    address = address_in(arguments)
    is_chosen = any(map(layers.is_explicit, ("data.root", "data.table")))
    if address is not None and not is_chosen:
        raise ValueError(
            f"the images of the checkpoint's run are at {shown(address)}, and a checkpoint may not choose an address: "
            "if you trust it, pass it as FOLDER (--data.root), and a table as --data.table"
        )
    if root is None or kind.is_in(root):
        return
    if not is_chosen and not Path(root).exists():
        raise ValueError(
            f"the images of the checkpoint's run are no longer in {root}: pass the folder or table where they are now: "
            "FOLDER (--data.root)"
        )
    raise ValueError(
        f"{root} does not have the data set of the checkpoint, {class_path}, and a checkpoint downloads none: add "
        f"--data {IMAGE_FOLDER} for a folder of class folders, or --data {class_path} to download it"
    )
