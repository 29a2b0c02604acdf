"""The parser of all commands: wrong flags and keys in one line with the nearest right one; what a command line says."""

import importlib
import inspect
import os
import re
import sys
from pathlib import Path
from typing import Any, NoReturn

import jsonargparse
import yaml
from jsonargparse import ArgumentParser, Namespace, get_loader, set_loader

from finetune import public_paths
from finetune.commands import logger_names
from finetune.commands.options import word_for
from finetune.commands.suggestions import class_names, nearest_key
from finetune.system.messages import did_you_mean, shown

_UNKNOWN = (
    re.compile(r"does not accept (?:nested )?option '(?P<key>[^']+)'"),
    re.compile(r"Option '(?P<key>[^']+)' is not accepted"),  # of a class that a class_path names
    re.compile(r"[Uu]nrecognized arguments?: (?P<key>--?[^\s=]+)"),
    re.compile(r"[Kk]ey '(?P<key>[^']+)' is not expected"),
    re.compile(r"Unknown argument:? '?(?P<key>[^\s']+)'?"),
)

# A value that fits none of the types that a key may have.
_KEY = re.compile(r'Parser key "([^"]+)":')
_VALUE = re.compile(r"(?:.*Given|.*?Got) value: (.*)$", re.S)
_EXPECTED = re.compile(r"Expected an? (.+?)(?:\. Got value: .*)?$", re.M)
_NO_CLASS = re.compile(
    r"Expected a dot import path string: (\S+)|module '\S+' has no attribute '(\S+?)'"
)
_CLASS = re.compile(r"<class '([^']+)'>|typing\.Literal\[([^]]+)\]")

_OF_CLASSES = ("path but ", "dot import path")  # how jsonargparse tried to read a class's arguments

_load_yaml = get_loader("yaml")


def _load(text: str) -> Any:
    """Read YAML, but no name of what is there, such as a folder `Dogs: 2024`, as if it were some."""
    if (": " in text or text.startswith(("[", "{"))) and os.path.lexists(text):
        return text
    # Configs of earlier versions name our classes by their modules.
    return logger_names.in_config(public_paths(_load_yaml(text)))


set_loader("yaml", _load, (yaml.YAMLError,))

_read_by_locale = jsonargparse.Path.read_text


def _read_text(path: jsonargparse.Path) -> str:
    """Read a config as UTF-8; jsonargparse 4.53 reads files in the encoding of the locale."""
    is_file = not (path._std_io or path._is_url or path._is_fsspec)
    return Path(path.absolute).read_text("utf-8") if is_file else _read_by_locale(path)


jsonargparse.Path.read_text = _read_text  # type: ignore[method-assign, assignment]


class OneLineErrorParser(ArgumentParser):
    """A parser whose errors are one line on stderr and exit code 2; the beginning of a flag is not the flag."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **{"allow_abbrev": False, **kwargs})

    def error(self, message: str, ex: Exception | None = None) -> NoReturn:
        print(f"finetune: error: {shown(explain(self, message))}", file=sys.stderr)
        self.exit(2)


def explain(parser: ArgumentParser, message: str) -> str:
    """Return `message` in one line; if it is about an unknown key, with the nearest valid one."""
    for pattern in _UNKNOWN:
        if match := pattern.search(message):
            key = match["key"]
            valid = valid_keys(parser)
            if key.lstrip("-") in ("", "config"):
                break
            nearest = nearest_key(key.lstrip("-"), valid)
            if nearest == key.lstrip("-"):
                return f"{key!r} is an option of another command"
            return f"there is no option {key!r}" + (
                f"; did you mean {nearest!r}?" if nearest else ""
            )
    if key := _KEY.match(message):
        word = word_for(key[1])
        option = f"{key[1]} (--{word})" if word else key[1]
        if missing := _NO_CLASS.search(message):
            name = missing[1] or missing[2]
            names = class_names(key[1])
            hint = did_you_mean(name.rpartition(".")[2], names) if names else ""
            return f"{option}: there is no class {name!r}{hint}"
        if value := _VALUE.match(message):
            plain = (_CLASS.sub(_plain_type, expected) for expected in _EXPECTED.findall(message))
            types = dict.fromkeys(kind for kind in plain if not kind.startswith(_OF_CLASSES))
            told = f"{option}: {' '.join(value[1].split())} is not valid"
            return f"{told}; expected {' or '.join(types)}" if types else told
    lines = [line.strip() for line in message.splitlines() if line.strip()]
    text = " ".join(lines)
    return text if len(text) < 500 else f"{text[:400]} … {text[-80:]}"


def _plain_type(match: re.Match[str]) -> str:
    return match[2] or ("null" if match[1] == "NoneType" else match[1])


def valid_keys(parser: ArgumentParser) -> list[str]:
    """Return the dotted names of all options of a parser, those of its subcommands included."""
    keys: list[str] = []
    for action in parser._actions:
        keys += [option.lstrip("-") for option in action.option_strings]
        default: Any = action.default
        # its arguments can be given, too
        if isinstance(default, (dict, Namespace)) and "class_path" in default:
            module, _, name = default["class_path"].rpartition(".")
            arguments = inspect.signature(getattr(importlib.import_module(module), name)).parameters
            keys += [f"{action.dest}.{argument}" for argument in arguments]
        choices: Any = getattr(action, "_name_parser_map", None) or {}
        for subparser in choices.values():
            keys += valid_keys(subparser)
    return sorted({key for key in keys if " " not in key})  # links have names with an arrow
