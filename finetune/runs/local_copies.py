"""The folders of runs in object storage on this machine; `sync` moves their files.

`fit --out s3://BUCKET/runs` writes its run to a local copy, a folder in the folder of caches. Commands that only read a
run have a folder of their own.
"""

import os
from pathlib import Path

from finetune.data.addresses import is_address, parse_address
from finetune.system.cache_dir import cache_dir
from finetune.system.messages import WrongUsage

# In the folder of caches, which may be a working directory with its own folder runs.
_RUNS = "runs-in-storage"
_DOWNLOADS = "downloads-of-runs"  # separate, since a fit may be writing the local copy meanwhile
UPLOADED = ".uploaded.json"  # the record of the objects of a local copy
SYNC = ".sync"  # the file that a process locks while it moves files


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
