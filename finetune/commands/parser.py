"""The parser of all commands. Its errors are one line and suggest the nearest valid flag or key."""

import argparse
import ast
import importlib
import inspect
import os
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

import jsonargparse
import yaml
from jsonargparse import ArgumentParser, Namespace, get_loader, set_loader

from finetune.commands.config_files import has_words, in_full_names
from finetune.commands.help_pages import PAGES
from finetune.commands.logger_names import replace_in_config
from finetune.commands.names import put_names
from finetune.commands.options import OPTIONS, Kind, flag_names, word_for
from finetune.commands.suggestions import (
    class_names,
    missing_value_message,
    nearest_option,
    unknown_option_message,
    wrong_value,
)
from finetune.system.messages import did_you_mean, is_bug, shown
from finetune.system.terminal import colored

_UNKNOWN = (
    re.compile(r"does not accept (?:nested )?option '(?P<key>[^']+)'"),
    re.compile(r"Option '(?P<key>[^']+)' is not accepted"),  # of a class that a class_path names
    re.compile(r"[Uu]nrecognized arguments?: (?P<key>--?[^\s=]+)"),
    re.compile(r"[Kk]ey '(?P<key>[^']+)' is not expected"),
    re.compile(r"Unknown argument:? '?(?P<key>[^\s']+)'?"),
)

_REQUIRED = re.compile(r"the following arguments are required: (.+)")
_NO_CHOICE = re.compile(r"argument --([\w.]+): invalid choice: '(.*)' \(choose from (.+)\)")
_NO_VALUE = re.compile(r"argument --([\w.]+): expected one argument")
# Parts of the message about a value that fits none of the types of a key.
_KEY = re.compile(r'Parser key "([^"]+)":')
_VALUE = re.compile(r"(?:.*Given|.*?Got) value: (.*)$", re.S)
_EXPECTED = re.compile(r"Expected an? (.+?)(?:\. Got value: .*)?$", re.M)
_NO_CLASS = re.compile(
    r"Expected a dot import path string: (?!-?(?:nan|inf)\s)(\S+)|module '\S+' has no attribute '(\S+?)'"
)
_NO_IMPORT = re.compile(r"(No module named '\S+?'|Multiple subclasses with name .+)$", re.M)
_CLASS = re.compile(r"<class '([^']+)'>|typing\.Literal\[([^]]+)\]")

# Beginnings of types in messages about jsonargparse's attempts to read the arguments of a class.
_OF_CLASSES = ("path but ", "dot import path")

_load_yaml = get_loader("yaml")


def _load(text: str) -> Any:
    """Read YAML, except text that is the name of a file or folder, such as `Dogs: 2024`."""
    if (": " in text or text.startswith(("[", "{"))) and os.path.lexists(text):
        return text
    content = _load_yaml(text)
    put_names(content, text)
    if isinstance(content, dict):
        replace_in_config(content)
    return content


set_loader("yaml", _load, (yaml.YAMLError,))


def _with_full_names(command: str, text: str, path: str) -> str:
    """Return the text of a config with full names in the place of short words.

    Raises:
        TypeError: The text is not a mapping in YAML; the parser reports the message.
    """
    name = path or "the config"
    try:
        content = _load_yaml(text)
        put_names(content, text)  # an error for a table that contains itself
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f", line {mark.line + 1}" if mark else ""
        problem = getattr(error, "problem", None) or str(error)
        raise TypeError(f"{name}{where}: not valid YAML: {problem}") from error
    if not isinstance(content, dict):
        raise TypeError(f"{name} is not a config: it has no settings such as `epochs: 10`")
    if not has_words(command, content):
        return text
    return yaml.safe_dump(in_full_names(command, content), sort_keys=False)


_read_by_locale = jsonargparse.Path.read_text


def _read_text(path: jsonargparse.Path) -> str:
    """Read a config as UTF-8; jsonargparse 4.53 reads files in the encoding of the locale."""
    is_file = not (path._std_io or path._is_url or path._is_fsspec)  # noqa: SLF001
    return Path(path.absolute).read_text("utf-8") if is_file else _read_by_locale(path)


jsonargparse.Path.read_text = _read_text  # type: ignore[method-assign, assignment]


