"""Promises, the tests that hold them, and the controls that show that these tests can fail.

    @promise("resume", controls=[forget_the_position])
    def test_resume_after_a_kill(...): ...

    @control("resume")
    def test_control_...: ...

A control is a test that compares two things and finds a deliberate difference, or a function of a `monkeypatch` that
breaks the program: the test is run again with each, and must fail. docs/promises.md is made from these marks. If all
tests are collected, a promise without a quick test or without a control is an error, as is a page that is out of date.
"""

from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from paths import ROOT
from promise_texts import GROUPS, PROMISES

PAGE = ROOT / "docs/promises.md"
_HEADER = """# Promises and their tests

Each promise has a quick test, which `make test` runs, and a control: a deliberate mistake that its tests must find.
`make test-all` also runs the longer tests, `pytest --promise resume` all tests of the promise `resume`, and
`make chaos` thousands of kills, damaged files and hostile requests.

<!-- written by `pytest --collect-only -q tests --write-promises` from the marks of the tests -->
"""
_HEADS = ("name", "promise", "tests")


def promise(
    name: str, controls: Sequence[Callable[[pytest.MonkeyPatch], None]] = ()
) -> pytest.MarkDecorator:
    """Mark a test that holds a promise.

    Args:
        name: The promise, a key of `PROMISES`.
        controls: Each breaks the program. The test is run again with each, and must fail.
    """
    assert name in PROMISES, name
    return pytest.mark.promise(name, controls=tuple(controls))


def control(name: str) -> pytest.MarkDecorator:
    """Mark a test that shows that the tests of a promise find a deliberate mistake."""
    assert name in PROMISES, name
    return pytest.mark.control(name)


@pytest.fixture(autouse=True)
def broken_by(request: pytest.FixtureRequest) -> None:
    """Break the program as a control of the test says."""
    breaks = getattr(request, "param", None)
    if breaks is not None:
        breaks(request.getfixturevalue("monkeypatch"))


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Run a test of a promise once more with each control."""
    marks = metafunc.definition.iter_markers("promise")
    breaks = dict.fromkeys(each for mark in marks for each in mark.kwargs["controls"])
    if breaks:
        fails = pytest.mark.xfail(strict=True, reason="a control")
        cases = [pytest.param(each, id=f"control_{each.__name__}", marks=fails) for each in breaks]
        metafunc.parametrize(
            "broken_by", [pytest.param(None, id=pytest.HIDDEN_PARAM), *cases], indirect=True
        )


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--promise", metavar="ID", help="only the tests and controls of this promise")
    parser.addoption("--write-promises", action="store_true", help="write docs/promises.md")


@pytest.hookimpl(tryfirst=True)  # before -m and -k deselect tests
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    wanted = config.getoption("promise")
    if wanted is not None:
        if wanted not in PROMISES:
            raise pytest.UsageError(f"--promise {wanted}: none of {', '.join(PROMISES)}")
        others = [item for item in items if wanted not in _names(item, "promise", "control")]
        items[:] = [item for item in items if item not in others]
        config.hook.pytest_deselected(items=others)
        return
    if {Path(config.rootpath, each) for each in config.args} != {ROOT / "tests"}:
        return
    page = _page(items)
    if config.getoption("write_promises"):
        PAGE.write_text(page, "utf-8")
    elif PAGE.read_text("utf-8") != page:
        raise pytest.UsageError(f"{PAGE.name} is out of date: run `pytest --write-promises`")


def _names(item: pytest.Item, *marks: str) -> set[str]:
    return {mark.args[0] for kind in marks for mark in item.iter_markers(kind)}


def _page(items: list[pytest.Item]) -> str:
    parts = [_HEADER]
    for heading, promises in GROUPS.items():
        rows = [_HEADS, ("---", "---", "---"), *(_row(name, items) for name in promises)]
        parts += [f"## {heading}\n", *(f"| {' | '.join(row)} |" for row in rows), ""]
    return "\n".join(parts)


def _row(name: str, items: list[pytest.Item]) -> tuple[str, str, str]:
    """Return the row of a promise: its name and text, and the files of its tests.

    Raises:
        pytest.UsageError: It has no quick test or no control.
    """
    files: set[str] = set()
    has_quick = False
    has_control = False
    for item in items:
        is_test = name in _names(item, "promise")
        is_control = name in _names(item, "control")
        if not is_test and not is_control:
            continue
        files.add(item.path.name)
        parameters = item.callspec.params if hasattr(item, "callspec") else {}
        is_broken = is_test and parameters.get("broken_by") is not None
        has_control |= is_control or is_broken
        has_quick |= is_test and not is_broken and "slow" not in item.keywords
    if not has_quick:
        raise pytest.UsageError(f"no quick test of the promise {name}: mark one with @promise")
    if not has_control:
        raise pytest.UsageError(f"no control of the promise {name}: mark one with @control")
    return f"`{name}`", PROMISES[name], ", ".join(f"`{file}`" for file in sorted(files))
