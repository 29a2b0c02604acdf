"""Configs: YAML files of settings, which are found by name, and read and written in the form of config.yaml.

A config has nested tables, dotted keys, or short words: `epochs: 3` in it is `trainer: {max_epochs: 3}`. A class with
arguments is `class_path` and `init_args`, as Lightning writes it.
"""

from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec
import yaml

from finetune.settings import yaml_text
from finetune.settings.fields import ClassSettings, Section, Setting, is_class, settings_of
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
        NotFound: It is neither; the message suggests shipped ones.
    """
    if Path(name).expanduser().is_file():
        return Path(name).expanduser()
    available = shipped()
    for candidate in (name, f"{name}.yaml"):
        if candidate in available:
            return available[candidate]
    names = [path if name.endswith(".yaml") else path.removesuffix(".yaml") for path in available]
    raise NotFound(
        f"there is no config {name!r}, and none of that name is shipped{did_you_mean(name, names)}"
    )


class Table(msgspec.Struct, frozen=True):
    """The content of a config.

    Attributes:
        values: As YAML has it.
        texts: The same, in which all that is no list or table is the text of the file: names may look like numbers.
    """

    values: dict[str, Any]
    texts: dict[str, Any]


def read_table(path: Path) -> Table:
    """Return the content of a config.

    Raises:
        WrongUsage: It is not UTF-8, not YAML, or has no settings.
    """
    try:
        text = path.read_text("utf-8")
    except UnicodeDecodeError as error:
        raise WrongUsage(
            f"the config {path} is not UTF-8: byte {error.start} is not readable"
        ) from error
    try:
        texts = yaml_text.load_texts(text)
        values = yaml_text.load(text)
    except (yaml.YAMLError, ValueError) as error:
        mark = getattr(error, "problem_mark", None)
        where = f", line {mark.line + 1}" if mark else ""
        problem = getattr(error, "problem", None) or str(error)
        raise WrongUsage(f"{path}{where}: not valid YAML: {problem}") from error
    if not isinstance(values, dict):
        raise WrongUsage(f"{path} is not a config: it has no settings such as `epochs: 10`")
    return Table(values, texts)


def table_in(text: str) -> Table | None:
    """Return the table in the value of a flag, such as `{freeze: layer2}`; None if it is none."""
    try:
        values = yaml_text.load(text)
        texts = yaml_text.load_texts(text)
    except (yaml.YAMLError, ValueError):
        return None
    return Table(values, texts) if isinstance(values, dict) else None


def to_config(settings: Section) -> dict[str, Any]:
    """Return settings as plain nested tables in the form of config.yaml."""
    table = dict(_plain(settings))
    data = table.get("data")
    if data is not None:
        path = data.pop("class_path")
        own = data.pop("own", None)
        table["data"] = {"class_path": path, "init_args": data if own is None else own}
    return table


def _plain(settings: Section) -> Iterator[tuple[str, Any]]:
    for field in msgspec.structs.fields(type(settings)):
        value = getattr(settings, field.name)
        if isinstance(value, Section):
            value = dict(_plain(value))
        elif isinstance(value, ClassSettings):
            value = {"class_path": value.class_path, "init_args": dict(value.init_args)}
        yield field.name, value


def config_text(settings: Section, omitted: Collection[str] = ()) -> str:
    """Return settings as the text of a config, without some by their full names."""
    table = to_config(settings)
    for name in omitted:
        group, _, last = name.rpartition(".")
        table[group].pop(last)
    return yaml_text.dump(table)


def flattened(
    kind: type[Section], values: Mapping[Any, Any], texts: Any, name: str = ""
) -> Iterator[tuple[str, Any]]:
    """Yield the settings in nested tables by their full names.

    Args:
        kind: The settings that there are.
        values: A table.
        texts: The same table of texts; the value itself if it is no table.
        name: The name of the table; "" for the whole.
    """
    settings = settings_of(kind)
    for key, value in values.items():
        text = texts.get(key, value) if isinstance(texts, Mapping) else value
        if key == "init_args" and isinstance(value, Mapping):
            yield from flattened(kind, value, text, name)
            continue
        full = ".".join(
            part for part in f"{name}.{key}".strip(".").split(".") if part != "init_args"
        )
        setting = settings.get(full)
        is_group = setting is None and any(one.startswith(f"{full}.") for one in settings)
        if isinstance(value, Mapping) and (is_group or is_class(kind, full)):
            yield from flattened(kind, value, text, full)
        elif is_class(kind, full) and not (is_group and value is None):
            yield f"{full}.class_path", value
        elif is_group and value is None:
            continue  # a table without settings
        elif setting is not None and value is not None and _is_read_as_text(setting, value):
            yield full, text
        else:
            yield full, value


def _is_read_as_text(setting: Setting, value: Any) -> bool:
    """Return whether the text of a file counts, not its value as YAML: for names, and for a folder called 2024."""
    if setting.about.holds_names:
        return True
    return not isinstance(value, list | dict) and not setting.accepts(value)
