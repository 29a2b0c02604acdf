"""What the program refuses, by the rows of *.yaml: one line with the words to act on, an exit code, and nothing lost.

A row is a test, by its name. Its keys:
    setup: functions of `situations.py` that make files in the empty folder of the test; `folder` without it
    files: more files, by path: their text; a path that ends in / is a folder
    command: a command line, with the options that SHORT has
    words: at most four, which must be in the line
    hidden: a secret, which must not be shown
    hint: options that the line names, as a user would copy them: with them the same command, which is then typed
        again, ends without an error. A word in capitals, such as FOLDER, stands for a new name
    code: the exit code, where it matters whether the line (2) or the data (1) are wrong
    python: the same in Python, such as {fit: photos, epochs: 0}; its error has the same words. Public names of
        finetune: fit, load, and classes of data, whose images are read
    then: a method of what `python` gives, and its arguments, such as {predict: x.png, on_bad_image: skip}
    error: the class of that error, ValueError without it
    env: variables of the environment
    without: packages that are not installed
    slow: not in the quick tests
"""

import builtins
import contextlib
import io
import os
import re
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import situations
import yaml
from colours import QUICKEST
from fit_words import QUICK
from hypothesis import assume, given
from hypothesis import strategies as st
from promise import control, promise

import finetune
from finetune.cli import main
from finetune.runs import run_lock
from finetune.settings.fields import settings_of, words_of
from finetune.settings.schema import FitSettings

LONG = [word for word in QUICKEST if word not in ("--trainer.max_epochs", "1")]
SHORT = {
    "$QUICK": QUICKEST,
    "$LONG": LONG,  # the same without a number of epochs
    "$AUTO": ["--backbone", "auto", "--workers", "0", "--epochs", "1"],
    "$CPU": ["--trainer.accelerator", "cpu", "--workers", "0"],
    "$HAND": ["--root", "clothes", "--devices", "cpu", "--batch_size", "8", "--epochs", "1"],
    "$BYTES": [os.fsdecode(b"caf\xe9")],
}
TEXT = "".join(path.read_text("utf-8") for path in sorted(Path(__file__).parent.glob("*.yaml")))
CASES: dict[str, dict[str, Any]] = yaml.safe_load(TEXT)


def rows(key: str) -> list[Any]:
    return [
        pytest.param(case, id=name, marks=pytest.mark.slow if case.get("slow") else ())
        for name, case in CASES.items()
        if key in case
    ]


