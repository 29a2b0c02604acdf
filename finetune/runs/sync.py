"""Runs in object storage: claim a run, push what has changed in its local copy while training continues, and pull it.

`fit --out s3://BUCKET/runs` writes its run to a local copy, see `local_copies`. Each file arrives complete or not at
all. last.ckpt, from which `--resume` continues, arrives after all files that were written before it. After a kill the
bucket has the previous last.ckpt.

Only one process writes a run: the object `.lock` has its random token. A process that continues the run on another
machine writes its own token, and the earlier process ends before its next upload.
"""

import fcntl
import json
import os
import secrets
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, wait
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path, PurePosixPath
from typing import BinaryIO, NamedTuple

import msgspec

from finetune.data import bucket
from finetune.data.addresses import StorageError, parse_address
from finetune.data.data_place import RUNS_MARK
from finetune.distributed.signals import handle_signals_while_waiting
from finetune.runs.local_copies import SYNC, UPLOADED, address_of, download_place
from finetune.runs.run_dir import RECORD
from finetune.system.daemon_threads import start_in_thread
from finetune.system.files import lock_if_supported, replace_text, replacing
from finetune.system.messages import NotFound, WrongUsage

_LOCK = ".lock"  # the object with the token of the process that writes the run
_BEST = "checkpoints/best.ckpt"
_LAST = "checkpoints/last.ckpt"
_BEGINNING = ("config.yaml", RECORD)  # these show the data and the network of a run
_SMALL = 2**23  # bytes; a smaller file is read at once, since training may append to it
_POLL_SECONDS = 0.5
_Objects = Mapping[str, str | None]  # the ETags of the objects of a run, by name


class _Sent(NamedTuple):
    """The state of a file when it was last pushed or pulled: its object then had the same content."""

    changed: int  # time of its last change, in ns; -1 while it is being pushed
    size: int  # bytes
    e_tag: str | None  # of the object, if it is known


@dataclass
class _Record:
    """Sizes and ETags of the objects of a local copy, in its file `.uploaded.json`.

    Attributes:
        lock: The ETag of the object `.lock`. If it is still the same, no other machine has continued the run, and the
            local copy is at least as new as the objects. None if that is unknown.
        files: The files that were pushed or pulled, by name.
    """

    lock: str | None = None
    files: dict[str, _Sent] = field(default_factory=dict)

    @classmethod
    def read(cls, run: Path) -> "_Record":
        """Return the record of a local copy; an empty one if it has none, or a damaged one."""
        try:
            return msgspec.json.decode((run / UPLOADED).read_bytes(), type=cls)
        except (OSError, ValueError):
            return cls()

    def write(self, run: Path) -> None:
        content = {"lock": self.lock, "files": self.files}
        replace_text(run / UPLOADED, json.dumps(content) + "\n")

    def has_same(self, name: str, path: Path) -> bool:
        """Return whether a file is unchanged since it was pushed or pulled."""
        sent = self.files.get(name)
        if sent is None or not path.is_file():
            return False
        status = path.stat()
        return (sent.changed, sent.size) == (status.st_mtime_ns, status.st_size)

    def add(self, name: str, status: os.stat_result, e_tag: str | None) -> None:
        self.files[name] = _Sent(status.st_mtime_ns, status.st_size, e_tag)


class _File(NamedTuple):
    """A file as it was when `push` was called."""

    name: str  # in the run
    content: bytes | BinaryIO  # of a large file the open file
    status: os.stat_result


class _ContinuedElsewhere(StorageError):
    """Another process has continued or deleted the run, so this one must not push it."""


