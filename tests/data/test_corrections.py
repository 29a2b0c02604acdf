"""corrections.csv: what is read, what is refused, and that lines survive kills and several writers."""

import errno
import fcntl
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from promise import control, promise

from finetune.data import corrections
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
from finetune.system.messages import NotFound

HEADER = ",".join(COLUMNS)
# values of lines that a person or a file system can cause
PATHS = (
    "a.png",
    "a b.png",
    'q"uote.png',
    "com,ma.png",
    "new\nline.png",
    "re\rturn.png",
    "\udcff.png",
    "=1.png",
)


def line(path: str, now: str = "dog", was: str = "cat") -> Correction:
    return Correction(path, was, now, "me", "2026-01-01T00:00:00Z")


@pytest.fixture
def file(tmp_path) -> CorrectionsFile:
    return CorrectionsFile(tmp_path / "corrections.csv")


@promise("corrections")
def test_every_line_is_read_as_it_was_written(file):
    lines = [line(path) for path in PATHS]
    for each in lines:
        file.append(each)
    assert file.lines == lines
    assert parse_corrections(file.path.read_bytes(), file.path) == lines
    assert file.path.read_bytes().split(b"\n")[0] == HEADER.encode()


@pytest.mark.parametrize(
    ("labels", "text"),
    [
        (["cat", "dog"], "cat;dog"),
        (["cat"], "cat"),
        ([], "[]"),
        (["a;b", 'say "c"'], '["a;b", "say \\"c\\""]'),
        (["[x]"], "[x]"),  # no JSON
        (['["x"]'], '["[\\"x\\"]"]'),
    ],
)
def test_several_labels_are_read_as_they_were_written(file, labels, text):
    assert join_labels(labels) == text
    file.append(line("a.png", text))
    (found,) = parse_corrections(file.path.read_bytes(), file.path)
    assert list(split_labels(found.now)) == labels


def test_several_labels_are_read_as_people_write_them():
    assert split_labels(" cat ; dog;;cat") == ("cat", "dog")
    assert split_labels("e\u0301;dog") == ("é", "dog")
    assert split_labels("[1]") == ("[1]",) and split_labels("[" * 9999) == ("[" * 9999,)


def test_the_last_line_of_an_image_counts(file):
    for now in ("dog", "bird"):
        file.append(line("a.png", now))
    file.append(line("b.png"))
    file.append(line("b.png", ""))  # withdrawn
    file.append(line("e\u0301.png", "excluded"))
    found = read_corrections(file.path)
    assert found.by_path.keys() == {"a.png", "é.png"}
    assert found.find("a.png") == line("a.png", "bird") and found.find("b.png") is None
    # macOS may write é as e and an accent
    assert found.find("é.png") == found.find("e\u0301.png") != None  # noqa: E711


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
    assert sorted(names) == sorted(f"{name}/{i}" for name in "abc" for i in range(60))
    for name in "abc":  # in the order of their writer
        own = [each for each in names if each.startswith(name)]
        assert own == [f"{name}/{i}" for i in range(60)]


@control("corrections")
def test_control_without_a_lock_and_one_write_a_file_would_not_be_whole(tmp_path):
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


def test_a_full_disk_is_an_error_and_leaves_the_file_as_it_was(file, monkeypatch):
    file.append(line("a.png"))
    before = file.path.read_bytes()
    monkeypatch.setattr(corrections.os, "write", lambda fd, data: os.pwrite(fd, data[:5], 0) and 5)
    with pytest.raises(OSError, match="No space left"):
        file.append(line("b.png"))
    monkeypatch.undo()
    assert len(file.path.read_bytes()) == len(before)


def test_files_of_people_are_read(tmp_path):
    path = tmp_path / "own.csv"
    path.write_bytes(b"\xef\xbb\xbfPath,now,was\r\na.png,dog,cat\r\n\r\nb.png,excluded,cat")
    found = read_corrections(path).by_path
    assert [(each.path, each.was, each.now) for each in found.values()] == [
        ("a.png", "cat", "dog"),
        ("b.png", "cat", "excluded"),
    ]
    file = CorrectionsFile(path)
    file.append(line("c.png"))  # in the columns that the file has
    assert path.read_bytes().endswith(b"cat\nc.png,dog,cat\n")
    assert read_corrections(path).find("c.png") == Correction("c.png", "cat", "dog")


