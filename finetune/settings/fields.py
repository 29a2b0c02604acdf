"""A setting is a typed field of a section: its name, type, range, default and help stand there and nowhere else.

Help pages, docs/reference.md, hints for typos, the command line, configs, the arguments of the Python API, the values
in a checkpoint and what `--resume` compares are loops over these fields. Text is read as YAML 1.2: `yes`, `no` and
`007` are words, as names of classes often are.
"""

import difflib
import importlib
import inspect
import math
import os
import re
from collections.abc import Iterator, Mapping
from contextlib import suppress
from functools import lru_cache
from typing import Annotated, Any, ClassVar, Literal, NamedTuple, TypeVar, get_args, get_origin

import msgspec
import yaml
from msgspec import NODEFAULT
from msgspec import inspect as hints

from finetune.system.messages import WrongUsage, did_you_mean

# What `--resume` does with a setting that has another value than in the run:
#   changes  it takes the new value, and says so
#   free     it takes the new value, which has no effect on the result
#   fixed    it refuses: the checkpoint of the run decides it
#   order    it refuses without --allow_changes: images would come in another order
#   images   as `order` if the images differ, else as `free`
Resume = Literal["changes", "free", "fixed", "order", "images"]

_PATHS = frozenset({"CKPT", "FILE", "FOLDER", "TABLE"})  # titles of types that are paths
_ATTRIBUTE = re.compile(r"^ {8}(\w+): (.*(?:\n {12}.*)*)", re.MULTILINE)
_LONGEST_CHOICES = 16  # characters of a placeholder
_Number = hints.IntType | hints.FloatType
_EXPONENT = r"[-+]?[0-9]+[eE][-+]?[0-9]+$"  # 1e5, which YAML 1.1 takes for a word
# Which text is no word, as in the core schema of YAML 1.2.
_VALUES = {
    "null": r"(null|Null|NULL|~|)$",
    "bool": r"(true|True|TRUE|false|False|FALSE)$",
    "int": r"[-+]?(0|[1-9][0-9]*)$",
    "float": rf"[-+]?([0-9]+\.[0-9]*|\.[0-9]+)([eE][-+]?[0-9]+)?$|{_EXPONENT}",
}


class YAMLLoader(yaml.SafeLoader):
    """Reads YAML 1.2 without aliases, and refuses a key that stands twice in a table: the first value would be lost."""

    yaml_implicit_resolvers: dict[Any, Any] = {}  # noqa: RUF012 (as in the base class)

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        if self.check_event(yaml.AliasEvent):
            mark = self.peek_event().start_mark
            raise yaml.composer.ComposerError(None, None, "aliases are not supported", mark)
        return super().compose_node(parent, index)

    def table(self, node: yaml.MappingNode) -> dict[str, Any]:
        table: dict[str, Any] = {}
        for key, value in node.value:
            if not isinstance(key, yaml.ScalarNode) or key.value in table:
                why = f"the key {key.value} is there twice, or is no word"
                raise yaml.constructor.ConstructorError(None, None, why, key.start_mark)
            table[key.value] = self.construct_object(value, deep=True)
        return table


YAMLLoader.add_constructor("tag:yaml.org,2002:map", YAMLLoader.table)
for _tag, _pattern in _VALUES.items():
    YAMLLoader.add_implicit_resolver(f"tag:yaml.org,2002:{_tag}", re.compile(_pattern), None)


class YAMLDumper(yaml.SafeDumper):
    """Writes in quotes what is no word in YAML 1.1 or 1.2."""


YAMLDumper.add_implicit_resolver("tag:yaml.org,2002:float", re.compile(_EXPONENT), None)


def from_text(text: str) -> Any:
    """Return the value of an argument of the command line: only lists and tables are in the form of YAML."""
    loader = YAMLLoader(text if text[:1] in ("[", "{") else "")
    with suppress(yaml.YAMLError):
        value = loader.get_single_data()
        if value is not None:
            return value
    node = yaml.ScalarNode(loader.resolve(yaml.ScalarNode, text, (text != "", False)), text)
    return YAMLLoader("").construct_object(node)