class Sync:
    """The way of a run that this process writes to object storage. Nothing of a local run is moved.

    Args:
        run: The folder of the run; None as long as there is none.
    """

    def __init__(self, run: Path | None) -> None:
        self.address = None if run is None else address_of(run)
        self.run = run or Path()
        self._record = _Record() if self.address is None else _Record.read(self.run)
        self._pushing: Future[None] | None = None
        self._has_failed = False

    @property
    def is_active(self) -> bool:
        """Whether the run is in object storage."""
        return self.address is not None

    def claim(self) -> bool:
        """Reserve the run for this process; return False if another process has begun a run with this name."""
        if not self.is_active:
            return True
        e_tag = bucket.create(f"{self.address}/{_LOCK}", _token())
        if e_tag is not None:
            self._own(e_tag)
        return e_tag is not None

    def take_over(self) -> None:
        """Reserve a run that is continued for this process. A process that writes it on another machine ends."""
        with _alone(self.run):
            self._record = _Record.read(self.run)
            self._own(bucket.write(f"{self.address}/{_LOCK}", _token(), 0))

    def _own(self, e_tag: str | None) -> None:
        self._record.lock = e_tag
        self._record.write(self.run)

    def has_changes(self) -> bool:
        """Return whether the local copy has changes that were not pushed."""
        files = dict(_files_of(self.run))
        is_missing = not self._record.files.keys() <= files.keys()
        return is_missing or not all(map(self._record.has_same, files, files.values()))

    def push(self) -> None:
        """Begin to push the changes, after an earlier push has ended. Does nothing after a push has failed.

        Raises:
            StorageError: A push has failed.
        """
        if self._has_failed or not self.is_active:
            return
        self.wait()
        removed = self._record.files.keys() - dict(_files_of(self.run)).keys()
        changed = self._changed_files()
        if removed or changed:
            self._pushing = start_in_thread(partial(self._push, removed, changed), "upload")

    def check(self) -> None:
        """Raise the error of a push that has failed, without waiting for one that has not ended.

        Raises:
            StorageError: A push has failed.
        """
        if self._pushing is not None and self._pushing.done():
            self.wait()

    def finish(self) -> None:
        """Push the changes, and wait until they have arrived.

        Raises:
            StorageError: A push has failed.
        """
        self.push()
        self.wait()

    def wait(self) -> None:
        """Wait for the end of the push.

        Raises:
            StorageError: It has failed, or another process has continued the run.
        """
        while self._pushing is not None and not wait([self._pushing], _POLL_SECONDS).done:
            handle_signals_while_waiting()
        pushing = self._pushing
        self._pushing = None
        if pushing is None:
            return
        try:
            pushing.result()
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
        if not self.is_active:
            return
        with suppress(StorageError):
            self.wait()
        with suppress(StorageError):
            self._check_owner(is_start=True)  # after a failed push the storage may still be gone
            for name in [*self._record.files, _LOCK]:
                bucket.delete(f"{self.address}/{name}")

    def _changed_files(self) -> list[_File]:
        """Return the changed files in the order of their push: the oldest first, but last.ckpt last."""
        files = []
        for name, path in _files_of(self.run):
            if not self._record.has_same(name, path):
                file = open(path, "rb")  # noqa: SIM115 the push closes it
                status = os.fstat(file.fileno())
                if status.st_size > _SMALL:
                    files.append(_File(name, file, status))
                else:
                    with file:
                        files.append(_File(name, file.read(), status))
        return sorted(files, key=lambda file: (file.name == _LAST, file.status.st_mtime_ns))

    def _push(self, removed: Iterable[str], changed: Sequence[_File]) -> None:
        """Delete and write objects, and close the files."""
        try:
            self._check_owner()
            for name in removed:
                bucket.delete(f"{self.address}/{name}")
                del self._record.files[name]
            # If this process is killed, it is unknown which files have arrived: all are pushed again.
            self._record.files |= {file.name: _Sent(-1, -1, None) for file in changed}
            self._record.write(self.run)
            self._push_record_without_results(changed)
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
            self._record.write(self.run)
        finally:
            for file in changed:
                if not isinstance(file.content, bytes):
                    file.content.close()

    def _push_record_without_results(self, changed: Sequence[_File]) -> None:
        """Write run.json without results before another best.ckpt, so that a kill leaves none of an earlier one."""
        contents = {file.name: file.content for file in changed}
        record = contents.get(RECORD)
        if _BEST in contents and isinstance(record, bytes):
            facts = json.loads(record)
            kept = {name: fact for name, fact in facts.items() if name not in ("best", "test")}
            bucket.write(f"{self.address}/{RECORD}", json.dumps(kept).encode(), 0)

    def _check_owner(self, is_start: bool = False) -> None:
        lock = bucket.head(f"{self.address}/{_LOCK}", is_start)
        if (None if lock is None else lock.e_tag) != self._record.lock:
            raise _ContinuedElsewhere(
                f"another process has continued {self.address}, or has deleted it: this one ends. The local copy is "
                f"{self.run}"
            )


def pull_beginnings(root: Path) -> None:
    """Download what shows the data and the network of each run of `fit` to the local copy of a folder of runs.

    Does nothing for a folder that is not a local copy.

    Raises:
        StorageError: The storage cannot be reached.
    """
    address = address_of(root)
    if address is None:
        return
    runs: dict[str, dict[str, str | None]] = {}
    for name, e_tag in _objects_in(f"{address}/fit").items():
        run, _, inside = name.partition("/")
        runs.setdefault(run, {})[inside] = e_tag
    for run, objects in runs.items():
        folder = root / "fit" / run
        if not objects.keys().isdisjoint((*_BEGINNING, _LOCK)) and _is_name(run):
            with _alone(folder):
                lock = _Record.read(folder).lock
                if lock is None or lock != objects.get(_LOCK):
                    _pull(f"{address}/fit/{run}", objects, objects.keys() & {*_BEGINNING}, folder)


def pull_run(run: Path) -> None:
    """Make the local copy of a run complete, unless it is at least as new as the objects.

    Does nothing for a folder that is not a local copy.

    Raises:
        StorageError: The storage cannot be reached, or another process writes the run.
        ValueError: The run was deleted there.
    """
    address = address_of(run)
    if address is None:
        return
    with _alone(run):
        objects = _objects_in(address)
        record = _Record.read(run)
        if not objects and (record.lock is not None or record.files):
            raise ValueError(
                f"{address} was deleted, but its local copy {run} was not: delete it, or copy it to that address"
            )
        lock = objects.get(_LOCK)
        if lock is not None and lock == record.lock:
            if _LAST in objects and not (run / _LAST).exists():  # deleted by hand
                _pull(address, objects, [_LAST], run)
            return
        # if this process is killed, the next one must not take the copy for complete
        if record.lock is not None:
            _Record(None, record.files).write(run)
        record = _pull(address, objects, filter(_is_name, objects), run, is_complete=True)
        if objects:
            _Record(lock, record.files).write(run)


