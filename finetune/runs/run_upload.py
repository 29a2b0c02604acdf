"""Uploads a run from its local copy to object storage, while training continues."""

import os
import secrets
from collections.abc import Iterable, Sequence
from concurrent.futures import Future, wait
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import BinaryIO, NamedTuple

from finetune.data import bucket
from finetune.data.addresses import StorageError
from finetune.distributed.signals import handle_signals_while_waiting
from finetune.runs.local_copies import (
    LOCK,
    Sent,
    address_of,
    alone,
    files_of,
    read_record,
    write_record,
)
from finetune.system.daemon_threads import start_in_thread

_LAST = "checkpoints/last.ckpt"
_SMALL = 2**23  # bytes; a smaller file is read at once, since training may append to it
_POLL_SECONDS = 0.5


class _File(NamedTuple):
    """A file as it was when `send` was called.

    Attributes:
        name: Its name in the run.
        content: Its content; for a large file the open file.
        status: Its size, times and inode.
    """

    name: str
    content: bytes | BinaryIO
    status: os.stat_result


class _ContinuedElsewhere(StorageError):
    """Another process has continued or deleted the run, so this one must not upload it."""


class RunUpload:
    """The upload of a run. Only rank 0 has one.

    Each file arrives complete or not at all. last.ckpt, from which `--resume` continues, arrives after all files that
    were written before it. If the process is killed earlier, the bucket has the previous last.ckpt.

    Only one process writes a run: the object `.lock` has its random token. A process that continues the run on another
    machine writes its own token, and the earlier process ends before its next upload.

    Args:
        run: The local copy of the run.
    """

    def __init__(self, run: Path) -> None:
        address = address_of(run)
        assert address is not None, f"{run} is not a local copy"
        self.run = run
        self.address = address
        self._record = read_record(run)
        self._sending: Future[None] | None = None
        self._has_failed = False

    def claim(self) -> bool:
        """Reserve the run for this process; return False if another process has begun a run with this name."""
        e_tag = bucket.create(f"{self.address}/{LOCK}", secrets.token_hex(16).encode())
        if e_tag is not None:
            self._own(e_tag)
        return e_tag is not None

    def take_over(self) -> None:
        """Reserve a run that is continued for this process. A process that writes it on another machine ends."""
        with alone(self.run):
            self._record = read_record(self.run)
            token = secrets.token_hex(16).encode()
            self._own(bucket.write(f"{self.address}/{LOCK}", token, 0))

    def _own(self, e_tag: str | None) -> None:
        self._record.lock = e_tag
        write_record(self.run, self._record)

    def has_changes(self) -> bool:
        """Return whether the local copy has changes that were not uploaded."""
        names = {name for name, _ in files_of(self.run)}
        is_missing = not self._record.files.keys() <= names
        return is_missing or any(
            not self._record.has_same(name, path) for name, path in files_of(self.run)
        )

    def send(self) -> None:
        """Begin to upload the changes, after an earlier upload has ended. Does nothing after an upload has failed.

        Raises:
            StorageError: An upload has failed.
        """
        if self._has_failed:
            return
        self.wait()
        removed = self._record.files.keys() - {name for name, _ in files_of(self.run)}
        changed = self._changed_files()
        if removed or changed:
            self._sending = start_in_thread(partial(self._upload, removed, changed), "upload")

    def check(self) -> None:
        """Raise the error of an upload that has failed, without waiting for one that has not ended.

        Raises:
            StorageError: An upload has failed.
        """
        if self._sending is not None and self._sending.done():
            self.wait()

    def wait(self) -> None:
        """Wait for the end of the upload.

        Raises:
            StorageError: It has failed, or another process has continued the run.
        """
        while self._sending is not None and not wait([self._sending], _POLL_SECONDS).done:
            handle_signals_while_waiting()
        sending = self._sending
        self._sending = None
        if sending is None:
            return
        try:
            sending.result()
        except _ContinuedElsewhere:
            self._has_failed = True
            raise
        except (StorageError, OSError) as error:
            self._has_failed = True
            raise StorageError(
                f"cannot upload the run: {error}. It is kept in {self.run}: the same command with --resume continues "
                "and uploads it"
            ) from error

    def withdraw(self) -> None:
        """Delete the objects of a run without a result, unless another process has continued it."""
        with suppress(StorageError):
            self.wait()
        with suppress(StorageError):
            self._check_owner(is_start=True)  # after a failed upload the storage may still be gone
            for name in [*self._record.files, LOCK]:
                bucket.delete(f"{self.address}/{name}")

    def _changed_files(self) -> list[_File]:
        """Return the changed files in the order of their upload: the oldest first, but last.ckpt last."""
        files = []
        for name, path in files_of(self.run):
            if not self._record.has_same(name, path):
                file = open(path, "rb")  # noqa: SIM115 the upload closes it
                status = os.fstat(file.fileno())
                if status.st_size > _SMALL:
                    files.append(_File(name, file, status))
                else:
                    with file:
                        files.append(_File(name, file.read(), status))
        return sorted(files, key=lambda file: (file.name == _LAST, file.status.st_mtime_ns))

    def _upload(self, removed: Iterable[str], changed: Sequence[_File]) -> None:
        """Delete and write objects, and close the files."""
        try:
            self._check_owner()
            for name in removed:
                bucket.delete(f"{self.address}/{name}")
                del self._record.files[name]
            # If this process is killed, it is unknown which files have arrived: all are uploaded again.
            self._record.files |= {file.name: Sent(-1, -1, None) for file in changed}
            write_record(self.run, self._record)
            names: dict[int, str] = {}  # best.ckpt and last.ckpt may be the same file
            for file in changed:
                path = f"{self.address}/{file.name}"
                e_tag = None
                if file.status.st_ino in names:
                    bucket.copy(f"{self.address}/{names[file.status.st_ino]}", path)
                else:
                    e_tag = bucket.write(path, file.content, file.status.st_mtime_ns)
                names[file.status.st_ino] = file.name
                self._record.add(file.name, file.status, e_tag)
            write_record(self.run, self._record)
        finally:
            for file in changed:
                if not isinstance(file.content, bytes):
                    file.content.close()

    def _check_owner(self, is_start: bool = False) -> None:
        lock = bucket.head(f"{self.address}/{LOCK}", is_start)
        if (None if lock is None else lock.e_tag) != self._record.lock:
            raise _ContinuedElsewhere(
                f"another process has continued {self.address}, or has deleted it: this one ends. The local copy is "
                f"{self.run}"
            )
