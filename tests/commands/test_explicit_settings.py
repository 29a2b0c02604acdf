"""Which settings configs and flags give, in every spelling, compared with the real parser."""

import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from command_lines import ParseOnly
from jsonargparse import ArgumentParser

from finetune.commands import explicit_settings
from finetune.commands.explicit_settings import ExplicitSettings, read_explicit_settings

VALUES: dict[str, Any] = {
    "data.class_path": "finetune.Hotdog",
    "data.root": "photos",
    "data.image_size": 32,
    "data.batch_size": 8,
    "model.members": 2,
    "model.backbone": "resnet18",
    "model.optimizer.class_path": "torch.optim.Adam",
    "model.optimizer.lr": 0.25,
    "model.optimizer.weight_decay": 0.5,
    "trainer.max_epochs": 3,
    "trainer.devices": 1,
    "patience": 4,
}
WORDS_OF = {
    "data.image_size": "size",
    "data.batch_size": "batch",
    "model.members": "members",
    "model.backbone": "backbone",
    "model.optimizer.class_path": "optimizer",
    "model.optimizer.lr": "lr",
    "trainer.max_epochs": "epochs",
    "trainer.devices": "devices",
}
CLASSES = {"data.class_path", "model.optimizer.class_path"}
NUM_LINES = 150

# run_lightning would silence it; here it is an error.
pytestmark = pytest.mark.filterwarnings("ignore:LightningCLI's args parameter")


class Writer:
    """Writes settings in random spellings.

    Attributes:
        flags: The names that flags give.
        configs: The names that each config gives.
        arguments: The command line.
    """

    def __init__(self, seed: int, folder: Path, is_plain: bool = False) -> None:
        self.random = random.Random(seed)
        self.is_plain = is_plain
        self.folder = folder
        self.configs = [self._names() for _ in range(self.random.randrange(4))]
        self.flags = {"data.root", *self._names()}  # the parser requires data
        self.arguments = ["fit"]
        for names in self.configs:
            self.arguments += self._flag("config", self._config(names))
        parts = list(self._flags(self.flags))
        self.random.shuffle(parts)
        self.arguments += [word for part in parts for word in part]

    def _names(self) -> set[str]:
        return {name for name in VALUES if self.random.random() < 0.3}

    def _flag(self, name: str, value: Any) -> list[str]:
        text = value if isinstance(value, str) else json.dumps(value)
        return [f"--{name}={text}"] if self.random.random() < 0.5 else [f"--{name}", text]

    def _flags(self, names: set[str]) -> Iterator[list[str]]:
        tables: dict[str, set[str]] = {"data": set(), "model.optimizer": set(), "model": set()}
        tables["trainer"] = set()
        for name in sorted(names):
            group = next((group for group in tables if name.startswith(f"{group}.")), "")
            if group and self.random.random() < 0.4:
                tables[group].add(name)
                continue
            key = name
            if group in ("data", "model.optimizer") and self.random.random() < 0.5:
                if name in CLASSES and not self.is_plain:
                    key = group  # the name of the class alone
                elif name in CLASSES:
                    key = name
                else:
                    key = name.replace(f"{group}.", f"{group}.init_args.")
            yield self._flag(key, VALUES[name])
        for group, inside in tables.items():
            if not inside:
                continue
            if group == "model":
                inside |= tables["model.optimizer"] if self.random.random() < 0.5 else set()
            is_of_class = group in ("data", "model.optimizer") and not inside & CLASSES
            if is_of_class and self.random.random() < 0.5:
                yield self._flag(f"{group}.init_args", self._values(group, inside))
            else:
                yield self._flag(group, self._table(group, inside, self.folder))

    def _values(self, group: str, names: set[str]) -> dict[str, Any]:
        return {name.removeprefix(f"{group}."): VALUES[name] for name in sorted(names)}

    def _table(self, group: str, names: set[str], folder: Path, is_inside: bool = False) -> Any:
        """Return a group of settings as a table, or the path of a file with it, relative to a folder."""
        table: dict[str, Any] = {}
        inner = {name for name in names if name.startswith("model.optimizer.")}
        if group == "model" and inner:
            table["optimizer"] = self._table("model.optimizer", inner, folder / "tables", is_inside)
            names = names - inner
        for name in sorted(names):
            key = name.removeprefix(f"{group}.")
            if group in ("data", "model.optimizer") and name not in CLASSES:
                table.setdefault("init_args", {})[key] = VALUES[name]
            else:
                table[key] = VALUES[name]
        is_inside = is_inside or (self.is_plain and group == "model.optimizer")
        has_files = "optimizer" in table and not self.is_plain
        if is_inside or (self.random.random() < 0.5 and not has_files):
            return table
        path = folder / "tables" / f"{self.random.randrange(10**9)}.yaml"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(yaml.safe_dump(table))
        is_relative = folder != self.folder and not self.is_plain
        return str(path.relative_to(folder) if is_relative else path)

    def _config(self, names: set[str]) -> str:
        content: dict[str, Any] = {}
        place = self.folder / "configs"
        place.mkdir(exist_ok=True)
        has_words = self.random.random() < 0.3
        in_words = {name for name in names if has_words and name in WORDS_OF}
        for group in ("data", "model", "trainer"):
            inside = {name for name in names - in_words if name.startswith(f"{group}.")}
            if inside and has_words:
                content[group] = self._table(group, inside, place, is_inside=True)
                continue
            if inside and not self.is_plain and self.random.random() < 0.2:  # dotted keys
                content |= {name: VALUES[name] for name in inside}
            elif inside:
                content[group] = self._table(group, inside, place)
        content |= {name: VALUES[name] for name in names if "." not in name}
        content |= {WORDS_OF[name]: VALUES[name] for name in in_words}
        path = place / f"{self.random.randrange(10**9)}.yaml"
        path.write_text(yaml.safe_dump(content or {"patience": 4}))
        if not content:
            names.add("patience")
        return str(path)


