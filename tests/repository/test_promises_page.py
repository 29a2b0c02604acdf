"""docs/promises.md names existing tests, and only tests of `make test` as quick."""

import ast
import re
from functools import cache

import pytest
from paths import ROOT

PAGE = (ROOT / "docs/promises.md").read_text("utf-8")
ROWS = [line.strip("| ").split(" | ") for line in PAGE.splitlines() if line.startswith("| ")][2:]
NAMED = re.compile(r"`(?:(test_\w+\.py)(?:::)?)?(test_\w+(?!\w*\.py))?`")


def find_tests(text: str) -> dict[str, bool]:
    """Return the tests in a file's text, and whether each is quick."""
    tree = ast.parse(text)
    marks = [
        node
        for node in tree.body
        if isinstance(node, ast.Assign) and "pytestmark" in ast.unparse(node.targets)
    ]
    is_slow = any("mark.slow" in ast.unparse(mark) for mark in marks)
    functions = [
        node
        for node in tree.body
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")
    ]
    slow = ("pytest.mark.slow", "mark.slow")
    return {
        function.name: not (
            is_slow or any(ast.unparse(each) in slow for each in function.decorator_list)
        )
        for function in functions
    }


@cache
def files() -> dict[str, dict[str, bool]]:
    """Return the tests of each file."""
    paths = (ROOT / "tests").rglob("test_*.py")
    return {path.name: find_tests(path.read_text("utf-8")) for path in paths}


def missing(cell: str, is_quick: bool) -> list[str]:
    """Return the names in a cell of the table that are no test, or no quick one."""
    wrong = []
    tests: dict[str, bool] = {}
    for file, name in NAMED.findall(cell):
        # a control is in the file that is named before it
        tests = files().get(file, {}) if file else tests
        found = [quick for test, quick in tests.items() if name in ("", test)]
        if not found or (is_quick and not any(found)):
            wrong.append(f"{file} {name}".strip())
    return wrong


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row[0])
def test_each_promise_has_a_quick_test_and_the_tests_it_names(row):
    promise, quick, *full = row
    assert promise and NAMED.search(quick)
    assert missing(quick, is_quick=True) == []
    assert missing(" ".join(full), is_quick=False) == []


def test_control_a_test_that_is_not_there_or_slow_is_found():
    assert missing("`test_promises.py::test_nothing`", is_quick=False) == [
        "test_promises.py test_nothing"
    ]
    assert missing("`test_nothing.py`", is_quick=False) == ["test_nothing.py"]
    assert missing("`test_ends.py`", is_quick=True) == ["test_ends.py"]
    marked = "@pytest.mark.slow\n@pytest.mark.parametrize(\n    'x', [1]\n)\ndef test_a(x): ...\ndef test_b(): ..."
    assert find_tests(marked) == {"test_a": False, "test_b": True}
    assert find_tests(f"pytestmark = [\n    pytest.mark.slow,\n]\n{marked}") == {
        "test_a": False,
        "test_b": False,
    }
