"""Expand a command line: replace short words and positional arguments by full flags.

The result has the names of config.yaml, and expanding it again does not change it: Lightning starts the other ranks
with it. This happens before torch is imported.
"""

import difflib
import glob
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from finetune.commands.config_files import find, shipped
from finetune.commands.explicit_settings import flag_settings
from finetune.commands.flag_checks import check_flags, replace_shorthands
from finetune.commands.flow_yaml import flow_yaml
from finetune.commands.options import PATHS, POSITIONS, flag_names, in_full
from finetune.commands.parsed_line import ParsedLine, format_line, parse_line
from finetune.commands.run_places import (
    check_run_address,
    is_run_address,
    local_checkpoint,
    local_run,
)
from finetune.data.addresses import (
    check_address,
    check_scheme,
    is_address,
    is_in_bucket,
)
from finetune.data.data_place import ARCHIVES, is_archive, is_copied
from finetune.data.tables.table_file import SUFFIXES, check_supported, is_table
from finetune.models.hub import is_hub
from finetune.runs.run_checkpoint import checkpoint_of, run_of
from finetune.system.messages import NotFound, WrongUsage

_WEIGHTS = {"weights", "model.weights"}
_IMAGE_SUFFIXES = (
    ".jpg",
    ".jpeg",
    ".png",
    ".webp",
    ".bmp",
    ".tif",
    ".tiff",
    ".gif",
    ".avif",
    ".heic",
)
# options whose value may be an address of images
_IMAGE_PLACES = ("data.predict", "data.root", "data.init_args.root", "verify_on")
_WITH_CONFIGS = ("fit", "validate", "test", "predict", "benchmark")  # which take shipped configs


def in_full_spelling(arguments: Sequence[str]) -> list[str]:
    """Return the expanded command line of a command that has short words.

    Raises:
        WrongUsage: An option or a positional argument is wrong.
    """
    command = arguments[0]
    line = parse_line(arguments[1:])
    replace_shorthands(command, line)
    check_flags(command, line)
    must_exist = not line.has("resume")  # a resumed run may continue from another checkpoint
    line.flags = [_flag_in_full(command, name, value, must_exist) for name, value in line.flags]
    if line.asks_for_help():
        line.positionals = []  # `--help all`
    else:
        line.positionals = [os.path.expanduser(text) for text in line.positionals]
        _take_positionals(command, line)
        if command in _WITH_CONFIGS:
            _check_configs(line)
    return format_line(command, line)


def _check_configs(line: ParsedLine) -> None:
    """Check that the configs of a command line exist.

    Raises:
        NotFound: One does not.
    """
    for name, value in line.flags:
        if name == "config":
            find(value or "")


def with_images(arguments: Sequence[str]) -> list[str]:
    """Return the command line with the images after `--` as the value of their flag.

    They are not a flag earlier because there may be many: Linux limits each argument of a new process to 128 KiB.
    """
    command = arguments[0]
    line = parse_line(arguments[1:])
    option = _images_option(command)
    if option and line.positionals:
        paths = line.positionals
        line.positionals = []
        is_plain = len(paths) == 1 and paths[0][0] not in "[-"  # these begin a YAML list or a flag
        line.flags.append((option, paths[0] if is_plain else flow_yaml(paths)))
    return format_line(command, line)


def _images_option(command: str) -> str | None:
    """Return the full name of the option whose images are positional arguments; None for none."""
    return "data.predict" if "data.predict" in POSITIONS.get(command, ()) else None


def _flag_in_full(
    command: str, name: str, value: str | None, must_exist: bool
) -> tuple[str, str | None]:
    """Return a flag with its full name, and its value with expanded paths.

    Raises:
        NotFound: A checkpoint does not exist, although it must.
    """
    full = in_full(command, name)
    if value and full in PATHS:
        value = os.path.expanduser(value)
    if value and (is_address(value) or _takes_images(command, full)):
        _check_address(command, full, value)
    if value and full == "trainer.default_root_dir" and not is_address(value):
        check_scheme(value)
        existing = next(
            path
            for path in (Path(value).absolute(), *Path(value).absolute().parents)
            if path.exists()
        )
        if not existing.is_dir():
            raise WrongUsage(
                f"{flag_names(command, full)} {value}: {existing} is a file, not a folder"
            )
    is_run = value and full in _WEIGHTS and _is_folder_of_weights(value)
    if value and (is_run or (full == "ckpt_path" and value != "null")):
        value = _checkpoint(command, value, must_exist)
    return full, value


