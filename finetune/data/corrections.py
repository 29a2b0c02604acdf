"""corrections.csv: labels that people have corrected. Each decision is a line; the last line of an image counts.

The columns are path, was, now, by and when:

- `path`: path of the image relative to the folder of the data set.
- `was`: its class by the folder or table.
- `now`: its class by the decision. The same class confirms the label, `excluded` excludes the image, and an empty value
  withdraws earlier decisions.
- `by`, `when`: the name of the person, and the time. They are not read, and a file may lack them.

If images have several labels, `was` and `now` hold labels separated by `;`, or a JSON list: `[]` for no label, and for
labels that contain a `;`.

A line is appended by one `write`, under a lock. So several processes may append to one file, and a killed process
leaves complete lines. On file systems without locks only processes on one machine may.
"""

import contextlib
import csv
import errno
import fcntl
import io
import json
import os
import stat
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from finetune.system.file_names import composed
from finetune.system.files import lock_if_supported
from finetune.system.messages import NotFound, WrongUsage, counted, shown

COLUMNS = ("path", "was", "now", "by", "when")
EXCLUDED = "excluded"
WITHDRAWN = ""
_LABEL_SEPARATOR = ";"
_REQUIRED = 3  # of these columns
_MAX_BYTES = 2**28  # about two million lines


class Correction(NamedTuple):
    """A decision about the label of an image; see the columns of the file."""

    path: str
    was: str
    now: str
    by: str = ""
    when: str = ""


@dataclass(frozen=True)
class Changes:
    """What a file of corrections has changed in a data set.

    Attributes:
        file: Path of the file.
        splits: For each split that was corrected the numbers of images that were `changed`, `excluded` and
            `confirmed`, of corrections that are `outdated`, because the label has changed since, and the most frequent
            `pairs` of labels before and now, each with its number.
        unknown: Number of corrections of images that are not in the data set.
        in_test: Number of corrections of test images, which were not applied.
        has_several: Whether images have several labels.
    """

    file: str
    splits: Mapping[str, Mapping[str, Any]]
    unknown: int = 0
    in_test: int = 0
    has_several: bool = False

    def total(self, what: str) -> int:
        """Return a number over all splits."""
        return sum(split[what] for split in self.splits.values())

    def line(self) -> str:
        """Return a text with the numbers."""
        changed = self.total("changed")
        labels = counted(changed, "label")
        if self.has_several:
            labels = f"labels of {counted(changed, 'image')}"
        text = f"corrections: {shown(self.file)}: {labels} changed, "
        text += f"{counted(self.total('excluded'), 'image')} excluded"
        of_test = self.splits.get("test", {"changed": 0, "excluded": 0})
        if num := of_test["changed"] + of_test["excluded"]:
            text += f", {num:,} of them in test"
        if self.in_test:
            text += f"; {self.in_test:,} of test images not applied (--data.correct_test true)"
        if outdated := self.total("outdated"):
            text += f"; {outdated:,} skipped, because the label has changed since"
        if self.unknown:
            text += f"; {self.unknown:,} of images that are not in the data set"
        return text

    def plain(self) -> dict[str, Any]:
        """Return the numbers for JSON."""
        return {
            "file": self.file,
            "splits": self.splits,
            "unknown": self.unknown,
            "in_test": self.in_test,
        }


def join_labels(labels: Sequence[str]) -> str:
    """Return the labels of an image that has several as the text of `was` or `now`."""
    text = _LABEL_SEPARATOR.join(labels)
    is_plain = bool(labels) and split_labels(text) == tuple(labels)
    return text if is_plain else json.dumps(labels, ensure_ascii=False)


def split_labels(text: str) -> tuple[str, ...]:
    """Return the labels in the text of `was` or `now`, each once and in composed Unicode."""
    parts = None
    if text.startswith("["):
        with contextlib.suppress(ValueError, RecursionError):
            parts = json.loads(text)
    if not isinstance(parts, list) or not all(isinstance(part, str) for part in parts):
        parts = text.split(_LABEL_SEPARATOR)
    labels = (composed(part.strip()) for part in parts)
    return tuple(dict.fromkeys(label for label in labels if label))


def read_corrections(file: str | Path, option: str = "--data.corrections") -> dict[str, Correction]:
    """Return the last decision of a file about each image, by its path in composed Unicode.

    Args:
        file: Its path.
        option: The option that names it, for error messages.

    Raises:
        NotFound: It does not exist.
        ValueError: It is not a file of corrections. The message names the line.
        OSError: It cannot be read.
    """
    try:
        with _opened(file, os.O_RDONLY) as descriptor:
            content = _read_all(descriptor, file)
    except FileNotFoundError as error:
        message = f"{option}: there is no file {str(file)!r}; null applies none"
        raise NotFound(message) from error
    return last_decisions(parse_corrections(content, file))


def last_decisions(lines: Iterable[Correction]) -> dict[str, Correction]:
    """Return the last decision about each image, by its path in composed Unicode, without withdrawn ones."""
    last = {composed(line.path): line for line in lines}
    return {path: line for path, line in last.items() if line.now != WITHDRAWN}


