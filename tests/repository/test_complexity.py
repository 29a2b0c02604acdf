"""Limits on complexity: one assignment a line, arguments by name, no more long signatures."""

import ast
import json
import subprocess
import sys
from collections import Counter

from paths import ROOT

# Functions with more than five arguments (ruff's PLR0913). These numbers may only become smaller.
MOST_LONG_SIGNATURES = {"finetune": 34, "benchmarks": 0, "tests": 43}
MODULES = [
    path for folder in MOST_LONG_SIGNATURES for path in sorted((ROOT / folder).rglob("*.py"))
]


def squeezed_assignments(tree: ast.AST) -> list[int]:
    """Return the lines that assign more than two values at once, each written out."""
    return [
        node.lineno
        for node in ast.walk(tree)
        if isinstance(node, ast.Assign)
        and isinstance(node.value, ast.Tuple)
        and isinstance(node.targets[0], ast.Tuple)
        and len(node.value.elts) > 2
    ]


def splatted_settings(tree: ast.AST) -> list[int]:
    """Return the lines of calls that take their settings from a tuple, so that no argument has a name."""
    return [
        node.lineno
        for node in ast.walk(tree)
        if isinstance(node, ast.Call)
        for argument in node.args
        if isinstance(argument, ast.Starred)
        and isinstance(argument.value, ast.Name)
        and argument.value.id in ("how", "settings", "options", "rates")
    ]


def test_code_is_not_squeezed():
    found = {}
    for path in MODULES:
        tree = ast.parse(path.read_text("utf-8"))
        lines = squeezed_assignments(tree)
        if path.is_relative_to(ROOT / "finetune"):  # elsewhere they are words of a command line
            lines += splatted_settings(tree)
        if lines:
            found[str(path.relative_to(ROOT))] = lines
    assert found == {}


def test_control_squeezed_code_is_found():
    tree = ast.parse(
        "def f():\n    a, b, c = 1, 2, 3\n    how = a, b\n    g(*how, c)\n    x, y = y, x"
    )
    assert squeezed_assignments(tree) == [2]
    assert splatted_settings(tree) == [4]


def test_there_are_no_more_long_signatures():
    command = [sys.executable, "-m", "ruff", "check", "--select", "PLR0913", "--output-format=json"]
    printed = subprocess.run(
        [*command, *MOST_LONG_SIGNATURES], cwd=ROOT, stdout=subprocess.PIPE, check=False
    ).stdout
    files = [item["filename"] for item in json.loads(printed)]
    counts = Counter(name.removeprefix(f"{ROOT}/").partition("/")[0] for name in files)
    assert counts <= Counter(MOST_LONG_SIGNATURES)
