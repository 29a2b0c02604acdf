"""The images on which an int8 file is calibrated and measured: those of the checkpoint's run."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import finetune
from finetune.commands.explicit_settings import ExplicitSettings
from finetune.commands.trust import data_settings
from finetune.data.addresses import is_address
from finetune.data.data_place import address_in, at_place, place_of
from finetune.data.datamodule import ImageDataModule
from finetune.data.seen import exclude_copies, exclude_seen_of_same_folder
from finetune.data.tables.table_file import is_table
from finetune.system.messages import WrongUsage, as_wrong_usage


def int8_data(
    checkpoint: dict[str, Any], root: str | None, class_names: list[str]
) -> ImageDataModule:
    """Return the data module with the images that a checkpoint was trained and tested on.

    Args:
        checkpoint: The checkpoint.
        root: The folder or the table; None for that of the checkpoint's run.
        class_names: The classes of the checkpoint.

    Raises:
        WrongUsage: The images are not there, or not those of the checkpoint.
    """
    kind = _data_class(checkpoint)
    arguments = _arguments(checkpoint, root)
    place = address_in(arguments) or place_of(arguments) or kind.default_root
    _check_is_there(place, root)
    if not kind.is_in(place):
        raise WrongUsage(
            f"{place} does not have the data set of the checkpoint, {kind.__name__}: pass its folder as --root FOLDER"
        )
    with as_wrong_usage("--quantize int8"):
        data: ImageDataModule = kind(**{**arguments, "class_names": class_names, "num_workers": 0})
        data.read()
    if data.class_names != class_names:
        raise WrongUsage(
            f"{place} has other classes than the checkpoint: pass the data set that it was trained on as --root FOLDER"
        )
    for split, word in (("train", "training"), ("test", "test")):
        if split not in data.splits:
            raise WrongUsage(f"--quantize int8 needs {word} images, and {place} has none")
    if not exclude_seen_of_same_folder(data, "test", checkpoint):
        exclude_copies(data, "test", checkpoint)
    return data


def _data_class(checkpoint: Mapping[str, Any]) -> Any:
    """Return the class of the data module that a checkpoint names, if it is one of ours."""
    class_path = str(finetune.public_paths(checkpoint["finetune"].get("data_class")))
    package, _, name = class_path.rpartition(".")
    if package != "finetune":
        raise WrongUsage(
            f"--quantize int8 supports the data modules of finetune only, and the checkpoint is of a {class_path}"
        )
    return getattr(finetune, name)


def _arguments(checkpoint: Mapping[str, Any], root: str | None) -> dict[str, Any]:
    """Return the arguments of the checkpoint's data module, for the images at `root`."""
    # The transforms of training are not needed. They may be of a module that only the user can trust.
    saved = checkpoint["datamodule_hyper_parameters"]
    trusted = {name: value for name, value in saved.items() if name != "augmentations"}
    settings = data_settings(
        {**checkpoint, "datamodule_hyper_parameters": trusted}, ExplicitSettings()
    )
    if root is None:
        return settings["init_args"]
    explicit = {"table" if is_table(root) else "root": root}
    return {**at_place(settings["init_args"], explicit), **explicit}


def _check_is_there(place: str | None, root: str | None) -> None:
    """Check that images may be read at a place: an address only if the user has passed it as `root`."""
    is_there = place is not None and (place == root if is_address(place) else Path(place).exists())
    if place and is_there:
        return
    start = "there is no folder" if root else "the images of the checkpoint's run are not in"
    raise WrongUsage(
        f"{start} {place}: --quantize int8 needs the data set of the checkpoint: pass its folder as --root FOLDER"
    )
