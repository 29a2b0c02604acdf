"""corrections.csv: labels that people have corrected. Each decision is a line; the last line of an image counts.

The columns are path, was, now, by and when:

- `path`: path of the image relative to the folder of the data set.
- `was`: its class by the folder or table.
- `now`: its class by the decision. The same class confirms the label, `excluded` excludes the image, and an empty value
  withdraws earlier decisions.
- `by`, `when`: the name of the person, and the time. They are not read.

If images have several labels, `was` and `now` hold labels separated by `;`, or a JSON list: `[]` for no label, and for
labels that contain a `;`.

A line is appended by one `write`, under a lock, and only after a complete line. So several processes may append to one
file, and a killed process leaves complete lines. On file systems without locks only processes on one machine may.
"""

import contextlib
import csv
import errno
import fcntl
import io
import json
import logging
import os
import stat
import zlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from finetune.system.file_names import composed
from finetune.system.files import lock_if_supported
from finetune.system.messages import NotFound, WrongUsage, shown

log = logging.getLogger(__name__)

COLUMNS = ("path", "was", "now", "by", "when")
EXCLUDED = "excluded"
WITHDRAWN = ""
_LABEL_SEPARATOR = ";"
_REQUIRED = {"path", "was", "now"}
_MAX_BYTES = 2**28  # about two million lines


class Correction(NamedTuple):
    """A decision about the label of an image; see the columns of the file."""

    path: str
    was: str
    now: str
    by: str = ""
    when: str = ""


@dataclass(frozen=True)
class Corrections:
    """The decisions that count.

    Attributes:
        file: Path of the file.
        by_path: The last decision about each image, by its path in composed Unicode. Withdrawn ones are omitted.
    """

    file: str
    by_path: dict[str, Correction] = field(default_factory=dict)

    def find(self, path: str) -> Correction | None:
        """Return the decision about an image, by its path relative to the data set."""
        return self.by_path.get(composed(path))


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


