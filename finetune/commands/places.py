"""Positional arguments and paths: the layers of a command whose folders, checkpoints and runs exist.

Places are looked at before torch is imported: a folder or a checkpoint that does not exist is a line at once, the
folder of a run stands for its checkpoint, and the address of a run for its local copy.
"""

import difflib
import glob
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from finetune.data.addresses import (
    check_address,
    check_is_writable,
    check_scheme,
    is_address,
    is_in_bucket,
)
from finetune.data.data_place import ARCHIVES, is_archive, is_copied
from finetune.data.tables.table_file import SUFFIXES, is_table
from finetune.models.hub import is_hub
from finetune.models.network_names import check_known
from finetune.runs.local_copies import local_copy
from finetune.runs.run_checkpoint import checkpoint_of, run_of
from finetune.runs.run_dir import check_name
from finetune.settings.all_commands import COMMANDS
from finetune.settings.configs import shipped
from finetune.settings.fields import Setting, settings_of
from finetune.settings.layers import Layer, Layers
from finetune.settings.reader import read_config
from finetune.system.messages import NotFound, WrongUsage

_IMAGES = (".jpg", ".jpeg", ".png", ".webp", ".bmp", ".tif", ".tiff", ".gif", ".avif", ".heic")
# Settings whose value may be an address of images.
_IMAGE_PLACES = ("data.predict", "data.root", "verify_on")
# Commands that read a checkpoint from object storage.
_READERS = ("predict", "validate", "test", "serve")


@dataclass
class _Given:
    """What a user has given, while places become settings.

    Attributes:
        command: The command.
        values: The settings of flags or arguments, by full names.
        places: The positional arguments that are not settings yet.
        has_config: Whether a config is named, which may have the data.
        may_ask: Whether the settings are only to be printed.
    """

    command: str
    values: dict[str, Any]
    places: list[str]
    has_config: bool
    may_ask: bool

    def has(self, *names: str) -> bool:
        return not self.values.keys().isdisjoint(names)

    def add(self, name: str, value: str) -> None:
        """Add the setting of a place, which no flag may set to another value."""
        given = self.values.setdefault(name, value)
        if given != value:
            raise WrongUsage(f"is set twice: {value!r} and {given!r}", name)


def layers_of(
    command: str,
    typed: Layer,
    configs: Sequence[str] = (),
    places: Sequence[str] = (),
    is_printed: bool = False,
) -> Layers:
    """Return the layers of a command: those of configs, and on top its flags and positional arguments.

    Args:
        command: The command whose settings they are.
        typed: The flags, or the arguments in Python.
        configs: Paths or names of configs, of which the last one wins.
        places: The positional arguments: folders, checkpoints, images.
        is_printed: Whether the settings are only to be printed, so that images need not be named.

    Raises:
        WrongUsage: A setting of a config does not exist, or a value or a place is wrong.
    """
    found = [os.path.expanduser(place) for place in places]
    if command != "predict" and typed.values.get("data.predict") is not None:
        raise WrongUsage("images to classify are for finetune predict, not here", "data.predict")
    given = _Given(command, dict(typed.values), found, bool(configs), is_printed)
    must_exist = not given.values.get("resume")  # a run that continues has a checkpoint of its own
    layers = [_with_places(command, read_config(command, name), must_exist) for name in configs]
    given.values |= _with_places(command, typed, must_exist).values
    _take_places(given)
    complete = Layers(command, (*layers, typed._replace(values=given.values)))
    if command in ("fit", "benchmark"):
        _check_names(complete)
    return complete


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


def _with_places(command: str, layer: Layer, must_exist: bool) -> Layer:
    """Return a layer in which paths and addresses are checked, and the folder of a run is its checkpoint."""
    values = dict(layer.values)
    for name, value in layer.values.items():
        setting = settings_of(COMMANDS[command].settings).get(name)
        if setting is not None and isinstance(value, str):
            values[name] = _checked_place(command, setting, value, must_exist)
    return layer._replace(values=values)


def _checked_place(command: str, setting: Setting, value: str, must_exist: bool) -> str:
    """Return the path or address in a setting; the checkpoint of the folder of a run.

    Raises:
        NotFound: A checkpoint does not exist, although it must.
        WrongUsage: An address is wrong, or the command takes none there.
    """
    name = setting.name
    takes_images = name in _IMAGE_PLACES or (name == "root" and command in ("check", "export"))
    if takes_images:
        check_scheme(value)
    if is_address(value) and takes_images:
        check_address(value)
    elif is_address(value) and setting.is_path:
        _check_run_address(command, name, value)
    if name == "trainer.default_root_dir" and not is_address(value):
        _check_can_be_folder(name, value)
    is_run = name in ("weights", "model.weights") and _is_folder_of_weights(value)
    return _checkpoint(command, value, must_exist) if is_run or name == "ckpt_path" else value


def _check_run_address(command: str, name: str, address: str) -> None:
    """Check that a command can read or write a run there.

    Raises:
        WrongUsage: It cannot, or the address is invalid.
    """
    check_is_writable(address, f"--{name}")
    is_read = name == "ckpt_path" and command in _READERS
    if is_read or (command == "fit" and name in ("trainer.default_root_dir", "resume")):
        check_address(address)
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


