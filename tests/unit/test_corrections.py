"""corrections.csv: lines are read as they were written, the last one counts, several writers, kills and people."""

import errno
import fcntl
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from promise import control, promise

from finetune.data.corrections import (
    COLUMNS,
    Correction,
    CorrectionsFile,
    join_labels,
    last_decisions,
    parse_corrections,
    read_corrections,
    split_labels,
)
from finetune.system.file_names import composed
from finetune.system.messages import NotFound, shown

HEADER = ",".join(COLUMNS)
# Also bytes that are no UTF-8, which Python holds as surrogates.
PATHS = st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]), min_size=1)
PATHS |= st.binary(min_size=1).map(lambda name: os.fsdecode(name.replace(b"\0", b"x")))
NAMES = st.text(min_size=1).map(shown).filter(lambda name: shown(name) == name and name.strip())
LINES = st.builds(Correction, PATHS, NAMES, NAMES | st.just(""), NAMES, NAMES)


def line(path: str, now: str = "dog", was: str = "cat") -> Correction:
    return Correction(path, was, now, "me", "2026-01-01T00:00:00Z")


@pytest.fixture
def file(tmp_path) -> CorrectionsFile:
    return CorrectionsFile(tmp_path / "corrections.csv")


@promise("corrections")
@given(lines=st.lists(LINES, min_size=1, max_size=3))
@example(
    lines=[line(path) for path in ('q"u', "a,b", "a\nb", "a\rb", "=1", "a\r\n", "\udcff", " ")]
)
@example(lines=[line("é.png"), line("e\u0301.png", "bird"), line("b.png"), line("b.png", "")])
def test_every_line_is_read_as_it_was_written_and_the_last_of_an_image_counts(lines):
    with tempfile.TemporaryDirectory() as folder:
        file = CorrectionsFile(Path(folder) / "corrections.csv")
        for each in lines:
            file.append(each)
        content = file.path.read_bytes()
        assert file.lines == parse_corrections(content, file.path) == lines
        assert content.split(b"\n")[0] == HEADER.encode() and content.endswith(b"\n")
        found = read_corrections(file.path)
    last = {}
    for each in lines:  # macOS may write é as e and an accent
        last[composed(each.path)] = each
    for path, each in last.items():  # an empty label withdraws
        assert found.get(path) == (each if each.now else None)
    # a withdrawal undoes the decisions before it
    assert last_decisions([*lines, *(line(path, "") for path in last)]) == {}


@given(labels=st.lists(NAMES.map(str.strip).map(composed), unique=True, max_size=4))
@example(labels=["a;b", 'say "c"'])
@example(labels=["[x]"])
@example(labels=['["x"]'])
def test_several_labels_are_read_as_they_were_written(labels):
    assert list(split_labels(join_labels(labels))) == labels


def test_several_labels_are_read_as_people_write_them():
    assert join_labels(["cat", "dog"]) == "cat;dog" and join_labels([]) == "[]"
    assert split_labels(" cat ; dog;;cat") == ("cat", "dog")
    assert split_labels("e\u0301;dog") == ("é", "dog")
    assert split_labels("[1]") == ("[1]",) and split_labels("[" * 9999) == ("[" * 9999,)


# Several writers


def test_two_writers_see_each_other(file):
    other = CorrectionsFile(file.path)
    file.append(line("a.png"))
    other.append(line("b.png"))
    file.refresh()
    assert file.lines == other.lines == [line("a.png"), line("b.png")]
    file.path.unlink()
    other.refresh()
    assert other.lines == []


_WRITER = """
import sys
from pathlib import Path
from finetune.data.corrections import Correction, CorrectionsFile
file = CorrectionsFile(Path(sys.argv[1]))
for i in range(int(sys.argv[3])):
    file.append(Correction(f"{sys.argv[2]}/{i}" + "x" * 300, "cat", "dog", "me", "now"))
"""


def writer(path: Path, name: str, num: int) -> "subprocess.Popen[bytes]":
    return subprocess.Popen([sys.executable, "-c", _WRITER, str(path), name, str(num)])


def test_lines_of_processes_that_write_at_once_are_all_there_and_whole(tmp_path):
    path = tmp_path / "corrections.csv"
    writers = [writer(path, name, 60) for name in "abc"]
    assert [each.wait(timeout=60) for each in writers] == [0, 0, 0]
    names = [each.path.rstrip("x") for each in parse_corrections(path.read_bytes(), path)]
    for name in "abc":  # in the order of their writer
        assert [each for each in names if each[0] == name] == [f"{name}/{i}" for i in range(60)]


@control("corrections")
def test_control_without_a_lock_and_one_write_a_file_would_not_be_whole():
    """What the test above would see of a writer that writes a line in two parts."""
    with pytest.raises(ValueError, match="expected 5"):
        parse_corrections(f"{HEADER}\na/0,cat,b/0,cat,dog,me,now\ndog,me,now\n".encode(), "x.csv")