@pytest.fixture
def lines(tmp_path: Path) -> list[Writer]:
    return [Writer(seed, tmp_path) for seed in range(NUM_LINES)]


@pytest.fixture
def parser(monkeypatch: pytest.MonkeyPatch) -> ArgumentParser:
    monkeypatch.setenv("PL_GLOBAL_SEED", "0")
    return ParseOnly(["fit", "--data.root", "."]).parser


def wrong(lines: list[Writer]) -> list[list[str]]:
    """Return the command lines that are not read as they were written."""
    found = []
    for line in lines:
        given = read_explicit_settings(line.arguments)
        configs = [set(config.settings) for config in given.configs]
        if set(given.flags) != line.flags or configs != line.configs:
            found.append(line.arguments)
    return found


def test_every_spelling_is_read_as_it_was_written(lines):
    assert not wrong(lines)


@pytest.mark.parametrize(
    ("broken", "instead"),
    [
        ("_plain", lambda name: name),
        ("_read_table", lambda text, folder: (text, folder)),
        ("in_full_names", lambda command, table: table),
    ],
)
def test_control_a_reader_that_lacks_a_spelling_is_noticed(lines, monkeypatch, broken, instead):
    monkeypatch.setattr(explicit_settings, broken, instead)
    assert len(wrong(lines)) > NUM_LINES / 4


def test_the_parser_reads_the_same(tmp_path, parser):
    num_accepted = 0
    num_lines = NUM_LINES // 3  # the parser takes its time
    for line in [Writer(seed, tmp_path, is_plain=True) for seed in range(num_lines)]:
        try:
            found = parser.parse_args(line.arguments, defaults=False)["fit"].as_flat()
        except SystemExit:
            continue  # a spelling that it does not have
        num_accepted += 1
        names = {name.replace(".init_args", "") for name in vars(found)}
        names = {name for name in names if "__path__" not in name and name != "config"}
        written = line.flags.union(*line.configs)
        # It adds the class of the default, which nobody named.
        assert names - CLASSES == written - CLASSES and written <= names, line.arguments
    assert num_accepted > num_lines / 2


@pytest.mark.parametrize(
    ("arguments", "answer"),
    [
        (["--data.size", "3"], True),
        (["--data.init_args.size=3"], True),
        (["--data", "{init_args: {size: 3}}"], True),
        (["--data={size: 3}", "--data", "finetune.Hotdog"], True),
        (["--data.init_args={size: 3}"], True),
        (["--data.size.least", "3"], True),  # a part of it
        (["--data.size+", "3"], True),
        (["--data.sizes", "3"], False),
        (["--data", "{class_path: finetune.Hotdog}", "--model.size", "3"], False),
        (["--config", "{data: {size: 3}}"], False),  # a config's
    ],
)
def test_a_flag_gives_a_setting(arguments, answer):
    assert read_explicit_settings(["fit", *arguments]).has_flag("data.size") == answer


def test_a_class_is_named_only_where_its_name_is_written():
    """A checkpoint may bring its own data class only if the user has named it."""
    for unnamed in (["--data.root", "x"], ["--data", "{init_args: {root: x}}"]):
        assert read_explicit_settings(["test", *unnamed]).flags == {"data.root": "x"}
    for named in (["--data", "my.Data"], ["--data.class_path=my.Data"]):
        assert read_explicit_settings(["test", *named]).flags == {"data.class_path": "my.Data"}


def test_configs_are_not_merged(tmp_path):
    """Else a rate would belong to the optimizer of another config."""
    (tmp_path / "adam.yaml").write_text("model: {optimizer: Adam}")
    text = "model:\n  optimizer:\n    init_args:\n      lr: 0.5\n"
    given = read_explicit_settings(
        ["fit", "--config", str(tmp_path / "adam.yaml"), "--config", text]
    )
    assert [config.source for config in given.configs] == [str(tmp_path / "adam.yaml"), text]
    assert [dict(config.settings) for config in given.configs] == [
        {"model.optimizer.class_path": "Adam"},
        {"model.optimizer.lr": 0.5},
    ]


def test_a_long_text_is_no_name_of_a_file():
    text = "".join(f"name_{i}: {i}\n" for i in range(1000))
    assert read_explicit_settings(["fit", "--data", text]).flags["data.name_999"] == 999


@pytest.mark.parametrize("content", [b"a: [", b"a: \xff", b"[1, 2]", b"text"])
def test_a_file_without_settings_is_left_to_the_parser(tmp_path, content):
    path = tmp_path / "bad.yaml"
    path.write_bytes(content)
    assert read_explicit_settings(["fit", "--config", str(path)]).configs[0].settings == {}
    assert read_explicit_settings(["fit", "--data", str(path), "--model", "{"]).flags == {}


def test_without_arguments_nothing_was_set():
    assert read_explicit_settings(["fit"]) == ExplicitSettings()


@pytest.mark.parametrize(
    ("group", "text"),
    [
        *((group, "init_args: own.yaml") for group in sorted(explicit_settings._TABLES - {""})),
        *(
            (group, "&table {init_args: *table}")
            for group in sorted(explicit_settings._TABLES - {""})
        ),
        ("config", "init_args: own.yaml"),
        ("config", "'': own.yaml"),
    ],
)
def test_a_table_that_contains_itself_gives_no_settings(group, text, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("own.yaml").write_text(text)
    found = read_explicit_settings(["fit", f"--{group}=own.yaml"])
    assert found.flags == {}
    assert not any(config.settings for config in found.configs)
