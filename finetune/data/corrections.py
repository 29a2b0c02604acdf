"""corrections.csv: labels that people have corrected. Each decision is a line; the last line of an image counts.

The columns are path, was, now, by and when:

- `path`: path of the image relative to the folder of the data set.
- `was`: its class by the folder or table; empty if it has no label there. A file in which all are empty is a table of
  labels, which `fit` takes.
- `now`: its class by the decision. The same class confirms the label, `excluded` excludes the image, and an empty value
  withdraws earlier decisions.
- `by`, `when`: the name of the person, and the time. They are not read, and a line may lack them.

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
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from finetune.data.data_set import Changes, DataSet, label_set_name
from finetune.data.listing import ScanOptions
from finetune.data.samples import Samples
from finetune.system.file_names import composed
from finetune.system.files import lock_if_supported
from finetune.system.messages import NotFound, WrongUsage, did_you_mean, shown

COLUMNS = ("path", "was", "now", "by", "when")
EXCLUDED = "excluded"
WITHDRAWN = ""
_LABEL_SEPARATOR = ";"
_REQUIRED = 3  # of these columns
_MAX_BYTES = 2**28  # about two million lines
_MOST_PAIRS = 10  # kinds of changed labels that a report lists
_AS_FOUND = ScanOptions()


class Correction(NamedTuple):
    """A decision about the label of an image; see the columns of the file."""

    path: str
    was: str
    now: str
    by: str = ""
    when: str = ""


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
    if not os.path.exists(file):
        raise NotFound(f"{option}: there is no file {str(file)!r}; null applies none")
    return last_decisions(CorrectionsFile(Path(file)).lines)


def last_decisions(lines: Iterable[Correction]) -> dict[str, Correction]:
    """Return the last decision about each image, by its path in composed Unicode, without withdrawn ones."""
    last = {composed(line.path): line for line in lines}
    return {path: line for path, line in last.items() if line.now != WITHDRAWN}


def parse_corrections(content: bytes, file: object) -> list[Correction]:
    """Return the lines in the content of a file, in order.

    Raises:
        ValueError: A line is not valid. The message names the file and the line.
    """
    text = content.decode("utf-8-sig", "surrogateescape")
    reader = csv.reader(io.StringIO(text, newline=""), strict=True)
    lines: list[Correction] = []
    try:
        columns = tuple(name.strip().lower() for name in next(reader, []))
        if len(columns) < _REQUIRED or columns != COLUMNS[: len(columns)]:
            raise ValueError(
                f"{file} is not a file of corrections: its first line must be {','.join(COLUMNS)}"
            )
        for values in filter(None, reader):
            where = f"{file}, line {reader.line_num}"
            if not _REQUIRED <= len(values) <= len(COLUMNS):
                raise ValueError(f"{where} has {len(values)} values, expected {len(COLUMNS)}")
            line = Correction(*values)
            if not line.path:
                raise ValueError(f"{where} has no path")
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
        header = _record(COLUMNS)
        record = _record(correction)
        added = parse_corrections(header + record, self.path)
        with _opened(self.path, os.O_RDWR | os.O_APPEND | os.O_CREAT) as descriptor:
            lock_if_supported(descriptor, fcntl.LOCK_EX)
            self._load(descriptor)
            check()
            size = os.fstat(descriptor).st_size
            if size == 0:
                record = header + record
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
        if state == self._state:
            return
        size = os.fstat(descriptor).st_size
        if size > _MAX_BYTES:
            raise ValueError(f"{self.path} has {size:,} bytes, more than {_MAX_BYTES:,}")
        content = os.pread(descriptor, size, 0)
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


def correct(
    data: DataSet,
    file: str,
    decisions: Mapping[str, Correction],
    options: ScanOptions = _AS_FOUND,
    with_test: bool = False,
) -> DataSet:
    """Return a data set with corrected labels, without the images and splits that are excluded now.

    Splits, names and order of the images stay.

    Args:
        data: The data set.
        file: Path of the file of corrections.
        decisions: The decisions in it, as `read_corrections` returns them.
        options: How the data set was read. An image that is corrected to an excluded class is excluded.
        with_test: Whether to correct test images, too.

    Raises:
        ValueError: An image is corrected to an unknown class, or all images are excluded.
    """
    splits = dict(data.splits)
    changes: dict[str, dict[str, Any]] = {}
    num_known = 0
    in_test = 0
    for split, samples in data.splits.items():
        corrected, num, pairs = _correct_split(data, samples, file, decisions, options)
        num_known += num.total()
        if split == "test" and not with_test:
            in_test = num["changed"] + num["excluded"]
            continue
        kinds = ("changed", "excluded", "confirmed", "outdated")
        most = [[*pair, times] for pair, times in pairs.most_common(_MOST_PAIRS)]
        changes[split] = {**{kind: num[kind] for kind in kinds}, "pairs": most}
        splits[split] = corrected
        if not len(corrected):
            del splits[split]
    if not splits:
        raise ValueError(f"{file}: no image is left, because all are excluded")
    unknown = len(decisions) - num_known
    applied = Changes(file, changes, unknown, in_test, data.label_kind == "several")
    return replace(data, splits=splits, corrections=applied)


def _correct_split(
    data: DataSet,
    samples: Samples,
    file: str,
    decisions: Mapping[str, Correction],
    options: ScanOptions,
) -> tuple[Samples, Counter[str], Counter[tuple[str, str]]]:
    """Return the corrected images of a split, the number of decisions of each kind, and of each change of labels."""
    number_of = {composed(name): k for k, name in enumerate(data.class_names)}
    is_single = data.label_kind == "single"

    def parse(text: str) -> set[str]:
        return set(options.changed([composed(text)] if is_single else split_labels(text)))

    labels = samples.targets.labels.copy()
    is_kept = np.ones(len(samples), bool)
    num: Counter[str] = Counter()
    pairs: Counter[tuple[str, str]] = Counter()
    for i, name in enumerate(samples.names()):
        correction = decisions.get(composed(name))
        if correction is None:
            continue
        before = [int(labels[i])] if is_single else np.flatnonzero(labels[i]).tolist()
        now = parse(correction.now)
        is_excluded = composed(correction.now) == EXCLUDED and EXCLUDED not in number_of
        if {number_of.get(label, -1) for label in parse(correction.was)} != set(before):
            num["outdated"] += 1
        elif is_excluded or (is_single and not now):
            num["excluded"] += 1
            is_kept[i] = False
        elif unknown := sorted(now - number_of.keys()):
            hint = did_you_mean(unknown[0], data.class_names)
            raise ValueError(
                f"{file}: {shown(name)} is corrected to {unknown[0]!r}, which is not a class of the data set{hint}"
            )
        elif (after := sorted(number_of[label] for label in now)) == before:
            num["confirmed"] += 1
        else:
            num["changed"] += 1
            was, is_now = (
                label_set_name([data.class_names[k] for k in of]) for of in (before, after)
            )
            pairs[was, is_now] += 1
            labels[i] = after[0] if is_single else np.isin(np.arange(len(number_of)), after)
    corrected = replace(samples, targets=replace(samples.targets, labels=labels))
    return corrected.take(np.flatnonzero(is_kept)), num, pairs
