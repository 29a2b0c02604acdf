"""Positional arguments and paths: the folders, checkpoints, images and runs of a command, which exist.

Places are looked at before torch is imported: a folder or a checkpoint that does not exist is a line at once, the
folder of a run stands for its checkpoint, and the address of a run for its local copy.
"""

import difflib
import glob
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from finetune.data.addresses import (
    check_scheme,
    is_address,
    is_in_bucket,
    parse_address,
)
from finetune.data.data_place import ARCHIVES, is_archive, is_copied
from finetune.data.tables.table_file import SUFFIXES, is_table
from finetune.models.hub import is_hub
from finetune.models.network_names import check_known
from finetune.runs.local_copies import local_copy
from finetune.runs.run_checkpoint import checkpoint_of, run_of
from finetune.runs.run_dir import check_name
from finetune.settings.configs import shipped
from finetune.settings.fields import Setting, settings_of
from finetune.settings.layers import Layer, Layers
from finetune.system.messages import NotFound, WrongUsage

_IMAGES = (".jpg", ".jpeg", ".png", ".webp", ".bmp", ".tif", ".tiff", ".gif", ".avif", ".heic")
# Settings whose value may be an address of images.
_IMAGE_PLACES = ("data.predict", "data.root", "folder", "verify_on")
# Commands that read a checkpoint from object storage.
_READERS = ("predict", "validate", "test", "serve")
_TRAINING = ("fit", "benchmark")


def with_places(layers: Layers, places: Sequence[str], is_printed: bool = False) -> Layers:
    """Return the layers of a command with the settings that its positional arguments are.

    The folder of a run becomes its checkpoint, and the address of a run its local copy.

    Args:
        layers: What flags and configs, or arguments in Python, set.
        places: The positional arguments: folders, checkpoints, images.
        is_printed: Whether the settings are only to be printed, so that images need not be named.

    Raises:
        WrongUsage: A place does not exist, or is not of the kind that the command takes there.
    """
    settings = settings_of(layers.kind)
    has_images = "data.predict" in settings and layers.value("data.predict") is not None
    if has_images and layers.command != "predict":
        raise WrongUsage("has images to classify: that is for finetune predict", "data.predict")
    values = _settings_of(layers, [os.path.expanduser(place) for place in places], is_printed)
    kind = layers.layers[-1].kind
    layers = layers.on_top(Layer(f"finetune {layers.command}", kind, values))
    checked: dict[str, Any] = {}
    for name in {name for layer in layers.layers for name in layer.values if name in settings}:
        value = layers.value(name)
        if isinstance(value, str) and (known := _checked(layers, settings[name], value)) != value:
            checked[name] = known
    layers = layers.on_top(Layer("places", "decided", checked))
    if layers.command in _TRAINING:
        _check_names(layers)
    return layers


def _settings_of(layers: Layers, rest: list[str], is_printed: bool) -> dict[str, Any]:
    """Return the settings that the positional arguments are, in the order of the usage line."""
    settings = settings_of(layers.kind)
    values: dict[str, Any] = {}
    has_checkpoint = "ckpt_path" in settings and settings["ckpt_path"].about.place
    if has_checkpoint and "ckpt_path" not in layers.typed:
        values["ckpt_path"] = _take_checkpoint(layers, rest)
    if layers.command == "predict":
        values |= _take_images(layers, rest)
    elif "data.root" in settings:
        values |= _take_data(layers, rest, is_printed)
    elif "folder" in settings:
        values |= _take_folder(layers, rest)
    elif "runs" in settings and rest:
        values["runs"] = [rest.pop(0) for _ in range(len(rest))]
    elif "pattern" in settings and rest:
        values["pattern"] = _only_place(layers.command, rest)
    if rest:
        what = "one checkpoint, and no" if has_checkpoint else "only options, and no"
        raise WrongUsage(f"finetune {layers.command} takes {what} {rest[0]!r}")
    for name in values.keys() & layers.typed.keys() - {"resume"}:
        if values[name] != layers.typed[name]:
            raise WrongUsage(f"is set twice: {values[name]!r} and {layers.typed[name]!r}", name)
    return values


def _check_names(layers: Layers) -> None:
    """Check what a fit would refuse only after torch is imported, which takes seconds.

    Raises:
        WrongUsage: The name of the run or of a network is wrong, or the form of a threshold.
    """
    name = layers.value("name")
    if name is not None and not layers.value("resume"):
        check_name(name)
    if (threshold := layers.value("threshold")) is not None:
        # with numpy, which most commands do not need yet
        from finetune.training.threshold import check_form

        check_form(threshold)
    names = layers.value("model.backbone").split(",")
    for backbone in filter(None, map(str.strip, names)):
        if backbone != "auto":
            check_known(backbone)