def parse_corrections(content: bytes, file: object) -> list[Correction]:
    """Return the lines of a file in order.

    Args:
        content: The content of the file.
        file: Its path, for messages.

    Raises:
        ValueError: A line is not valid.
    """
    text = content.decode("utf-8-sig", "surrogateescape")
    reader = csv.reader(io.StringIO(text, newline=""), strict=True)
    lines = []
    try:
        columns = tuple(name.strip().lower() for name in next(reader, []))
        if len(columns) < _REQUIRED or columns != COLUMNS[: len(columns)]:
            raise ValueError(
                f"{file} is not a file of corrections: its first line must be {','.join(COLUMNS)}"
            )
        for values in filter(None, reader):
            where = f"{file}, line {reader.line_num}"
            if len(values) != len(columns):
                raise ValueError(f"{where} has {len(values)} values, expected {len(columns)}")
            line = Correction(*values)
            if not line.path or not line.was:
                raise ValueError(f"{where} has no {'path' if not line.path else 'was'}")
            for name in (line.was, line.now):
                if shown(name) != name:
                    raise ValueError(f"{where}: '{shown(name)}' is not the name of a class")
            lines.append(line)
    except csv.Error as error:
        raise ValueError(f"{file}, line {reader.line_num}: {error}") from error
    return lines


@contextlib.contextmanager
def _opened(file: str | Path, flags: int) -> Iterator[int]:
    # O_NONBLOCK: opening a pipe would otherwise block until it is written to
    descriptor = os.open(file, flags | os.O_NONBLOCK | os.O_CLOEXEC, 0o666)
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise WrongUsage(f"{file} is not a file")
        yield descriptor
    finally:
        os.close(descriptor)


def _read_all(descriptor: int, file: object) -> bytes:
    size = os.fstat(descriptor).st_size
    if size > _MAX_BYTES:
        raise ValueError(f"{file} has {size:,} bytes, more than {_MAX_BYTES:,}")
    content = bytearray()
    while part := os.pread(descriptor, 2**20, len(content)):
        content += part
    return bytes(content)


class CorrectionsFile:
    """A file of corrections that this process and others append to. People may edit it at the same time.

    Args:
        path: Its path. The first line creates the file.

    Attributes:
        lines: The lines that were read. If others have changed the file, a new list replaces this one.

    Raises:
        ValueError: The file exists, and is not a file of corrections.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.lines: list[Correction] = []
        self._state: tuple[int, ...] = ()  # of the file that was read
        self.refresh()

    def refresh(self) -> None:
        """Read the file if it has changed.

        Raises:
            ValueError: A line is not valid. The message names it.
            OSError: The file cannot be read.
        """
        try:
            with _opened(self.path, os.O_RDONLY) as descriptor:
                lock_if_supported(descriptor, fcntl.LOCK_SH)
                self._load(descriptor)
        except FileNotFoundError:
            self.lines = []
            self._state = ()

    def append(self, correction: Correction, check: Callable[[], None] = lambda: None) -> None:
        """Append a line, and read those of other processes.

        Args:
            correction: The line.
            check: Called when their lines are read and no process can append one. If it raises, nothing is appended.

        Raises:
            ValueError: A line of the file is not valid, or this one would not be.
            OSError: The line cannot be written. The file is as it was.
        """
        with _opened(self.path, os.O_RDWR | os.O_APPEND | os.O_CREAT) as descriptor:
            lock_if_supported(descriptor, fcntl.LOCK_EX)
            self._load(descriptor)
            check()
            size = os.fstat(descriptor).st_size
            header = os.pread(descriptor, 100, 0).split(b"\n")[0]
            num_columns = len(header.split(b",")) if size else len(COLUMNS)
            record = _record(correction[:num_columns])
            added = parse_corrections(_record(COLUMNS[:num_columns]) + record, self.path)
            if size == 0:
                record = _record(COLUMNS) + record
            elif os.pread(descriptor, 1, size - 1) != b"\n":
                record = b"\n" + record
            try:
                if os.write(descriptor, record) < len(record):
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(self.path))
                os.fsync(descriptor)
            except OSError:
                with contextlib.suppress(OSError):
                    os.ftruncate(descriptor, size)
                raise
            self.lines += added
            self._state = _state(descriptor)

    def _load(self, descriptor: int) -> None:
        state = _state(descriptor)
        if state != self._state:
            content = _read_all(descriptor, self.path)
            self.lines = parse_corrections(content, self.path) if content else []
            self._state = state


def _state(descriptor: int) -> tuple[int, ...]:
    status = os.fstat(descriptor)
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns


def _record(values: Iterable[str]) -> bytes:
    line = io.StringIO(newline="")
    # with \r\n, because csv quotes a carriage return in a field only then
    csv.writer(line, lineterminator="\r\n").writerow(list(values))
    return line.getvalue().removesuffix("\r\n").encode("utf-8", "surrogateescape") + b"\n"
