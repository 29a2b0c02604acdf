"""What a checkpoint may make us import: our own data modules and albumentations' transforms, and nothing else.

To import a module is to run it, before anybody can look at what it holds. A checkpoint from a stranger must not choose
which; the user may, by naming the module on the command line.
"""

import inspect
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import yaml
from jsonargparse import ArgumentParser

from finetune import public_paths
from finetune.classifier import Classifier
from finetune.parsing import last_value, settings_in

_FLAG = "--trust_modules"
_OURS = "finetune"
_TRANSFORMS = "albumentations"
_NOT_KEPT = {"optimizer", "scheduler", "compile"}  # in config.yaml, as `Classifier` has it


def add_trust_flag(parser: ArgumentParser) -> None:
    """Add the flag by which a user lets a checkpoint name a module."""
    text = "Modules, separated by commas, that the checkpoint may import for its data class and transforms."
    parser.add_argument(_FLAG, type=str | None, default=None, help=text)


def model_settings(checkpoint: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of `Classifier` that a checkpoint holds.

    Raises:
        ValueError: It holds others, or values that no run of ours has written.
    """
    settings = _plain(checkpoint["hyper_parameters"], "hyper_parameters")
    for name in settings.keys() - (inspect.signature(Classifier).parameters.keys() - _NOT_KEPT):
        raise ValueError(f"the checkpoint is not as `finetune fit` writes them: its hyper_parameters have {name!r}")
    for class_path in _class_paths(settings):
        raise ValueError(f"the checkpoint is not as `finetune fit` writes them: its hyper_parameters name {class_path}")
    return settings


def data_settings(checkpoint: Mapping[str, Any], args: Sequence[str]) -> dict[str, Any]:
    """Return class path and arguments of the data module that a checkpoint comes from, which are safe to import.

    Args:
        checkpoint: As `read_checkpoint` gives it.
        args: The command line: what it names is the user's own choice.

    Raises:
        ValueError: It names a module that is neither ours nor the user's.
    """
    settings = _plain(checkpoint["datamodule_hyper_parameters"], "datamodule_hyper_parameters")
    text = last_value(args, "--data") or ""  # a class, or a file or text with one
    own = last_value(args, "--data.class_path") or (settings_in(text) or {"class_path": text}).get("class_path", "")
    modules = [name for name in [*(last_value(args, _FLAG) or "").split(","), _module(own)] if name]
    class_path = public_paths(checkpoint["finetune"].get("data_class"))
    if _module(class_path) != _OURS:
        _check(class_path, modules)
    for transform in _class_paths(settings):
        _check(transform, [_TRANSFORMS, *modules])
    return {"class_path": class_path, "init_args": settings}


def check_root(config: Any, checkpoint: Mapping[str, Any] | None, args: Sequence[str]) -> None:
    """Make sure that a checkpoint does not choose a folder to fetch its data into.

    Args:
        config: As parsed, of the subcommand.
        checkpoint: As `read_checkpoint` gives it; None where there is none to trust.
        args: The command line.

    Raises:
        ValueError: There is no such folder, and nobody but the checkpoint names it.
    """
    root = config.data.init_args.get("root")
    if checkpoint is None or root is None or config.data.init_args.get("predict") is not None or Path(root).exists():
        return
    is_given = any(last_value(args, flag) for flag in ("--data.root", "--data.init_args.root"))
    if root == checkpoint["datamodule_hyper_parameters"].get("root") and not is_given:
        raise ValueError(f"the pictures of the checkpoint's run are not in {root} any more: give --data.root")


def _check(class_path: Any, modules: Sequence[str]) -> None:
    module = _module(class_path) or _TRANSFORMS  # as `build_transform` has it
    if not any(module == trusted or module.startswith(f"{trusted}.") for trusted in modules):
        hint = f"{_FLAG} {module.partition('.')[0]} lets it, if you know that module"
        raise ValueError(f"the checkpoint would import {class_path}, which is not ours: {hint}")


def _module(class_path: Any) -> str:
    if not isinstance(class_path, str):
        raise ValueError(f"the checkpoint is not as `finetune fit` writes them: {class_path!r} is no class path")
    return class_path.rpartition(".")[0]


def _class_paths(value: Any) -> Iterator[Any]:
    """Yield every class path in nested values, and in text that a parser would take for such."""
    if isinstance(value, str):
        with suppress(yaml.YAMLError):
            parsed = yaml.safe_load(value)
            value = parsed if isinstance(parsed, (dict, list)) else None
    if isinstance(value, dict):
        if "class_path" in value:
            yield value["class_path"]
        value = list(value.values())
    if isinstance(value, list):
        for inner in value:
            yield from _class_paths(inner)


def _plain(value: Any, name: str) -> dict[str, Any]:
    """Return a copy of nested plain values: what the command line could have said."""

    def copied(value: Any) -> Any:
        if type(value) is dict and all(type(key) is str for key in value):
            return {key: copied(inner) for key, inner in value.items()}
        if type(value) in (list, tuple):
            return [copied(inner) for inner in value]
        if value is None or type(value) in (str, int, float, bool):
            return value
        raise ValueError(f"the checkpoint is not as `finetune fit` writes them: its {name} hold {type(value).__name__}")

    settings = copied(value)
    if not isinstance(settings, dict):
        raise ValueError(f"the checkpoint is not as `finetune fit` writes them: its {name} are no dict")
    return settings