def _check_address(command: str, full: str, value: str) -> None:
    """Check the address in a flag, of images or of a run."""
    if _takes_images(command, full):
        check_scheme(value)
    if not is_address(value):
        return
    if _takes_images(command, full):
        check_address(value)
    elif full in PATHS:
        check_run_address(command, full, value)


def _takes_images(command: str, full: str) -> bool:
    """Return whether the value of an option is the place of images."""
    return full in _IMAGE_PLACES or (full == "root" and command in ("check", "export"))


def _checkpoint(command: str, path: str, must_exist: bool = True) -> str:
    if is_address(path):
        return local_checkpoint(command, path)
    path, message = checkpoint_of(path)
    if must_exist and not os.path.exists(path):
        hint = _nearest(path) or ": pass the folder of a run, or a file such as best.ckpt"
        raise NotFound(f"there is no checkpoint {path!r}{hint}")
    if path.lower().endswith(_IMAGE_SUFFIXES):
        raise WrongUsage(
            f"{path!r} is an image: a checkpoint, or a run's folder, comes before the images"
        )
    if message and _is_rank_zero():
        print(message, file=sys.stderr)
    return path


def _is_rank_zero() -> bool:
    return all(os.environ.get(name, "0") == "0" for name in ("RANK", "LOCAL_RANK", "SLURM_PROCID"))


def _take_positionals(command: str, line: ParsedLine) -> None:
    """Replace positional arguments by flags, in the order of `POSITIONS`.

    Images stay after `--`, since Linux limits an argument to 128 KiB. The folder of `check` and `review` stays
    positional, too: their functions take it by position.
    """
    if command == "review" and len(line.positionals) == 2:
        _add_flag(command, line, "run", line.positionals.pop())
    for full in POSITIONS[command]:
        if full == "ckpt_path":
            _take_checkpoint(command, line)
        elif full == "data.predict":
            _check_images(command, full, line)
        else:
            _take_folder(command, full, line)
    if list(POSITIONS[command]) == ["ckpt_path"] and line.positionals:
        raise WrongUsage(f"finetune {command} takes one checkpoint, and no {line.positionals[0]!r}")
    if not POSITIONS[command] and line.positionals:
        raise WrongUsage(f"finetune {command} takes only options, and no {line.positionals[0]!r}")


def _take_folder(command: str, full: str, line: ParsedLine) -> None:
    """Replace a folder of images by its flag; with a config, the folder is the root of its data."""
    is_training = command in ("fit", "benchmark")
    if is_training and line.has("resume"):
        _take_run(line)
    has_data = is_training and line.has("config", "data", "data.class_path")
    if not line.positionals:
        if is_training and not has_data:
            _check_has_data(command, line)
        return
    place = POSITIONS[command][full]
    folder = _only_one(f"finetune {command} {place}", line.positionals)
    check_scheme(folder)
    line.positionals = [folder]
    if is_address(folder):
        check_address(folder)
        if command == "review" and not is_copied(folder):
            raise WrongUsage(
                "finetune review needs a local folder or an archive, not a folder there"
            )
        if is_table(folder):
            raise WrongUsage(
                f"the table {folder!r} is not a local file: copy it, and pass the folder of its images: "
                f"finetune fit TABLE --data.root {os.path.dirname(folder)}"
            )
    if full == "folder":
        return
    if is_training:
        _check_no_config(command, folder)
    if is_table(folder):
        if not os.path.exists(folder):
            raise NotFound(f"the table {folder!r} does not exist{_nearest(folder)}")
        _add_flag(command, line, "data.table", folder)
        line.positionals = []
        return
    if not has_data:
        _check_folder(folder)
    _add_flag(command, line, full, folder)
    line.positionals = []


def _check_has_data(command: str, line: ParsedLine) -> None:
    has_place = not flag_settings(line).keys().isdisjoint(("data.root", "data.table"))
    if not has_place and not line.has("print_config", "resume"):
        hint = f"finetune {command} FOLDER; or a shipped config: --config hotdog.yaml"
        raise WrongUsage(f"no data: pass the folder of your images, as in {hint}")