class About(msgspec.Struct, frozen=True):
    """What is known about a setting beside its type, default and help.

    Attributes:
        word: The short word for it; "" for none.
        place: The positional arguments in the usage line, if it is one of them; "" if it is not positional.
        value: Placeholder of the value, if neither its type nor its name says it.
        also: Its names in other tools, separated by spaces, where the most similar name here is another setting's.
        resume: What `--resume` does if it has another value than in the run.
        holds_names: Whether the value has names of classes or columns: `null`, `no` and `007` are text there.
        arguments: For a class with arguments: those that have a help text.
    """

    word: str = ""
    place: str = ""
    value: str = ""
    also: str = ""
    resume: Resume = "changes"
    holds_names: bool = False
    arguments: "type[Section] | None" = None


class Page(msgspec.Struct, frozen=True):
    """The help page of a command.

    Attributes:
        usage: The usage line after the command.
        text: What the command does.
        examples: Command lines, without `finetune`.
        sections: For each heading the options below it, by their short words or full names; without any all options.
    """

    usage: str
    text: str
    examples: tuple[str, ...]
    sections: dict[str, str] = {}


class Section(msgspec.Struct, frozen=True, kw_only=True):
    """A group of settings. A field is a setting if it is among the attributes in the docstring, which has its help.

    A field whose type is a section is a group of settings in it.

    Attributes:
        page: The help page, if it is the section of a command.
        ignored: The beginnings of the names of settings that configs may have, and that have no flag.
    """

    page: ClassVar[Page]
    ignored: ClassVar[tuple[str, ...]] = ()


class ClassSettings(msgspec.Struct, frozen=True):
    """A class and its arguments, such as an optimizer.

    Attributes:
        class_path: Its import path, such as torch.optim.SGD.
        init_args: Its keyword arguments.
    """

    class_path: str
    init_args: dict[str, Any] = {}

    def imported(self, setting: str, base: type) -> Any:
        """Return the class.

        Args:
            setting: The setting that has it, for the error.
            base: A class of which it must be a subclass.

        Raises:
            WrongUsage: There is no such subclass, or it does not take these arguments.
        """
        kind = import_class(self.class_path, setting)
        if not (isinstance(kind, type) and issubclass(kind, base)):
            text = f"{self.class_path} is not a subclass of {base.__name__}"
            raise WrongUsage(text, setting)
        for name in self.init_args:
            if not takes_argument(kind, name):
                hint = did_you_mean(name, list(inspect.signature(kind).parameters))
                text = f"{kind.__name__} has no argument {name!r}{hint}"
                raise WrongUsage(text, f"{setting}.{name}")
        return kind


def class_paths(value: Any) -> Iterator[Any]:
    """Yield every `class_path` in nested values."""
    if isinstance(value, Mapping) and "class_path" in value:
        yield value["class_path"]
    if isinstance(value, Mapping | list | tuple):
        for inner in value.values() if isinstance(value, Mapping) else value:
            yield from class_paths(inner)


def import_class(class_path: str, setting: str) -> Any:
    """Return the class of an import path.

    Raises:
        WrongUsage: There is no such class; the message begins with the setting that has it.
    """
    place, _, name = class_path.rpartition(".")
    try:
        module = importlib.import_module(place)
        return getattr(module, name)
    except (ImportError, ValueError) as error:
        raise WrongUsage(f"cannot import {class_path!r}: {error}", setting) from error
    except AttributeError as error:
        names = [one for one in dir(module) if not one.startswith("_")]
        raise WrongUsage(f"{place} has no {name!r}{did_you_mean(name, names)}", setting) from error