@pytest.fixture
def place(
    fitted_runs: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[situations.Place]:
    """The empty folder of a test, which it is in, and the environment as it was before."""
    monkeypatch.chdir(tmp_path)
    before = dict(os.environ)
    with contextlib.ExitStack() as servers:
        yield situations.Place(tmp_path, fitted_runs, servers)
    run_lock.release()
    os.environ.clear()
    os.environ.update(before)


def prepare(
    case: dict[str, Any], place: situations.Place, monkeypatch: pytest.MonkeyPatch
) -> dict[str, tuple[int, int]]:
    """Make the files and the environment of a row; return the files that are there."""
    setup = case.get("setup", "folder")
    for name in [setup] if isinstance(setup, str) else setup:
        getattr(situations, name)(place)
    for path, text in case.get("files", {}).items():
        file = place.folder / path
        file.parent.mkdir(parents=True, exist_ok=True)
        if path.endswith("/"):
            file.mkdir()
        else:
            file.unlink(missing_ok=True)  # it may be a link to one that other tests read
            file.write_text(text or "", "utf-8")
    os.environ.update(case.get("env", {}))
    for package in case.get("without", []):
        monkeypatch.setitem(sys.modules, package, None)
    # which another test may have imported with its package
    monkeypatch.delitem(sys.modules, "finetune.serving.http_server", raising=False)
    return files_in(place.folder)


def files_in(folder: Path) -> dict[str, tuple[int, int]]:
    paths = [os.path.join(parent, name) for parent, _, names in os.walk(folder) for name in names]
    found = {path: os.lstat(path) for path in paths if not path.endswith("/.lock")}
    return {path: (status.st_mtime_ns, status.st_size) for path, status in found.items()}


@promise("one-line")
@pytest.mark.parametrize("case", rows("command"))
def test_refused(case, place, monkeypatch, capsys):
    before = prepare(case, place, monkeypatch)
    words = [part for word in shlex.split(case["command"]) for part in SHORT.get(word, [word])]
    with pytest.raises(SystemExit) as ended:
        main(words)
    error = capsys.readouterr().err
    lines = [line for line in error.splitlines() if "error: " in line]
    assert len(lines) == 1 and lines[0].startswith("finetune: error: "), error
    assert "Traceback" not in error and error.endswith(f"{lines[0]}\n"), error
    assert [word for word in case["words"] if str(word) not in lines[0]] == [], lines[0]
    assert case.get("hidden", "Traceback") not in error
    assert ended.value.code in ([case["code"]] if "code" in case else [1, 2]), lines[0]
    assert files_in(place.folder) == before
    if "hint" in case:
        assert case["hint"] in lines[0]
        check_hint(case["hint"], words, capsys)


def check_hint(hint: str, words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    """Check that the options that a line advises help."""
    run_lock.release()
    added = [f"new_{word.lower()}" if word.isupper() else word for word in shlex.split(hint)]
    with contextlib.suppress(SystemExit):
        main([*words, *added])
    assert "error: " not in capsys.readouterr().err


@control("one-line")
def test_control_an_error_without_a_line_is_seen(place, monkeypatch, capsys):
    monkeypatch.setattr("finetune.commands.error_lines.one_line", lambda *_: None)
    with pytest.raises(AssertionError, match="Traceback"):
        test_refused(CASES["a folder that is nowhere"], place, monkeypatch, capsys)


@pytest.mark.parametrize("case", rows("python"))
def test_refused_in_python(case, place, monkeypatch, capsys):
    before = prepare(case, place, monkeypatch)
    (function, first), *more = case["python"].items()
    arguments = {"fit": QUICK, "load": {"device": "cpu"}}.get(function, {}) | dict(more)
    kind = getattr(builtins, case.get("error", "ValueError"))
    with pytest.raises(kind) as raised:
        made = getattr(finetune, function)(first, **arguments)
        (method, value), *more = case.get("then", {"read": None}).items()
        getattr(made, method)(*([] if value is None else [value]), **dict(more))
    line = str(raised.value)
    assert "\n" not in line
    assert [word for word in case["words"] if str(word) not in line] == [], line
    assert "error: " not in capsys.readouterr().err and files_in(place.folder) == before


def test_a_row_has_at_most_four_words_and_a_name_of_its_own():
    assert [name for name, case in CASES.items() if not 1 <= len(case["words"]) <= 4] == []
    assert len(CASES) == len(re.findall(r"^[^#\s]", TEXT, re.MULTILINE))


OPTIONS = settings_of(FitSettings)


@given(
    option=st.sampled_from(sorted(name for name in OPTIONS if len(name) > 5)),
    position=st.integers(1, 40),
    change=st.sampled_from(["drop", "double", "swap"]),
)
def test_a_typo_in_any_option_is_answered_with_a_near_one(option, position, change):
    position = min(position, len(option) - 2)
    a, b = option[position], option[position + 1]
    typed = {"drop": b, "double": a + a + b, "swap": b + a}[change]
    typed = option[:position] + typed + option[position + 2 :]
    assume(typed not in {*OPTIONS, *words_of(FitSettings)} and "." not in (a, b))
    error = io.StringIO()
    with pytest.raises(SystemExit) as ended, contextlib.redirect_stderr(error):
        main(["fit", "photos", f"--{typed}", "x"])
    (line,) = error.getvalue().splitlines()
    assert ended.value.code == 2 and f"--{typed}" in line and "did you mean" in line, line
