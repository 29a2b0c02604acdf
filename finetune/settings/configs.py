"""Configs: YAML files of settings, which are found by name, read and written."""

from collections.abc import Collection
from pathlib import Path
from typing import Any

import msgspec
import yaml

from finetune.settings.fields import ClassSettings, Section, YAMLDumper, YAMLLoader
from finetune.system.messages import NotFound, WrongUsage, did_you_mean


def shipped() -> dict[str, Path]:
    """Return the shipped configs by file name. In a checkout they lie next to the package, else inside it."""
    package = Path(__file__).parents[1]
    folders = (package / "configs", package.parent / "configs")
    folder = next((f for f in folders if f.is_dir()), folders[0])
    return {path.name: path for path in sorted(folder.glob("*.yaml"))}


def find(name: str) -> Path:
    """Return the path of a config: a file, or else one that is shipped with the package.

    Raises:
        WrongUsage: It is a folder.
        NotFound: It is nothing; the message suggests shipped ones.
    """
    path = Path(name).expanduser()
    if path.is_file():
        return path
    available = shipped()
    for candidate in (name, f"{name}.yaml"):
        if candidate in available:
            return available[candidate]
    if path.is_dir():
        inner = path / "config.yaml"
        hint = f"did you mean {inner}?" if inner.is_file() else f"images are finetune fit {name}"
        raise WrongUsage(f"--config {name} is a folder; {hint}")
    names = [one if name.endswith(".yaml") else one.removesuffix(".yaml") for one in available]
    raise NotFound(
        f"there is no config {name!r}, and none of that name is shipped{did_you_mean(name, names)}"
    )


def load(
    path: Path, what: str = "config", example: str = "settings such as `epochs: 10`"
) -> dict[str, Any]:
    """Return the content of a config, or of another file of names and values.

    Args:
        path: The file.
        what: What it is, for messages.
        example: What it should have.

    Raises:
        WrongUsage: It is not YAML in UTF-8, or no table.
    """
    try:
        table = yaml.load(path.read_text("utf-8"), YAMLLoader)
    except UnicodeDecodeError as error:
        raise WrongUsage(
            f"the {what} {path} is not UTF-8: byte {error.start} is not readable"
        ) from error
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        mark = getattr(error, "problem_mark", None)
        where = f", line {mark.line + 1}" if mark else ""
        problem = getattr(error, "problem", None) or str(error)
        raise WrongUsage(f"the {what} {path}{where}: not valid YAML: {problem}") from error
    if not isinstance(table, dict):
        raise WrongUsage(f"{path} is not a {what}: it has no {example}")
    return table


def to_config(settings: Section) -> dict[str, Any]:
    """Return settings as plain nested tables in the form of config.yaml."""
    table: dict[str, Any] = {}
    for field in msgspec.structs.fields(type(settings)):
        value = getattr(settings, field.name)
        if isinstance(value, Section):
            value = to_config(value)
        elif isinstance(value, ClassSettings):
            value = {"class_path": value.class_path, "init_args": dict(value.init_args)}
        table[field.name] = value
    if "class_path" in table:
        return {"class_path": table.pop("class_path"), "init_args": table}
    return table


def config_text(settings: Section, omitted: Collection[str] = ()) -> str:
    """Return settings as the text of a config, without some by their full names."""
    table = to_config(settings)
    for name in omitted:
        group, _, last = name.rpartition(".")
        table[group].pop(last)
    return yaml.dump(table, Dumper=YAMLDumper, sort_keys=False, allow_unicode=True)
