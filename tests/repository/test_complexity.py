"""Limits on complexity: one assignment a line, arguments by name, no more long signatures."""

import ast
import json
import subprocess
import sys
from collections import Counter

from paths import ROOT

# Functions with more than five arguments (ruff's PLR0913). These numbers may only become smaller.
MOST_LONG_SIGNATURES = {"finetune": 28, "benchmarks": 0, "tests": 43}
MODULES = [
    path for folder in MOST_LONG_SIGNATURES for path in sorted((ROOT / folder).rglob("*.py"))
]


def tuple_assignments(nodes: list[ast.AST]) -> list[tuple[ast.Assign, ast.Tuple]]:
    """Return the assignments of several values that are written out, each with its values."""
    return [
        (node, node.value)
        for node in nodes
        if isinstance(node, ast.Assign)
        and isinstance(node.value, ast.Tuple)
        and isinstance(node.targets[0], ast.Tuple)
    ]


def squeezed_assignments(nodes: list[ast.AST]) -> list[int]:
    """Return the lines that assign more than two values at once, each written out."""
    return [node.lineno for node, values in tuple_assignments(nodes) if len(values.elts) > 2]


def paired_assignments(nodes: list[ast.AST]) -> list[int]:
    """Return the lines that assign several values that are written out, unless they swap them."""
    return [
        node.lineno
        for node, values in tuple_assignments(nodes)
        if set(map(ast.unparse, values.elts)) != set(map(ast.unparse, node.targets[0].elts))
    ]


def splatted_settings(nodes: list[ast.AST]) -> list[int]:
    """Return the lines of calls that take their settings from a tuple, so that no argument has a name."""
    return [
        node.lineno
        for node in nodes
        if isinstance(node, ast.Call)
        for argument in node.args
        if isinstance(argument, ast.Starred)
        and isinstance(argument.value, ast.Name)
        and argument.value.id in ("how", "settings", "options", "rates")
    ]


def splatted_literals(nodes: list[ast.AST]) -> list[int]:
    """Return the lines with a literal in a literal, such as `*("a", "b")`, which only keeps items on one line."""
    return [
        node.lineno
        for node in nodes
        if isinstance(node, ast.Starred) and isinstance(node.value, ast.Tuple | ast.List | ast.Set)
    ]


def unnamed_fields(nodes: list[ast.AST]) -> list[int]:
    """Return the lines that call a class with more than five arguments that have no name."""
    return [
        node.lineno
        for node in nodes
        if isinstance(node, ast.Call)
        and ast.unparse(node.func).rpartition(".")[2][:1].isupper()
        and len(node.args) > 5
        and not ast.unparse(node.func).startswith("op.")  # ONNX operators take any number
    ]


def test_code_is_not_squeezed():
    found = {}
    for path in MODULES:
        nodes = list(ast.walk(ast.parse(path.read_text("utf-8"))))
        lines = squeezed_assignments(nodes)
        if path.is_relative_to(ROOT / "finetune"):  # elsewhere they are words of a command line
            lines += paired_assignments(nodes)
            lines += splatted_settings(nodes) + splatted_literals(nodes) + unnamed_fields(nodes)
        if lines:
            found[str(path.relative_to(ROOT))] = lines
    assert found == {}


def test_control_squeezed_code_is_found():
    code = """def f():
    a, b, c = 1, 2, 3
    how = a, b
    g(*how, c)
    x, y = y, x
    z = [*('a', 'b'), *x]
    p, q = 1, x
    Box(1, 2, 3, 4, 5)
    m.Box(1, 2, 3, 4, 5, 6)
"""
    nodes = list(ast.walk(ast.parse(code)))
    assert squeezed_assignments(nodes) == [2]
    assert paired_assignments(nodes) == [2, 7]
    assert splatted_settings(nodes) == [4]
    assert splatted_literals(nodes) == [6]
    assert unnamed_fields(nodes) == [9]


def test_there_are_no_more_long_signatures():
    command = [sys.executable, "-m", "ruff", "check", "--select", "PLR0913", "--output-format=json"]
    printed = subprocess.run(
        [*command, *MOST_LONG_SIGNATURES], cwd=ROOT, stdout=subprocess.PIPE, check=False
    ).stdout
    files = [item["filename"] for item in json.loads(printed)]
    counts = Counter(name.removeprefix(f"{ROOT}/").partition("/")[0] for name in files)
    assert counts <= Counter(MOST_LONG_SIGNATURES)
