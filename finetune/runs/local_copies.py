"""Local copies of runs in object storage: their folders, and the record of the objects that each copy corresponds to.

`fit --out s3://BUCKET/runs` writes its run to a local copy, a folder in the folder of caches. `run_upload` uploads the
files from there, and `run_download` downloads those of earlier runs to it.
"""

import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from filelock import FileLock

from finetune.data.addresses import is_address, parse_address
from finetune.data.data_place import RUNS_MARK
from finetune.system.cache_dir import cache_dir
from finetune.system.files import replace_text
from finetune.system.messages import WrongUsage

# In the folder of caches, which may be a working directory with its own folder runs.
_RUNS = "runs-in-storage"
_DOWNLOADS = "downloads-of-runs"  # separate, since a fit may be writing the local copy meanwhile
LOCK = ".lock"  # the object with the token of the process that writes the run
UPLOADED = ".uploaded.json"
SYNC = ".sync"  # the file that `alone` locks


def local_copy(address: str) -> Path:
    """Return the local copy of a folder of runs, or of a run, to which a fit writes."""
    return _place(_RUNS, address)


def download_place(address: str) -> Path:
    """Return where commands that only read a run put its files."""
    return _place(_DOWNLOADS, address)


def _place(kind: str, address: str) -> Path:
    parsed = parse_address(address)
    parts = parsed.key.split("/") if parsed.key else []
    if ".." in parts:
        raise WrongUsage(f"{address}: an address must not contain '..'")
    return Path(os.path.abspath(cache_dir()), kind, parsed.scheme, parsed.bucket, *parts)


def local_root(root: str | os.PathLike[str]) -> Path:
    """Return the folder to which runs are written: for an address its local copy."""
    return local_copy(str(root)) if is_address(root) else Path(root)


def check_is_in(out: str | None, run: Path) -> None:
    """Make sure that a run to continue is in the folder of runs that the command names, if it names one.

    Raises:
        WrongUsage: It is in another one.
    """
    if out is not None and not run.resolve().is_relative_to(local_root(out).resolve()):
        raise WrongUsage(
            f"--resume {run} continues in that folder, which is not in --out {out}: omit --out, or copy the "
            "run there first and resume the copy"
        )


def address_of(path: str | os.PathLike[str]) -> str | None:
    """Return the address that belongs to a local copy; None for other folders."""
    return _address_in(_RUNS, path)


def _address_in(kind: str, path: str | os.PathLike[str]) -> str | None:
    base = os.path.realpath(cache_dir() / kind)
    place = Path(os.path.realpath(path))
    if not place.is_relative_to(base):
        return None
    scheme, _, rest = place.relative_to(base).as_posix().partition("/")
    address = f"{scheme}://{rest}"
    return address if rest and is_address(address) else None


def shown_place(path: str | os.PathLike[str]) -> str:
    """Return the place of a run for messages: the address of a local copy or of downloaded files, or the folder."""
    return address_of(path) or _address_in(_DOWNLOADS, path) or str(path)


class Sent(NamedTuple):
    """The state of a file when it was last uploaded or downloaded: its object then had the same content.

    Attributes:
        changed: The time of its last change, in ns; -1 while it is being uploaded.
        size: Bytes.
        e_tag: The ETag of the object; None if it is unknown.
    """

    changed: int
    size: int
    e_tag: str | None


@dataclass
class Record:
    """The record of a local copy, in its file `.uploaded.json`.

    Attributes:
        lock: The ETag of the object `.lock`. If it is still the same, no other machine has continued the run, and the
            local copy is at least as new as the objects. None if that is unknown.
        files: The files that were uploaded or downloaded, by name.
    """

    lock: str | None = None
    files: dict[str, Sent] = field(default_factory=dict)

    def has_same(self, name: str, path: Path) -> bool:
        """Return whether a file is unchanged since it was uploaded or downloaded."""
        sent = self.files.get(name)
        if sent is None or not path.is_file():
            return False
        status = path.stat()
        return (sent.changed, sent.size) == (status.st_mtime_ns, status.st_size)

    def add(self, name: str, status: os.stat_result, e_tag: str | None) -> None:
        self.files[name] = Sent(status.st_mtime_ns, status.st_size, e_tag)


def read_record(run: Path) -> Record:
    """Return the record of a local copy; an empty one if it has none, or a damaged one."""
    try:
        content = json.loads((run / UPLOADED).read_text("utf-8"))
        return Record(content["lock"], {name: _sent(row) for name, row in content["files"].items()})
    except (OSError, ValueError, LookupError, TypeError, AttributeError):
        return Record()


def _sent(row: Any) -> Sent:
    sent = Sent(*row)
    return sent._replace(changed=int(sent.changed), size=int(sent.size))


def write_record(run: Path, record: Record) -> None:
    """Write the record of a local copy."""
    content: Mapping[str, Any] = {"lock": record.lock, "files": record.files}
    replace_text(run / UPLOADED, json.dumps(content) + "\n")


def files_of(run: Path) -> Iterator[tuple[str, Path]]:
    """Yield the name and path of each file of a run, without locks, temporary files, and links, which may lead out."""
    for path in sorted(run.rglob("*")):
        is_hidden = path.name.startswith(".") and path.name != RUNS_MARK
        if path.is_file() and not path.is_symlink() and not is_hidden:
            yield path.relative_to(run).as_posix(), path


@contextmanager
def alone(folder: Path) -> Iterator[None]:
    """Let one process of this machine at a time change the record of a local copy."""
    folder.mkdir(parents=True, exist_ok=True)
    with FileLock(folder / SYNC):
        yield