def takes_argument(kind: Any, name: str) -> bool:
    """Return whether a class takes an argument of this name."""
    parameters = inspect.signature(kind).parameters
    takes_any = any(one.kind is inspect.Parameter.VAR_KEYWORD for one in parameters.values())
    return takes_any or name in parameters


S = TypeVar("S", bound=Section)


class Setting(NamedTuple):
    """A setting.

    Attributes:
        name: Its full name, as in config.yaml: data.batch_size.
        type: The type of its values, with their range.
        default: Its default.
        help: What it does, with its unit. The short page of a command shows the first sentence.
        about: More about it.
    """

    name: str
    type: Any
    default: Any
    help: str = ""
    about: About = About()

    @property
    def types(self) -> list[hints.Type]:
        """The types of which a value has one."""
        info = hints.type_info(self.type)
        return list(info.types) if isinstance(info, hints.UnionType) else [info]

    @property
    def is_switch(self) -> bool:
        """Whether its flag may stand without a value, which is true."""
        return any(isinstance(one, hints.BoolType) for one in self.types)

    @property
    def title(self) -> str:
        """The title of its type, such as FOLDER; "" for none."""
        extras = [
            one.extra_json_schema or {} for one in self.types if isinstance(one, hints.Metadata)
        ]
        return next((extra["title"] for extra in extras if "title" in extra), "")

    @property
    def is_path(self) -> bool:
        return self.title in _PATHS

    @property
    def placeholder(self) -> str:
        """What stands for its value on help pages; "" for a switch."""
        if self.about.value or self.title:
            return self.about.value or self.title
        if self.is_switch:
            return "" if self.default is False else "true|false"
        if len(choices := "|".join(self.choices)) <= _LONGEST_CHOICES and choices:
            return choices
        is_number = any(isinstance(_bare(one), _Number) for one in self.types)
        return "N" if is_number else self.name.rpartition(".")[2].upper()

    @property
    def is_list(self) -> bool:
        """Whether it has several values, which a text separates by commas."""
        kinds = [type(_bare(one)) for one in self.types]
        return hints.ListType in kinds and hints.StrType not in kinds

    @property
    def choices(self) -> list[str]:
        """The words that its values are; an empty list if there are other values than words and null."""
        types = [one for one in self.types if not isinstance(one, hints.NoneType)]
        literals = [one for one in types if isinstance(one, hints.LiteralType)]
        return [str(word) for one in literals for word in one.values] if types == literals else []

    def read(self, value: Any, is_text: bool = False) -> Any:
        """Return the value that a config, a program, or the text of an argument means.

        Raises:
            WrongUsage: It is of another type, or out of range.
        """
        meant = from_text(value) if is_text else value
        if self.about.holds_names:
            is_number = is_text and isinstance(meant, bool | int | float)
            meant = _as_names(value if is_number else meant)
        candidates = [meant, value] if is_text else [meant]
        if isinstance(meant, int) and not isinstance(meant, bool):
            candidates.append(str(meant))
        for candidate in candidates:
            with suppress(WrongUsage):
                return self.converted(candidate)
        shown = meant if isinstance(meant, int | float) else value
        raise WrongUsage(self.why_wrong(shown), self.name)

    def converted(self, value: Any) -> Any:
        """Return a value as the type of the setting; text is not read as anything else.

        Raises:
            WrongUsage: It is of another type, or out of range.
        """
        if isinstance(value, os.PathLike):
            value = os.fspath(value)
        if isinstance(value, str) and self.is_path:
            value = os.path.expanduser(value)
        if isinstance(value, str) and self.is_list:
            names = [value] if self.about.holds_names else value.split(",")
            value = [name.strip() for name in names]
        # weights of classes are text next to their names
        with suppress(msgspec.ValidationError, OverflowError):
            converted = msgspec.convert(value, self.type, strict=not self.about.holds_names)
            if not isinstance(converted, float) or math.isfinite(converted):
                return converted
        raise WrongUsage(self.why_wrong(value), self.name)

    def accepts(self, value: Any) -> bool:
        """Return whether a value has exactly its type and is in range; text is not read as anything else."""
        try:
            msgspec.convert(value, self.type)
        except (msgspec.ValidationError, OverflowError):
            return False
        return not isinstance(value, float) or math.isfinite(value)

    def why_wrong(self, value: Any) -> str:
        """Return what its values are, for a value that is none."""
        shown = repr(value) if isinstance(value, str) else str(value)
        if self.choices and isinstance(value, str):
            return f"cannot be {shown}{did_you_mean(value, self.choices)}"
        return f"takes {expected(self)}, not {shown[:200]}"


