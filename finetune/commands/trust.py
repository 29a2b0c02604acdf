"""What a checkpoint may choose: modules to import, the place of its data set, and groups.

It may import our data modules and the transforms of albumentations, and nothing else.

Importing a module runs its code. An untrusted checkpoint must not choose the module. The user can, by naming the module
on the command line.
"""

import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import finetune
from finetune.commands.explicit_settings import ExplicitSettings
from finetune.commands.options import flag_names
from finetune.data.corrected_samples import for_other_place
from finetune.data.data_place import address_in, at_place, place_of
from finetune.data.datamodule import ImageDataModule
from finetune.data.groups import is_pattern
from finetune.models.checkpoint_values import class_paths
from finetune.system.messages import shown
from finetune.training.checkpoint_settings import plain

_OURS = "finetune"
_TRANSFORMS = "albumentations"
_FOLDERS = "finetune.ImageFolderData"
_PLACES = ("root", "table", "init_args.root", "init_args.table")
_OF_THE_MACHINE = ("num_workers", "cache_limit_gb", "predict")


def data_settings(checkpoint: Mapping[str, Any], explicit: ExplicitSettings) -> dict[str, Any]:
    """Return class path and arguments of the data module of a checkpoint, after checking that they are safe to import.

    Args:
        checkpoint: As returned by `read_checkpoint`.
        explicit: The settings of the command line: a class that its flags name is trusted.

    Raises:
        ValueError: The checkpoint names another module, which is not trusted.
    """
    settings = plain(checkpoint["datamodule_hyper_parameters"], "datamodule_hyper_parameters")
    place = explicit.flags.get("data.table") or explicit.flags.get("data.root")
    settings = for_other_place(settings, place)
    for name in _OF_THE_MACHINE:  # a data class of the user may have saved these
        settings.pop(name, None)
    explicit_arguments = explicit.arguments_of("data")
    if "augmentations" in explicit_arguments:
        settings.pop("augmentations", None)
    named = explicit.flags.get("data.class_path")
    modules = [] if named is None else [_module(named)]
    class_path = checkpoint["finetune"].get("data_class")
    if _module(class_path) != _OURS:
        _check_is_trusted(class_path, modules)
        class_path = named  # the user's class may have another name now
    for transform in class_paths(settings):
        _check_is_trusted(transform, [_TRANSFORMS, *modules])
    return {
        "class_path": class_path,
        "init_args": at_place(settings, explicit_arguments),
    }


def check_groups(
    config: Any, checkpoint: Mapping[str, Any] | None, explicit: ExplicitSettings
) -> None:
    """Make sure that a regular expression that groups the images is the user's: a nested one can take for ever.

    Args:
        config: The options of the command, as parsed.
        checkpoint: As returned by `read_checkpoint`; None if none is used.
        explicit: The settings of the command line.

    Raises:
        ValueError: The checkpoint has chosen it.
    """
    arguments = config.data.init_args
    group_by = arguments.get("group_by")
    if checkpoint is None or arguments.get("predict") is not None or not is_pattern(group_by):
        return
    if "group_by" not in explicit.arguments_of("data"):
        raise ValueError(
            "the images of the checkpoint's run are grouped by a regular expression, and one of a checkpoint could "
            f"take for ever: if you trust it, pass it as --data.group_by {shown(shlex.quote(group_by))}"
        )


def check_root(
    command: str, config: Any, checkpoint: Mapping[str, Any] | None, explicit: ExplicitSettings
) -> None:
    """Make sure that the data set of a checkpoint exists: a checkpoint must not start a download.

    Args:
        command: The command.
        config: Its options, as parsed.
        checkpoint: As returned by `read_checkpoint`; None if none is used.
        explicit: The settings of the command line. A data class that its flags name may download.

    Raises:
        ValueError: The data set is not in its folder.
    """
    if checkpoint is None or config.data.init_args.get("predict") is not None:
        return
    module, _, name = config.data.class_path.rpartition(".")
    if module != _OURS or "data.class_path" in explicit.flags:
        return
    kind: type[ImageDataModule] = getattr(finetune, name)
    table = config.data.init_args.get("table")
    root = place_of(config.data.init_args) or kind.default_root
    is_named = not explicit.flags.keys().isdisjoint(("data.root", "data.table"))
    address = address_in(config.data.init_args)
    if address is not None and explicit.arguments_of("data").isdisjoint(_PLACES):
        with_table = f" with the table, {shown(table)}" if table else ""
        raise ValueError(
            f"the images of the checkpoint's run are at {shown(address)}, and a checkpoint may not choose an "
            f"address: if you trust it, pass it as {flag_names(command, 'data.root')}{with_table}"
        )
    if root is None or kind.is_in(root):
        return
    if not is_named and not Path(root).exists():
        place = "table or folder" if table else "folder"
        hint = f"pass the {place} where they are now: {flag_names(command, 'data.root')}"
        raise ValueError(f"the images of the checkpoint's run are no longer in {root}: {hint}")
    set_of = config.data.class_path
    raise ValueError(
        f"{root} does not have the data set of the checkpoint, {set_of}, and a checkpoint downloads none: add "
        f"--data {_FOLDERS} for a folder of class folders, or --data {set_of} to download it"
    )


def _check_is_trusted(class_path: Any, modules: Sequence[str]) -> None:
    """Check that a class is in one of these modules, or in a module below one.

    Raises:
        ValueError: It is in another module.
    """
    module = _module(class_path) or _TRANSFORMS  # the default in `build_transform`
    if not any(module == trusted or module.startswith(f"{trusted}.") for trusted in modules):
        hint = "--data CLASS, with your data class, allows its module"
        raise ValueError(
            f"the checkpoint would import {class_path}, which is not part of finetune: {hint}"
        )


def _module(class_path: Any) -> str:
    if not isinstance(class_path, str):
        raise ValueError(
            f"the checkpoint is not as `finetune fit` writes them: {class_path!r} is not a class path"
        )
    return class_path.rpartition(".")[0]