def pull_checkpoint(address: str) -> Path:
    """Download a checkpoint, unless it is cached, and return its path.

    Args:
        address: A checkpoint; or a run, for its best checkpoint, or its last if it has no best.

    Raises:
        NotFound: There is no checkpoint.
        StorageError: The storage cannot be reached.
    """
    run = str(parse_address(address))
    names = [_BEST, _LAST]
    if PurePosixPath(address).suffix:
        run, _, name = run.rpartition("/")
        names = [name]
    for name in names:
        item = bucket.head(f"{run}/{name}", is_start=True)
        if item is not None:
            folder = download_place(run)
            with _alone(folder):
                _pull(run, {name: item.e_tag}, [name], folder)
            return folder / name
    raise NotFound(f"there is no checkpoint {' or '.join(f'{run}/{name}' for name in names)}")


def pull_results(address: str) -> Path:
    """Download a run without its last.ckpt, which only resuming needs, and return its folder.

    Raises:
        WrongUsage: There is no run.
        StorageError: The storage cannot be reached, or another process writes the run.
    """
    run = str(parse_address(address))
    objects = _objects_in(run)
    if RECORD not in objects:
        raise WrongUsage(f"{run} is not a run: it has no {RECORD}")
    folder = download_place(run)
    names = [name for name in objects if _is_name(name) and name != _LAST]
    with _alone(folder):
        _pull(run, objects, names, folder, is_complete=True)
    return folder


def names_there(root: Path, command: str) -> list[str]:
    """Return the names of the runs of a command in object storage; none if the folder of runs is not a local copy.

    Raises:
        StorageError: The storage cannot be reached.
    """
    address = address_of(root)
    return [] if address is None else bucket.folders_in(f"{address}/{command}")


def has_last_there(run: Path) -> bool:
    """Return whether object storage has the last.ckpt of a run, given its local copy.

    Raises:
        StorageError: The storage cannot be reached.
    """
    return bucket.head(f"{_address(run)}/{_LAST}", is_start=True) is not None


def is_run_there(address: str) -> bool:
    """Return whether a run is at an address.

    Raises:
        StorageError: The storage cannot be reached.
    """
    return bucket.head(f"{parse_address(address)}/{RECORD}", is_start=True) is not None


def _token() -> bytes:
    return secrets.token_hex(16).encode()


def _address(run: Path) -> str:
    address = address_of(run)
    assert address is not None, f"{run} is not a local copy"
    return address


@contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """Let one process of this machine at a time change the record of a local copy."""
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / SYNC, "ab") as file:
        lock_if_supported(file.fileno(), fcntl.LOCK_EX)
        yield


def _files_of(run: Path) -> Iterator[tuple[str, Path]]:
    """Yield the name and path of each file of a run, without locks, temporary files, and links, which may lead out."""
    for path in sorted(run.rglob("*")):
        is_hidden = path.name.startswith(".") and path.name != RUNS_MARK
        if path.is_file() and not path.is_symlink() and not is_hidden:
            yield path.relative_to(run).as_posix(), path


def _objects_in(folder: str) -> dict[str, str | None]:
    """Return the ETags of the objects in a folder and its subfolders, by name."""
    return {name: item.e_tag for name, item in bucket.objects_in(folder).items()}


def _is_name(name: str) -> bool:
    """Return whether a name of an object is used for a file: it stays in the folder, and is not hidden."""
    parts = PurePosixPath(name).parts
    return bool(parts) and not any(part.startswith((".", "/")) or "\\" in part for part in parts)


def _pull(
    address: str,
    objects: _Objects,
    names: Iterable[str],
    folder: Path,
    is_complete: bool = False,
) -> _Record:
    """Download objects of a run that are not cached, and return the record, which is also written.

    Args:
        address: The run.
        objects: Its objects.
        names: The objects to download.
        folder: The folder for their files.
        is_complete: Whether these are all: other files are deleted if they were pushed or pulled before.
    """
    record = _Record.read(folder)
    # last.ckpt last, as in a push: a killed download leaves no new last.ckpt without the files that it needs
    names = sorted(names, key=lambda name: name == _LAST)
    for name in names:
        path = folder / name
        e_tag = objects[name]
        is_known = name in record.files and record.files[name].e_tag == e_tag
        if is_known and e_tag is not None and record.has_same(name, path):
            continue
        path.parent.mkdir(parents=True, exist_ok=True)
        with replacing(path) as temporary:
            bucket.download(f"{address}/{name}", e_tag, temporary)
        record.add(name, path.stat(), e_tag)
        record.write(folder)
    for name in record.files.keys() - set(names) if is_complete else ():
        (folder / name).unlink(missing_ok=True)
        del record.files[name]
    record.write(folder)
    return record