def _checked(layers: Layers, setting: Setting, value: str) -> str:
    """Return the path or address in a setting; the checkpoint of the folder of a run.

    Raises:
        NotFound: A checkpoint does not exist, although it must.
        WrongUsage: An address is wrong, or the command takes none there.
    """
    command = layers.command
    name = setting.name
    takes_images = name in _IMAGE_PLACES or (name == "root" and command in ("check", "export"))
    if takes_images:
        check_scheme(value)
    if is_address(value) and takes_images:
        parse_address(value)
    elif is_address(value) and setting.is_path:
        _check_run_address(command, name, value)
    if name == "trainer.default_root_dir" and not is_address(value):
        _check_can_be_folder(name, value)
    if name != "ckpt_path" and not (
        name in ("weights", "model.weights") and _is_folder_of_weights(value)
    ):
        return value
    # a run that continues has a checkpoint of its own
    must_exist = command not in _TRAINING or not layers.value("resume")
    return _checkpoint(command, value, must_exist)


def _check_run_address(command: str, name: str, address: str) -> None:
    """Check that a command can read or write a run there.

    Raises:
        WrongUsage: It cannot, or the address is invalid.
    """
    if not is_in_bucket(address):
        raise WrongUsage(
            f"{address}: the hub can only be read: use a local path, or an address in object storage",
            name,
        )
    is_read = name == "ckpt_path" and command in _READERS
    if is_read or (command == "fit" and name in ("trainer.default_root_dir", "resume")):
        parse_address(address)
        return
    hint = "only fit writes there: use" if name == "trainer.default_root_dir" else "it must be"
    raise WrongUsage(f"{address} is in object storage; {hint} a local path", name)


def _check_can_be_folder(name: str, value: str) -> None:
    check_scheme(value)
    path = Path(value).absolute()
    existing = next(place for place in (path, *path.parents) if place.exists())
    if not existing.is_dir():
        raise WrongUsage(f"{value}: {existing} is a file, not a folder", name)


def _checkpoint(command: str, path: str, must_exist: bool = True) -> str:
    if is_address(path):
        from finetune.runs.sync import pull_checkpoint

        _check_run_address(command, "ckpt_path", path)
        return str(pull_checkpoint(path))
    path, message = checkpoint_of(path)
    if must_exist and not os.path.exists(path):
        hint = _nearest(path) or ": pass the folder of a run, or a file such as best.ckpt"
        raise NotFound(f"there is no checkpoint {path!r}{hint}")
    if path.lower().endswith(_IMAGES):
        raise WrongUsage(
            f"{path!r} is an image: a checkpoint, or a run's folder, comes before the images"
        )
    if message and _is_rank_zero():
        print(message, file=sys.stderr)
    return path


def _is_rank_zero() -> bool:
    return all(os.environ.get(name, "0") == "0" for name in ("RANK", "LOCAL_RANK", "SLURM_PROCID"))


def _take_checkpoint(layers: Layers, rest: list[str]) -> str:
    """Take the first place as the checkpoint."""
    command = layers.command
    lacks_images = command == "predict" and len(rest) == 1 and "data.predict" not in layers.typed
    if lacks_images and not _is_checkpoint(rest[0]):
        raise WrongUsage(
            f"the checkpoint, or a run's folder, comes first: finetune {command} CKPT IMAGES"
        )
    if not rest:
        raise WrongUsage("needs a checkpoint, or a run's folder", "ckpt_path")
    return rest.pop(0)


def _take_images(layers: Layers, rest: list[str]) -> dict[str, Any]:
    """Take all places as images, which must exist."""
    name = "data.predict"
    if not rest:
        has_images = any(map(layers.is_explicit, (name, "data.class_path")))
        has_config = any(layer.kind == "config" for layer in layers.layers)
        if not has_images and not has_config:
            hint = f"images, folders, globs or a LIST.txt: finetune predict CKPT IMAGES (--{name})"
            raise WrongUsage(f"finetune predict needs {hint}")
        return {}
    for path in rest:
        check_scheme(path)
        if is_address(path):
            parse_address(path)
            continue
        is_glob = glob.has_magic(path) and next(glob.iglob(path, recursive=True), None) is not None
        if not os.path.exists(path) and not is_glob:
            raise NotFound(f"there is no image, folder, list or glob {path!r}{_nearest(path)}")
    images = [rest.pop(0) for _ in range(len(rest))]
    return {name: images[0] if len(images) == 1 else images}


def _take_data(layers: Layers, rest: list[str], is_printed: bool) -> dict[str, Any]:
    """Take the run of `fit --resume RUN`, and the place of the images; with a config, it replaces that of its data."""
    command = layers.command
    is_training = command in _TRAINING
    values = _take_run(layers, rest) if is_training and layers.value("resume") else {}
    has_config = any(layer.kind == "config" for layer in layers.layers)
    has_data = is_training and (has_config or layers.is_explicit("data.class_path"))
    if not rest:
        places = ("data.root", "data.table", "resume")
        is_named = has_data or any(map(layers.is_explicit, places))
        if is_training and not is_named and not is_printed:
            hint = f"finetune {command} FOLDER; or a shipped config: --config hotdog.yaml"
            raise WrongUsage(f"no data: pass the folder of your images, as in {hint}")
        return values
    place = _only_place(command, rest)
    _check_images_there(command, place)
    if is_training:
        _check_no_config(command, place)
    if is_table(place):
        if not os.path.exists(place):
            raise NotFound(f"the table {place!r} does not exist{_nearest(place)}")
        return {**values, "data.table": place}
    if not has_data:
        _check_folder(place)
    return {**values, "data.root": place}


