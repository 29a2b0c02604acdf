"""The images of a cross-validation, read before its folds, so that impossible folds are refused at once."""

import contextlib
import json
from argparse import ArgumentError
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jsonargparse import ArgumentParser

import finetune
from finetune.commands.explicit_settings import read_explicit_settings
from finetune.commands.parsed_line import ParsedLine, format_line
from finetune.data.data_place import at_place, place_of
from finetune.data.datamodule import ImageDataModule
from finetune.data.datasets.image_folder import ImageFolderData
from finetune.runs.fold_record import FoldRecord
from finetune.system.messages import only_errors

_OURS = "finetune"
_DEFAULT = f"{_OURS}.{ImageFolderData.__name__}"


def check_folds(
    record: FoldRecord, changes: Sequence[tuple[str, str | None]], config: Path | None = None
) -> None:
    """Check that the images can be split into the folds.

    Some cases are left to the first fold: a data set that must be downloaded first, a data class that is not part of
    finetune, and flags that cannot be parsed.

    Args:
        record: The record of the cross-validation.
        changes: The flags that change a continued one.
        config: The config.yaml of a continued one; None for a new one.

    Raises:
        ValueError: They cannot be split, or cannot be read.
    """
    with contextlib.chdir(record.working_dir), only_errors("finetune.data"):
        data = _data_of(record, changes, config)
        if isinstance(data, ImageFolderData):
            data.check_can_train()


def _data_of(
    record: FoldRecord, changes: Sequence[tuple[str, str | None]], config: Path | None
) -> ImageDataModule | None:
    """Return the images of the first fold; None if only the fold itself can read them."""
    began_with = record.flags if config is None else [("config", str(config))]
    settings = _data_settings(began_with)
    if config is not None:
        settings = at_place(settings, [name.removeprefix("data.") for name, _ in changes])
    class_path = settings.pop("class_path", _DEFAULT)
    table = json.dumps({"class_path": class_path, "init_args": settings})
    flags = [flag for flag in [*began_with, *changes] if flag[0].partition(".")[0] == "data"]
    arguments = ["--data", table, *format_line("", ParsedLine(flags))[1:]]
    arguments += ["--data.num_folds", str(record.num_folds), "--data.fold", "1"]
    parser = ArgumentParser(exit_on_error=False)
    parser.add_subclass_arguments(ImageDataModule, "data")
    try:
        options = parser.parse_args(arguments)
    except ArgumentError:
        return None
    module, _, name = options.data.class_path.rpartition(".")
    kind = getattr(finetune, name, None) if module == _OURS else None
    if kind is None:
        return None
    place = place_of(options.data.init_args) or kind.default_root
    if kind is not ImageFolderData and (place is None or not kind.is_in(place)):
        return None
    return kind(**options.data.init_args.as_dict())


def _data_settings(flags: Sequence[tuple[str, str | None]]) -> dict[str, Any]:
    """Return the `data` settings of the configs among some flags."""
    configs = read_explicit_settings(format_line("fit", ParsedLine(list(flags)))).configs
    return {
        name.removeprefix("data."): value
        for config in configs
        for name, value in config.settings.items()
        if name.startswith("data.")
    }
