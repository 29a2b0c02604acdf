"""The listing of the package matches its documentation; `make lint` checks the direction of imports (import-linter)."""

import ast
import re
import tomllib
from collections import Counter

from paths import ROOT

PACKAGE = ROOT / "finetune"
MODULES = [path for path in PACKAGE.rglob("*.py") if not path.name.startswith("__")]
PACKAGES = [path.parent for path in PACKAGE.rglob("__init__.py") if path.parent != PACKAGE]


def test_a_package_is_a_docstring_that_names_what_is_in_it():
    for folder in PACKAGES:
        tree = ast.parse((folder / "__init__.py").read_text("utf-8"))
        assert len(tree.body) == 1, folder
        named = set(re.findall(r"`(\w+)`", ast.get_docstring(tree) or ""))
        inside = {
            path.stem
            for path in folder.iterdir()
            if path.suffix == ".py" or (path / "__init__.py").exists()
        }
        assert inside - {"__init__"} <= named, folder


def test_no_two_modules_bear_one_name():
    assert [name for name, num in Counter(path.stem for path in MODULES).items() if num > 1] == []


def test_every_package_has_its_floor():
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["tool"]["importlinter"][
        "contracts"
    ]
    layers = next(contract["layers"] for contract in contracts if contract["type"] == "layers")
    on_a_floor = {
        name.strip().removeprefix("finetune.") for layer in layers for name in layer.split("|")
    }
    assert on_a_floor == {
        path.name for path in PACKAGE.iterdir() if (path / "__init__.py").exists()
    } | {"cli", "lightning_private"}


def test_readme_shows_every_package_from_the_roof_down():
    readme = (ROOT / "README.md").read_text("utf-8")
    tree = next(
        block
        for block in re.findall(r"^```\w*\n(.*?)^```$", readme, re.S | re.M)
        if block.startswith("cli.py")
    )
    shown = [line.split()[0].rstrip("/") for line in tree.splitlines()]
    assert set(shown[1:]) == {
        path.name for path in PACKAGE.iterdir() if (path / "__init__.py").exists()
    }


def test_each_package_has_a_folder_of_tests_and_each_file_of_tests_lies_with_what_it_is_about():
    packages = {folder.name for folder in PACKAGES if folder.parent == PACKAGE}
    files = list((ROOT / "tests").rglob("test_*.py"))
    assert {path.parent.name for path in files} == packages | {
        "integration",
        "repository",
        "benchmarks",
        "chaos",
    }
    assert Counter(path.name for path in files).most_common(1)[0][1] == 1