def _check_no_config(command: str, folder: str) -> None:
    """Check that the folder of a command is not a config, which needs the flag `--config`."""
    names = shipped()
    is_config = folder in names or f"{folder}.yaml" in names or folder.endswith(".yaml")
    if is_config and not Path(folder).is_dir():
        raise WrongUsage(
            f"{folder} is a config, not a folder of images: finetune {command} --config {folder}"
        )


def _take_run(line: ParsedLine) -> None:
    """Replace the run in `fit --resume RUN`, a run's folder or a path in it, by the value of `--resume`."""
    runs = [path for path in line.positionals if run_of(path) or is_run_address(path)]
    if runs:
        run = _only_one("finetune fit --resume RUN", runs)
        line.positionals.remove(run)
        line.flags = [(name, value) for name, value in line.flags if name != "resume"]
        line.flags.append(("resume", run))
    if line.has("resume"):
        for path in line.positionals:
            if not is_address(path) and not os.path.exists(path):
                kinds = "the folder of a run or a folder of images"
                raise NotFound(f"--resume: {path!r} does not exist; pass {kinds}{_nearest(path)}")
    named = line.last("resume")
    if named and named.lower() not in ("true", "false"):
        run = local_run(named) if is_in_bucket(named) else run_of(named)
        if not run:
            raise NotFound(f"--resume {named}: that is not the folder of a run{_nearest(named)}")
        line.flags = [(name, run if name == "resume" else value) for name, value in line.flags]


def _take_checkpoint(command: str, line: ParsedLine) -> None:
    """Replace the first positional argument by the flag of the checkpoint, unless a flag or a config names one."""
    option = _images_option(command)
    if (
        option
        and len(line.positionals) == 1
        and not line.has("ckpt_path", option)
        and not _is_checkpoint(line.positionals[0])
    ):
        raise WrongUsage(
            f"the checkpoint, or a run's folder, comes first: finetune {command} CKPT IMAGES"
        )
    if line.has("ckpt_path"):
        return
    if line.positionals:
        line.flags.insert(0, ("ckpt_path", _checkpoint(command, line.positionals.pop(0))))
    # The config of one of our own commands may name the checkpoint.
    elif not line.has("config") or command in ("validate", "test", "predict"):
        raise WrongUsage(
            f"finetune {command} needs a checkpoint, or a run's folder: {flag_names(command, 'ckpt_path')}"
        )


def _check_images(command: str, full: str, line: ParsedLine) -> None:
    """Check that there are images, by positional arguments or by the flag `full`, and that they exist."""
    if line.positionals and line.has(full):
        raise WrongUsage(f"images are passed twice: by --{full}, and {line.positionals[0]!r}")
    if not line.positionals and not line.has(full, "config", "data"):
        kinds = "images, folders, globs or a LIST.txt"
        raise WrongUsage(
            f"finetune {command} needs {kinds}: finetune {command} CKPT IMAGES (--{full})"
        )
    for path in line.positionals:
        check_scheme(path)
        if is_address(path):
            check_address(path)
            continue
        if not os.path.exists(path) and not (
            glob.has_magic(path) and next(glob.iglob(path, recursive=True), None)
        ):
            raise NotFound(f"there is no image, folder, list or glob {path!r}{_nearest(path)}")


def _is_checkpoint(path: str) -> bool:
    is_run = any(
        os.path.exists(os.path.join(path, name))
        for name in ("checkpoints", "best.ckpt", "last.ckpt")
    )
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


def _only_one(usage: str, paths: list[str]) -> str:
    if len(paths) > 1:
        raise WrongUsage(
            f"one folder is needed, not {len(paths)} ({' '.join(map(repr, paths[:3]))}): {usage}"
        )
    return paths[0]


def _check_folder(folder: str) -> None:
    if is_address(folder):
        return  # it is listed later
    if not os.path.exists(folder):
        raise NotFound(f"the data folder {folder!r} does not exist{_nearest(folder)}")
    if not os.path.isdir(folder) and not is_archive(folder):
        check_supported(folder)
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


def _add_flag(command: str, line: ParsedLine, name: str, value: str) -> None:
    """Add a flag, unless it is there already with the same value."""
    existing = flag_settings(line).get(name)
    if existing is not None and existing != value:
        raise WrongUsage(f"{flag_names(command, name)} is set twice: {value!r} and {existing!r}")
    if existing is None:
        line.flags.append((name, value))