def test_an_edit_while_the_file_is_open_is_read(file):
    file.append(line("a.png"))
    file.append(line("b.png"))
    other = CorrectionsFile(file.path)
    content = file.path.read_bytes()
    edits = (
        content.replace(b"a.png,cat,dog", b"a.png,cat,owl"),  # of the same length
        content.replace(b"a.png", b"longer name.png") + content.splitlines(True)[-1],
        content.replace(b"\n", b"\r\n"),
        b"\xef\xbb\xbf" + content,
    )
    for edit in edits:
        file.path.write_bytes(edit)  # in place, as some editors do
        other.refresh()
        assert other.lines == parse_corrections(edit, file.path)
        other.append(line("c.png"))
        assert other.lines == [*parse_corrections(edit, file.path), line("c.png")]
        assert parse_corrections(file.path.read_bytes(), file.path) == other.lines


def test_a_bad_line_of_an_edit_is_named_and_can_be_put_right(file):
    file.append(line("a.png"))
    content = file.path.read_bytes()
    file.path.write_bytes(content + b"b.png,cat\n")
    for action in (file.refresh, lambda: file.append(line("c.png"))):
        with pytest.raises(ValueError, match="line 3 has 2 values, expected 5"):
            action()
    file.path.write_bytes(content)
    file.append(line("c.png"))
    assert file.lines == [line("a.png"), line("c.png")]


def test_a_line_that_could_not_be_read_again_is_not_written(file):
    file.append(line("a.png"))
    before = file.path.read_bytes()
    with pytest.raises(ValueError, match="is not the name of a class"):
        file.append(line("b.png", "do\x1bg"))
    assert file.path.read_bytes() == before


WRONG = {
    b"": "its first line must be path,was,now,by,when",
    b"path;was;now\n": "its first line must be",
    b"\xff\xfep\0a\0": "its first line must be",
    b"path,was,now,note\n": "its first line must be",
    b"path,was,now,now\n": "a column twice",
    b"path,was,now\na.png,cat\nb.png,cat,dog\n": "line 2 has 2 values, expected 3",
    b"path,was,now\na.png,cat,dog,x\n": "line 2 has 4 values, expected 3",
    b"path,was,now\n,cat,dog\n": "line 2 has no path",
    b"path,was,now\na.png,,dog\n": "line 2 has no was",
    b"path,was,now\na.png,cat,do\x1bg\n": r"line 2: 'do\\x1bg' in now is not the name of a class",
    b"path,was,now\na.png,cat,\xff\n": r"line 2: '\\udcff' in now is not",
    b'path,was,now\n"a.png"x,cat,dog\n': "line 2: ",
    b"path,was,now\n" + b"a" * 200_000 + b",cat,dog\n": "line 2: field larger than field limit",
}


@pytest.mark.parametrize("content", WRONG)
def test_other_files_are_refused_in_one_line(tmp_path, content):
    path = tmp_path / "x.csv"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=WRONG[content]) as error:
        read_corrections(path)
    assert str(path) in str(error.value) and "\n" not in str(error.value)


def test_what_is_no_file_is_refused_at_once(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    for name in ("pipe", "."):
        with pytest.raises((ValueError, OSError), match="is not a file"):
            read_corrections(tmp_path / name)
    with pytest.raises(NotFound, match="--data.corrections: there is no file"):
        read_corrections(tmp_path / "gone.csv")


def test_a_file_of_gigabytes_is_not_read(tmp_path):
    path = tmp_path / "x.csv"
    path.touch()
    os.truncate(path, 2**31)  # sparse
    with pytest.raises(ValueError, match="2,147,483,648 bytes, more than"):
        read_corrections(path)


def test_a_decision_can_be_withdrawn_and_made_again():
    lines = [line("a"), line("a", ""), line("a", "cat")]
    assert [len(last_decisions(lines[:num])) for num in range(4)] == [0, 1, 0, 1]


@pytest.mark.parametrize("code", [errno.ENOLCK, pytest.param(errno.EIO, id="control")])
def test_decisions_are_saved_on_a_file_system_without_locks(file, monkeypatch, code):
    def refuse(*_: object) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(fcntl, "flock", refuse)
    correction = Correction("cat/1.jpg", "cat", "dog", "me", "now")
    if code == errno.EIO:
        with pytest.raises(OSError, match="put/output"):
            file.append(correction)
        return
    file.append(correction)
    assert CorrectionsFile(file.path).lines == [correction]