class PlainHelpFormatter(argparse.RawDescriptionHelpFormatter):
    """Help with the line breaks of the description, and a default in brackets where there is one."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        text = action.help
        has_default = action.default not in (None, False, argparse.SUPPRESS)
        return f"{text} [%(default)s]" if text and has_default else text


class OneLineErrorParser(ArgumentParser):
    """A parser whose errors are one line on stderr, with exit code 2. Flags cannot be abbreviated.

    Attributes:
        command: The command, if it is not the last word of `prog`.
    """

    command = ""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **{"allow_abbrev": False, **kwargs})

    def _load_config_parser_mode(
        self, content: str, path: Any = "", *args: Any, **kwargs: Any
    ) -> Namespace:
        """Read a config, which may have short words."""
        text = _with_full_names(command_of(self), content, str(path))
        return super()._load_config_parser_mode(text, path, *args, **kwargs)

    def error(self, message: str, ex: Exception | None = None) -> NoReturn:
        if ex is not None and is_bug(ex):
            raise ex
        line = f"finetune: error: {shown(explain(self, message))}"
        print(colored(line, "red", sys.stderr), file=sys.stderr)
        self.exit(2)


def explain(parser: ArgumentParser, message: str) -> str:
    """Return an error message in one line, with the same text as the checks before torch is imported."""
    command = command_of(parser)
    for pattern in _UNKNOWN:
        if match := pattern.search(message):
            key = match["key"]
            valid = valid_keys(parser)
            if key.lstrip("-") in ("", "config"):
                break
            if nearest_option(key.lstrip("-"), valid) == key.lstrip("-"):
                return f"{key!r} is an option of another command"
            return unknown_option_message(command, key, valid)
    if match := _NO_VALUE.match(message):
        return missing_value_message(command, match[1])
    if match := _REQUIRED.match(message):
        page = PAGES.get(command)
        usage = f"finetune {command} {page.usage}" if page else f"{parser.prog} --help"
        return f"{match[1].upper()} is missing: {usage}"
    if match := _NO_CHOICE.match(message):
        choices = [choice.strip(" '") for choice in match[3].split(",")]
        return f"{flag_names(command, match[1])} {wrong_value(match[2], choices)}"
    if key := _KEY.match(message):
        return _explain_value(command, key[1], message)
    return _in_one_line(message)


def _explain_value(command: str, key: str, message: str) -> str:
    """Return an error message about the value of a key in one line."""
    word = word_for(key)
    option = f"{key} (--{word})" if word else key
    if missing := _NO_CLASS.search(message):
        name = missing[1] or missing[2]
        names = class_names(key)
        hint = did_you_mean(name.rpartition(".")[2], names) if names else ""
        return f"{option}: there is no class {name!r}{hint}"
    if not_imported := _NO_IMPORT.search(message):
        return f"{option}: {not_imported[1]}"
    value = _VALUE.match(message)
    if value is None:
        return _in_one_line(message)
    text = " ".join(value[1].split())
    expected = _EXPECTED.findall(message)
    kind = OPTIONS.get(command, {}).get(key) or _kind(expected)
    name = flag_names(command, key) if command else key
    if wrong := wrong_value(text, kind):
        return f"{name} {wrong}"
    plain = (_CLASS.sub(_plain_type, one) for one in expected)
    types = dict.fromkeys(one for one in plain if not one.startswith(_OF_CLASSES))
    invalid = f"{option}: {text} is not valid"
    has_types = types.keys() - {"null"}  # else the other types are classes
    return f"{invalid}; expected {' or '.join(types)}" if has_types else invalid


def command_of(parser: ArgumentParser) -> str:
    """Return the command of a parser, or of its only subcommand; "" for the parser of the arguments of a class."""
    for action in parser._actions:
        for subparser in (getattr(action, "_name_parser_map", None) or {}).values():
            return command_of(subparser)
    _, *words = parser.prog.split()
    return getattr(parser, "command", "") or (words[-1] if words else "")


def _kind(expected: Sequence[str]) -> Kind:
    """Return the kind of value that the types in a message mean."""
    types = [name for name in expected if name != "<class 'NoneType'>"]
    if types == ["<class 'int'>"]:
        return "whole number"
    if types and all(name in ("<class 'int'>", "<class 'float'>") for name in types):
        return "number"
    literals = [re.fullmatch(r"typing\.Literal(\[[^]]+\])", name) for name in types]
    if len(literals) == 1 and literals[0]:
        return [str(choice) for choice in ast.literal_eval(literals[0][1])]
    return None


def _in_one_line(message: str) -> str:
    lines = [line.strip() for line in message.splitlines() if line.strip()]
    text = " ".join(lines)
    return text if len(text) < 500 else f"{text[:400]} … {text[-80:]}"


def _plain_type(match: re.Match[str]) -> str:
    return match[2] or ("null" if match[1] == "NoneType" else match[1])


def valid_keys(parser: ArgumentParser) -> list[str]:
    """Return the dotted names of all options of a parser and of its subcommands."""
    keys: list[str] = []
    for action in parser._actions:
        keys += [option.lstrip("-") for option in action.option_strings]
        default: Any = action.default
        # the arguments of the default class are options, too
        if isinstance(default, (dict, Namespace)) and "class_path" in default:
            module, _, name = default["class_path"].rpartition(".")
            arguments = inspect.signature(getattr(importlib.import_module(module), name)).parameters
            keys += [f"{action.dest}.{argument}" for argument in arguments]
        choices: Any = getattr(action, "_name_parser_map", None) or {}
        for subparser in choices.values():
            keys += valid_keys(subparser)
    return sorted({key for key in keys if " " not in key})  # links have names with an arrow