def read_corrections(file: str | Path, option: str = "--data.corrections") -> Corrections:
    """Read a file of corrections.

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
    return Corrections(str(file), last_decisions(parse_corrections(content, file)))


def last_decisions(lines: Iterable[Correction]) -> dict[str, Correction]:
    """Return the last decision about each image, by its path in composed Unicode, without withdrawn ones."""
    last = {composed(line.path): line for line in lines}
    return {path: line for path, line in last.items() if line.now != WITHDRAWN}


def parse_corrections(content: bytes, file: object, num_skipped: int = 0) -> list[Correction]:
    """Return the lines of a file in order. An incomplete last line, of a computer that crashed, is skipped.

    Args:
        content: The content of the file, or its header and its last lines.
        file: Its path, for messages.
        num_skipped: Number of lines between the header and these last lines.

    Raises:
        ValueError: A line is not valid.
    """
    num_complete = _complete_length(content)
    try:  # the last line may lack only its end, after a change in an editor
        return list(_parse(content, file, num_skipped))
    except ValueError:
        if num_complete == len(content):
            raise
    lines = list(_parse(content[:num_complete], file, num_skipped))
    log.warning("%s ends in an incomplete line, which is skipped", file)
    return lines


def _reader(content: bytes) -> Any:
    text = content.decode("utf-8-sig", "surrogateescape")
    return csv.reader(io.StringIO(text, newline=""), strict=True)


def _parse(content: bytes, file: object, num_skipped: int = 0) -> Iterator[Correction]:
    reader = _reader(content)
    try:
        header = _read_header(reader, file)
        for values in reader:
            if values:
                where = f"{file}, line {num_skipped + reader.line_num}"
                yield _correction(header, values, where)
    except csv.Error as error:
        raise ValueError(f"{file}, line {num_skipped + reader.line_num}: {error}") from error


def _read_header(reader: Any, file: object) -> list[str]:
    """Return the columns of a file from the first line of its reader.

    Raises:
        ValueError: They are not those of a file of corrections.
    """
    header = [name.strip().lower() for name in next(reader, [])]
    if not set(header) >= _REQUIRED or not set(header) <= set(COLUMNS):
        raise ValueError(
            f"{file} is not a file of corrections: its first line must be {','.join(COLUMNS)}"
        )
    if len(set(header)) < len(header):
        raise ValueError(f"{file} has a column twice in its first line")
    return header


def _correction(header: list[str], values: list[str], where: str) -> Correction:
    if len(values) != len(header):
        raise ValueError(f"{where} has {len(values)} values, expected {len(header)}")
    row = dict(zip(header, values, strict=True))
    if not row["path"] or not row["was"]:
        raise ValueError(f"{where} has no {'path' if not row['path'] else 'was'}")
    for name in ("was", "now"):
        if shown(row[name]) != row[name]:
            raise ValueError(f"{where}: '{shown(row[name])}' in {name} is not the name of a class")
    return Correction(**row)


def _complete_length(content: bytes) -> int:
    """Return the length of the content without a last record that has no line end.

    A line end within quotes, of a file name that has one, does not end a record.
    """
    end = content.rfind(b"\n") + 1
    while end and content.count(b'"', 0, end) % 2:
        end = content.rfind(b"\n", 0, end - 1) + 1
    return end


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
        lines: The lines that were read. If others have changed earlier lines, a new list replaces this one.

    Raises:
        ValueError: The file exists, and is not a file of corrections.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.lines: list[Correction] = []
        self._columns: Sequence[str] = COLUMNS
        self._state = (0, 0, 0, 0)  # device, inode, size and time of the file that was read
        self._num_read = 0  # bytes
        self._num_complete = 0  # bytes that end with a complete line
        self._checksum = 0  # of the bytes that were read
        self.refresh()

    def refresh(self) -> None:
        """Read the lines that other processes have appended.

        Raises:
            ValueError: A line is not valid. The message names it.
            OSError: The file cannot be read.
        """
        try:
            with _opened(self.path, os.O_RDONLY) as descriptor:
                lock_if_supported(descriptor, fcntl.LOCK_SH)
                self._load(descriptor)
        except FileNotFoundError:
            self._forget()

    def append(self, correction: Correction) -> None:
        """Append a line, and read those of other processes.

        Raises:
            ValueError: A line of the file is not valid, or this one would not be.
            OSError: The line cannot be written. The file is as it was.
        """
        with _opened(self.path, os.O_RDWR | os.O_APPEND | os.O_CREAT) as descriptor:
            lock_if_supported(descriptor, fcntl.LOCK_EX)
            self._load(descriptor)
            record = _record(getattr(correction, name) for name in self._columns)
            list(_parse(_record(self._columns) + record, self.path))
            if self._num_read == 0:
                record = _record(self._columns) + record
            elif self._num_complete < self._num_read:
                record = self._end_last_line(descriptor) + record
            num_before = os.fstat(descriptor).st_size
            try:
                if os.write(descriptor, record) < len(record):
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(self.path))
                os.fsync(descriptor)
            except OSError:
                with contextlib.suppress(OSError):
                    os.ftruncate(descriptor, num_before)
                raise
            self._load(descriptor)

    def _end_last_line(self, descriptor: int) -> bytes:
        """Remove a last line that is incomplete. If it only lacks its end, return the end."""
        content = _read_all(descriptor, self.path)
        try:
            list(_parse(content, self.path))
        except ValueError:
            os.ftruncate(descriptor, self._num_complete)
            return b""
        return b"\n"

    def _load(self, descriptor: int) -> None:
        status = os.fstat(descriptor)
        state = (status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns)
        if state == self._state:
            return
        content = _read_all(descriptor, self.path)
        is_appended = 0 < self._num_complete == self._num_read <= len(content)
        if not is_appended or zlib.crc32(content[: self._num_read]) != self._checksum:
            self._forget()
        if content:
            start = self._num_read
            if start == 0:
                self._columns = _read_header(_reader(content), self.path)
            appended = content[start:]
            header = _record(self._columns) if start else b""
            num_skipped = content.count(b"\n", 0, start) - 1 if start else 0
            self.lines += parse_corrections(header + appended, self.path, num_skipped)
            self._num_complete = start + _complete_length(appended)
            self._num_read = len(content)
            self._checksum = zlib.crc32(content)
        self._state = state

    def _forget(self) -> None:
        self.lines = []
        self._columns = COLUMNS
        self._state = (0, 0, 0, 0)
        self._num_read = 0
        self._num_complete = 0
        self._checksum = 0


def _record(values: Iterable[str]) -> bytes:
    line = io.StringIO(newline="")
    # with \r\n, because csv quotes a carriage return in a field only then
    csv.writer(line, lineterminator="\r\n").writerow(list(values))
    return line.getvalue().removesuffix("\r\n").encode("utf-8", "surrogateescape") + b"\n"