@pytest.mark.parametrize("wait", [0.0, 0.05])
def test_a_killed_writer_leaves_complete_lines(tmp_path, wait):
    path = tmp_path / "corrections.csv"
    process = writer(path, "a", 100_000)
    while not path.exists() or not path.stat().st_size:
        time.sleep(0.001)
    time.sleep(wait)
    process.send_signal(signal.SIGKILL)
    process.wait(timeout=20)
    content = path.read_bytes()
    assert content.endswith(b"\n")
    names = [each.path.rstrip("x") for each in parse_corrections(content, path)]
    assert names == [f"a/{i}" for i in range(len(names))]
    CorrectionsFile(path).append(line("b.png"))  # its lock is gone, too
    assert parse_corrections(path.read_bytes(), path)[-1] == line("b.png")


@pytest.mark.parametrize("code", [errno.ENOLCK, pytest.param(errno.EIO, id="control")])
def test_decisions_are_saved_on_a_file_system_without_locks(file, monkeypatch, code):
    def refuse(*_: object) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(fcntl, "flock", refuse)
    if code == errno.EIO:
        with pytest.raises(OSError, match="put/output"):
            file.append(line("a.png"))
        return
    file.append(line("a.png"))
    assert CorrectionsFile(file.path).lines == [line("a.png")]


def test_a_full_disk_is_an_error_and_leaves_the_file_as_it_was(file, monkeypatch):
    file.append(line("a.png"))
    before = file.path.read_bytes()
    write = os.write
    monkeypatch.setattr(os, "write", lambda fd, data: write(fd, data[:5]))
    with pytest.raises(OSError, match="No space left"):
        file.append(line("b.png"))
    assert file.path.read_bytes() == before


# Files of people


def test_an_edit_of_a_person_while_the_file_is_open_is_read(file):
    file.append(line("a.png"))
    file.append(line("b.png"))
    other = CorrectionsFile(file.path)
    content = file.path.read_bytes()
    edits = (
        content.replace(b"a.png,cat,dog", b"a.png,cat,owl"),  # of the same length
        content.replace(b"a.png", b"longer name.png") + content.splitlines(True)[-1],
        content.replace(b"\n", b"\r\n"),
        b"\xef\xbb\xbf" + content,
        b"\xef\xbb\xbfPath,was,now\r\na.png,cat,dog\r\n\r\nb.png,cat,excluded",  # of fewer columns
    )
    for edit in edits:
        file.path.write_bytes(edit)  # in place, as some editors do
        other.refresh()
        assert other.lines == parse_corrections(edit, file.path) and len(other.lines) >= 2
        other.append(line("c.png"))
        assert parse_corrections(file.path.read_bytes(), file.path) == other.lines
        assert other.lines[:-1] == parse_corrections(edit, file.path)
    assert other.lines == [
        line("a.png")._replace(by="", when=""),
        Correction("b.png", "cat", "excluded"),
        line("c.png"),
    ]


def test_a_bad_line_of_an_edit_is_named_and_can_be_put_right(file):
    file.append(line("a.png"))
    content = file.path.read_bytes()
    file.path.write_bytes(content + b"b.png,cat\n")
    for action in (file.refresh, lambda: file.append(line("c.png"))):
        with pytest.raises(ValueError, match="line 3 has 2 values"):
            action()
    file.path.write_bytes(content)
    with pytest.raises(ValueError, match="not the name of a class"):
        file.append(line("b.png", "do\x1bg"))  # could not be read again
    assert file.path.read_bytes() == content
    file.append(line("c.png"))
    assert file.lines == [line("a.png"), line("c.png")]


WRONG = {
    b"path;was;now\n": "first line",
    b"\xff\xfep\0a\0": "first line",
    b"path,was,now,note\n": "first line",
    b"path,was\n": "first line",
    b"path,was,now\na.png,cat\nb.png,cat,dog\n": "line 2 has 2 values",
    b"path,was,now\na.png,cat,dog,x,y,z\n": "line 2 has 6 values",
    b"path,was,now\n,cat,dog\n": "line 2 has no path",
    b"path,was,now\na.png,cat,do\x1bg\n": r"line 2: 'do\\x1bg'",
    b"path,was,now\na.png,cat,\xff\n": r"line 2: '\\udcff'",
    b'path,was,now\n"a.png"x,cat,dog\n': "line 2: ",
    b"path,was,now\n" + b"a" * 200_000 + b",cat,dog\n": "line 2: field larger",
}


@pytest.mark.parametrize("content", WRONG)
def test_other_files_are_refused_in_one_line(tmp_path, content):
    path = tmp_path / "x.csv"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=WRONG[content]) as error:
        read_corrections(path)
    assert str(path) in str(error.value) and "\n" not in str(error.value)


def test_what_is_no_file_or_has_gigabytes_is_refused_at_once(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    for name in ("pipe", "."):
        with pytest.raises((ValueError, OSError), match="is not a file"):
            read_corrections(tmp_path / name)
    with pytest.raises(NotFound, match="--data.corrections: there is no file"):
        read_corrections(tmp_path / "gone.csv")
    (tmp_path / "x.csv").touch()
    os.truncate(tmp_path / "x.csv", 2**31)  # sparse
    with pytest.raises(ValueError, match="2,147,483,648 bytes"):
        read_corrections(tmp_path / "x.csv")