def _take_places(given: _Given) -> None:
    """Make settings of the positional arguments, in the order of the usage line."""
    takers: dict[str, Callable[[_Given], None]] = {
        "ckpt_path": _take_checkpoint,
        "data.predict": _take_images,
        "data.root": _take_data,
        "folder": _take_folder,
        "run": _take_rest,
        "runs": _take_all,
        "pattern": _take_rest,
    }
    settings = settings_of(COMMANDS[given.command].settings)
    for name in sorted(takers, key=[*takers].index):
        has_place = name in settings and settings[name].about.place
        if has_place and not (name == "data.predict" and given.command != "predict"):
            takers[name](given)
    if given.places:
        what = "one checkpoint, and no" if "ckpt_path" in settings else "only options, and no"
        raise WrongUsage(f"finetune {given.command} takes {what} {given.places[0]!r}")


def _take_checkpoint(given: _Given) -> None:
    """Take the first place as the checkpoint, unless a flag names one."""
    command = given.command
    if given.has("ckpt_path"):
        return
    lacks_images = command == "predict" and len(given.places) == 1 and not given.has("data.predict")
    if lacks_images and not _is_checkpoint(given.places[0]):
        raise WrongUsage(
            f"the checkpoint, or a run's folder, comes first: finetune {command} CKPT IMAGES"
        )
    if not given.places:
        raise WrongUsage("needs a checkpoint, or a run's folder", "ckpt_path")
    given.values["ckpt_path"] = _checkpoint(command, given.places.pop(0))


def _take_images(given: _Given) -> None:
    """Take all places as images, which must exist."""
    name = "data.predict"
    if given.places and given.has(name):
        raise WrongUsage(f"images are passed twice: by --{name}, and {given.places[0]!r}")
    if not given.places and not given.has(name, "data.class_path") and not given.has_config:
        kinds = "images, folders, globs or a LIST.txt"
        raise WrongUsage(f"finetune predict needs {kinds}: finetune predict CKPT IMAGES (--{name})")
    for path in given.places:
        check_scheme(path)
        if is_address(path):
            check_address(path)
            continue
        is_glob = glob.has_magic(path) and next(glob.iglob(path, recursive=True), None) is not None
        if not os.path.exists(path) and not is_glob:
            raise NotFound(f"there is no image, folder, list or glob {path!r}{_nearest(path)}")
    if given.places:
        given.values[name] = given.places[0] if len(given.places) == 1 else given.places
        given.places = []


def _take_data(given: _Given) -> None:
    """Take the place of the images; with a config, it replaces that of its data."""
    command = given.command
    is_training = command in ("fit", "benchmark")
    if is_training and "resume" in given.values:
        _take_run(given)
    has_data = is_training and (given.has_config or given.has("data.class_path"))
    if not given.places:
        is_named = given.has("data.root", "data.table", "resume")
        if is_training and not has_data and not is_named and not given.may_ask:
            hint = f"finetune {command} FOLDER; or a shipped config: --config hotdog.yaml"
            raise WrongUsage(f"no data: pass the folder of your images, as in {hint}")
        return
    place = _only_place(given)
    _check_images_there(command, place)
    if is_training:
        _check_no_config(command, place)
    if is_table(place):
        if not os.path.exists(place):
            raise NotFound(f"the table {place!r} does not exist{_nearest(place)}")
        given.add("data.table", place)
        return
    if not has_data:
        _check_folder(place)
    given.add("data.root", place)


def _take_folder(given: _Given) -> None:
    """Take the folder of an own command."""
    is_optional = given.command == "runs"
    if given.command == "review" and len(given.places) == 2:
        given.add("run", given.places.pop())
    if given.has("folder"):
        return
    if not given.places:
        if is_optional:
            return
        raise WrongUsage(f"FOLDER is missing: finetune {given.command} FOLDER|TABLE")
    place = _only_place(given)
    if not is_optional:
        _check_images_there(given.command, place)
    given.values["folder"] = place


def _take_rest(given: _Given) -> None:
    name = "run" if given.command == "review" else "pattern"
    if given.places:
        given.add(name, _only_place(given))


def _take_all(given: _Given) -> None:
    given.values["runs"] = given.places
    given.places = []


def _only_place(given: _Given) -> str:
    """Return the only place, and take it away."""
    places = given.places
    given.places = []
    if len(places) > 1:
        named = " ".join(map(repr, places[:3]))
        raise WrongUsage(
            f"one folder is needed, not {len(places)} ({named}): finetune {given.command} FOLDER"
        )
    return places[0]


def _check_images_there(command: str, place: str) -> None:
    """Check the address of images, if it is one."""
    check_scheme(place)
    if not is_address(place):
        return
    check_address(place)
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


def _take_run(given: _Given) -> None:
    """Make the value of `resume` of the run in `fit --resume RUN`: a run's folder or a path in it."""
    runs = [path for path in given.places if run_of(path) or _is_run_address(path)]
    named = given.values["resume"]
    if len(runs) > 1:
        raise WrongUsage("one run is needed: finetune fit --resume RUN")
    if runs:
        given.places.remove(runs[0])
        named = runs[0]
    for path in given.places:
        if not is_address(path) and not os.path.exists(path):
            kinds = "the folder of a run or a folder of images"
            raise NotFound(f"--resume: {path!r} does not exist; pass {kinds}{_nearest(path)}")
    if isinstance(named, str):
        run = _local_run(named) if is_in_bucket(named) else run_of(named)
        if not run:
            raise NotFound(f"--resume {named}: that is not the folder of a run{_nearest(named)}")
        named = run
    given.values["resume"] = named


def _is_run_address(path: str) -> bool:
    if not is_in_bucket(path):
        return False
    # imported here, since most commands need no object storage
    from finetune.runs.sync import is_run_there

    check_address(path)
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