def _as_names(value: Any) -> Any:
    """Return a value in which numbers are text: names of classes and columns may look like numbers."""
    if isinstance(value, Mapping):
        return {str(key): _as_names(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_as_names(inner) for inner in value]
    return str(value) if isinstance(value, int | float) and not isinstance(value, bool) else value


def _bare(info: hints.Type) -> hints.Type:
    """Return a type without its title."""
    return info.type if isinstance(info, hints.Metadata) else info


def expected(setting: Setting) -> str:
    """Return the values of a setting in words, with their range."""
    words = [_in_words(one) for one in setting.types if not isinstance(one, hints.NoneType)]
    return " or ".join(dict.fromkeys(words)) or "null"


def _in_words(info: hints.Type) -> str:
    info = _bare(info)
    if isinstance(info, hints.IntType):
        return f"a whole number{_range(info)}"
    if isinstance(info, hints.FloatType):
        return f"a number{_range(info)}"
    if isinstance(info, hints.LiteralType):
        return " or ".join(map(str, info.values))
    kinds: dict[type, str] = {
        hints.BoolType: "true or false",
        hints.StrType: "text that is not empty" if getattr(info, "min_length", None) else "text",
        hints.ListType: "a list",
        hints.VarTupleType: "a list",
        hints.DictType: "a table",
    }
    return kinds.get(type(info), "another value")


def _range(info: hints.IntType | hints.FloatType) -> str:
    """Return the range of a number, as the end of its description."""
    if info.ge is not None and info.le is not None:
        return f" from {info.ge:,} to {info.le:,}"
    parts = [f"above {info.gt:,}"] if info.gt is not None else []
    parts += [f"at least {info.ge:,}"] if info.ge is not None else []
    parts += [f"below {info.lt:,}"] if info.lt is not None else []
    parts += [f"at most {info.le:,}"] if info.le is not None else []
    return f", {' and '.join(parts)}" if parts else ""


@lru_cache
def settings_of(kind: type[Section], prefix: str = "") -> Mapping[str, Setting]:
    """Return the settings of a section and of the sections in it, by full name."""
    found: dict[str, Setting] = {}
    helps = helps_of(kind)
    for field in msgspec.structs.fields(kind):
        name = f"{prefix}{field.name}"
        default = field.default
        if field.default_factory is not NODEFAULT:
            default = field.default_factory()
        hint = field.type
        if (section := section_in(hint)) is not None:
            found |= settings_of(section, f"{name}.")
            continue
        if field.name not in helps:
            continue
        base, *metadata = get_args(hint) if get_origin(hint) is Annotated else [hint]
        about = next((one for one in metadata if isinstance(one, About)), About())
        meta = tuple(one for one in metadata if one is not about)
        values = Annotated[(base, *meta)] if meta else base
        found[name] = Setting(name, values, default, helps[field.name], about)
        if about.arguments is not None:
            found |= settings_of(about.arguments, f"{name}.")
    return found


def section_in(hint: Any) -> type[Section] | None:
    """Return the section that a type is, or that values of it may have; None for none."""
    types = (one for one in (hint, *get_args(hint)) if isinstance(one, type))
    return next((one for one in types if issubclass(one, Section)), None)


def helps_of(kind: type) -> dict[str, str]:
    """Return the texts of the attributes in the docstring of a class such as a section, and of its bases."""
    helps: dict[str, str] = {}
    for base in kind.__mro__:
        _, _, attributes = (base.__doc__ or "").partition("\n    Attributes:\n")
        for name, text in _ATTRIBUTE.findall(attributes):
            helps.setdefault(name, " ".join(text.split()))
    return helps


def find_setting(kind: type[Section], name: str) -> Setting | None:
    """Return the setting of a name, also of an argument of a class that has no help text; None for none."""
    settings = settings_of(kind)
    group, _, last = name.rpartition(".")
    if (
        name in settings
        or group not in settings
        or settings[group].about.arguments is None
        or not last
    ):
        return settings.get(name)
    return Setting(name, Any, None, about=settings[group].about)


def is_class(kind: type[Section], name: str) -> bool:
    """Return whether a setting is a class: that of the data, or one with arguments such as the optimizer."""
    settings = settings_of(kind)
    if name == "data":
        return "data.class_path" in settings
    return name in settings and settings[name].about.arguments is not None


def has_flag(kind: type[Section], name: str) -> bool:
    """Return whether a setting, or an argument of a class, is an option of the command line."""
    return find_setting(kind, name) is not None and not name.startswith(kind.ignored)


@lru_cache
def words_of(kind: type[Section]) -> Mapping[str, str]:
    """Return the full name of each short word of a command.

    A command's own option takes the place of a word of the sections that it shares: `--out` of predict.
    """
    settings = settings_of(kind)
    shared_first = sorted(settings.values(), key=lambda one: "." not in one.name)
    named = [one for one in shared_first if one.about.word and has_flag(kind, one.name)]
    words = {one.about.word: one.name for one in named}
    return {word: name for word, name in words.items() if word not in settings}


def option_name(kind: type[Section], name: str, command: str) -> str:
    """Return a setting as messages write it: its place or short word, and the full flag."""
    settings = settings_of(kind)
    last = name.rpartition(".")[2]
    name = last if name not in settings and last in settings else name  # of a command of our own
    setting = settings.get(name)
    if setting is not None and setting.about.place and setting.about.place in kind.page.usage:
        return f"finetune {command} {setting.about.place} (--{name})"
    word = next((word for word, full in words_of(kind).items() if full == name), None)
    return f"--{word} (--{name})" if word else f"--{name}"


def nearest(kind: type[Section], typed: str) -> str | None:
    """Return the full name of the setting that was probably meant by a name that there is not."""
    settings = settings_of(kind)
    words = words_of(kind)
    name = typed.replace("-", "_").lower().rpartition(".")[2]
    meant = {full.rpartition(".")[2]: full for full in sorted(settings, reverse=True)}
    meant = {last: full for last, full in meant.items() if has_flag(kind, full)}
    for full, setting in settings.items():
        if has_flag(kind, full):
            meant |= dict.fromkeys(setting.about.also.split(), full)
    meant |= words
    found = difflib.get_close_matches(name, meant, n=1, cutoff=0.75)
    return meant.get(name) or (meant[found[0]] if found else None)


def own_arguments(kind: type[Section], values: Mapping[str, Any]) -> dict[str, Any]:
    """Return those of some values that are settings of a section, by the names of its fields."""
    return {name: values[name] for name in settings_of(kind) if name in values}


def check_section(kind: type[S], values: Mapping[str, Any], prefix: str = "") -> S:
    """Return the section with these values, which must have exactly its types and ranges.

    Args:
        kind: The section.
        values: Values by the names of its fields; the others have their defaults.
        prefix: The group of the section, for the error.

    Raises:
        WrongUsage: A value has another type, or is out of range.
    """
    settings = settings_of(kind, prefix)
    checked = {
        name: settings[f"{prefix}{name}"].converted(value)
        if f"{prefix}{name}" in settings
        else value
        for name, value in values.items()
    }
    return kind(**checked)