def _take_folder(layers: Layers, rest: list[str]) -> dict[str, Any]:
    """Take the folder of an own command, and the run of `review`."""
    command = layers.command
    values = {"run": rest.pop()} if command == "review" and len(rest) == 2 else {}
    if rest:
        place = _only_place(command, rest)
        if command != "runs":
            _check_images_there(command, place)
        values["folder"] = place
    elif command != "runs" and "folder" not in layers.typed:
        raise WrongUsage(f"FOLDER is missing: finetune {command} FOLDER|TABLE")
    return values


def _only_place(command: str, rest: list[str]) -> str:
    """Take the only place."""
    if len(rest) > 1:
        named = " ".join(map(repr, rest[:3]))
        raise WrongUsage(
            f"one folder is needed, not {len(rest)} ({named}): finetune {command} FOLDER"
        )
    return rest.pop()


def _check_images_there(command: str, place: str) -> None:
    """Check the address of images, if it is one."""
    check_scheme(place)
    if not is_address(place):
        return
    parse_address(place)
    if command == "review" and not is_copied(place):
        raise WrongUsage("finetune review needs a local folder or an archive, not a folder there")
    if is_table(place):
        raise WrongUsage(
            f"the table {place!r} is not a local file: copy it, and pass the folder of its images: "
            f"finetune fit TABLE --data.root {os.path.dirname(place)}"
        )


def _check_no_config(command: str, folder: str) -> None:
    """Check that the folder of a command is not a config, which needs the flag `--config`."""
    names = shipped()
    is_config = folder in names or f"{folder}.yaml" in names or folder.endswith(".yaml")
    if is_config and not Path(folder).is_dir():
        raise WrongUsage(
            f"{folder} is a config, not a folder of images: finetune {command} --config {folder}"
        )


def _take_run(layers: Layers, rest: list[str]) -> dict[str, Any]:
    """Take the run that `fit --resume RUN` names: a run's folder, a path in it, or its address."""
    named = layers.value("resume")
    runs = [path for path in rest if run_of(path) or _is_run_address(path)]
    if len(runs) > 1:
        raise WrongUsage("one run is needed: finetune fit --resume RUN")
    if runs:
        rest.remove(runs[0])
        named = runs[0]
    for path in rest:
        if not is_address(path) and not os.path.exists(path):
            kinds = "the folder of a run or a folder of images"
            raise NotFound(f"--resume: {path!r} does not exist; pass {kinds}{_nearest(path)}")
    if not isinstance(named, str):
        return {}
    run = _local_run(named) if is_in_bucket(named) else run_of(named)
    if not run:
        raise NotFound(f"--resume {named}: that is not the folder of a run{_nearest(named)}")
    return {"resume": run}


def _is_run_address(path: str) -> bool:
    if not is_in_bucket(path):
        return False
    # imported here, since most commands need no object storage
    from finetune.runs.sync import is_run_there

    parse_address(path)
    return is_run_there(path)


def _local_run(address: str) -> str:
    """Return the local copy of a run that a fit continues, after a download if the objects are newer."""
    from finetune.runs.sync import pull_run

    run = local_copy(address)
    pull_run(run)
    return str(run)


def _is_checkpoint(path: str) -> bool:
    names = ("checkpoints", "best.ckpt", "last.ckpt")
    is_run = any(os.path.exists(os.path.join(path, name)) for name in names)
    return path.endswith((".ckpt", ".onnx", ".safetensors")) or is_run or is_hub(path)


def _is_folder_of_weights(path: str) -> bool:
    """Return whether a path is the folder of a run.

    It is not if it is a folder of timm, or a name such as DEFAULT that a folder here happens to have.
    """
    if os.path.isfile(os.path.join(path, "config.json")):
        return False
    return os.path.isdir(path) and (
        os.sep in path or os.path.isdir(os.path.join(path, "checkpoints"))
    )


def _check_folder(folder: str) -> None:
    if is_address(folder):
        return  # it is listed later
    if not os.path.exists(folder):
        raise NotFound(f"the data folder {folder!r} does not exist{_nearest(folder)}")
    if not os.path.isdir(folder) and not is_archive(folder):
        raise WrongUsage(
            f"{folder!r} is a file: pass a folder of images, an archive ({' '.join(ARCHIVES)}), or a table "
            f"({' '.join(SUFFIXES)})"
        )


def _nearest(path: str) -> str:
    """Return the end of a message: the file in the same folder with the most similar name."""
    folder, name = os.path.split(path.rstrip("/"))
    try:
        near = difflib.get_close_matches(name, os.listdir(folder or "."), n=1)
    except OSError:
        near = []
    return f"; did you mean {os.path.join(folder, near[0])!r}?" if near else ""
