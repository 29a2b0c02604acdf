"""Download runs from object storage: complete to their local copies for `--resume`, else only what a command reads."""

from collections.abc import Iterable, Mapping
from pathlib import Path, PurePosixPath

from finetune.data import bucket
from finetune.data.addresses import parse_address
from finetune.runs.local_copies import (
    LOCK,
    Record,
    address_of,
    alone,
    download_place,
    read_record,
    write_record,
)
from finetune.system.files import replacing
from finetune.system.messages import NotFound, WrongUsage

_BEGINNING = ("config.yaml", "run.json")  # these show the data and the network of a run
_BEST = "checkpoints/best.ckpt"
_LAST = "checkpoints/last.ckpt"
_ONLY_FOR_RESUMING = (_LAST, "checkpoints/start.ckpt")


def fetch_beginnings(root: Path) -> None:
    """Download config.yaml and run.json of the runs of `fit` to the local copy of a folder of runs.

    Does nothing for a folder that is not a local copy.

    Raises:
        StorageError: The storage cannot be reached.
    """
    address = address_of(root)
    if address is None:
        return
    place = f"{address}/fit"
    runs: dict[str, dict[str, str | None]] = {}
    for name, e_tag in _e_tags_in(place).items():
        run, _, inside = name.partition("/")
        runs.setdefault(run, {})[inside] = e_tag
    for run, files in runs.items():
        folder = root / "fit" / run
        if not files.keys().isdisjoint((*_BEGINNING, LOCK)) and _is_name(run):
            with alone(folder):
                record = read_record(folder)
                if record.lock is None or record.lock != files.get(LOCK):
                    _get(f"{place}/{run}", files, [n for n in _BEGINNING if n in files], folder)


def fetch_run(run: Path) -> None:
    """Make the local copy of a run complete, unless it is at least as new as the objects.

    Does nothing for a folder that is not a local copy.

    Raises:
        StorageError: The storage cannot be reached, or another process writes the run.
        ValueError: The run was deleted there.
    """
    address = address_of(run)
    if address is None:
        return
    with alone(run):
        objects = _e_tags_in(address)
        record = read_record(run)
        if not objects and (record.lock is not None or record.files):
            raise ValueError(
                f"{address} was deleted, but its local copy {run} was not: delete it, or copy it to that address"
            )
        lock = objects.get(LOCK)
        if lock is not None and lock == record.lock:
            if _LAST in objects and not (run / _LAST).exists():  # deleted by hand
                _get(address, objects, [_LAST], run)
            return
        # if this process is killed, the next one must not take the copy for complete
        if record.lock is not None:
            write_record(run, Record(None, record.files))
        names = [name for name in objects if _is_name(name)]
        record = _get(address, objects, names, run)
        for name in record.files.keys() - set(names):
            (run / name).unlink(missing_ok=True)
            del record.files[name]
        if objects:
            write_record(run, Record(lock, record.files))


def has_remote_last(run: Path) -> bool:
    """Return whether object storage has the last.ckpt of a run.

    Args:
        run: The local copy of the run.

    Raises:
        StorageError: The storage cannot be reached.
    """
    address = address_of(run)
    assert address is not None, f"{run} is not a local copy"
    return bucket.head(f"{address}/{_LAST}", is_start=True) is not None


def fetch_checkpoint(address: str) -> Path:
    """Download a checkpoint, unless it is cached, and return its path.

    Args:
        address: A checkpoint; or a run, for its best checkpoint, or its last if it has no best.

    Raises:
        NotFound: There is no checkpoint.
        StorageError: The storage cannot be reached.
    """
    if PurePosixPath(address).suffix:
        run, _, name = str(parse_address(address)).rpartition("/")
        names = [name]
    else:
        run = str(parse_address(address))
        names = [_BEST, _LAST]
    for name in names:
        item = bucket.head(f"{run}/{name}", is_start=True)
        if item is not None:
            folder = download_place(run)
            with alone(folder):
                _get(run, {name: item.e_tag}, [name], folder)
            return folder / name
    raise NotFound(f"there is no checkpoint {' or '.join(f'{run}/{name}' for name in names)}")


def fetch_results(address: str) -> Path:
    """Download a run without the files that only resuming needs, and return its folder.

    Raises:
        WrongUsage: There is no run.
        StorageError: The storage cannot be reached, or another process writes the run.
    """
    run = str(parse_address(address))
    objects = _e_tags_in(run)
    if objects.keys().isdisjoint((*_BEGINNING, _BEST, _LAST)):
        raise WrongUsage(f"{run} is not a run: it has no config.yaml and no checkpoint")
    folder = download_place(run)
    names = [name for name in objects if _is_name(name) and name not in _ONLY_FOR_RESUMING]
    with alone(folder):
        record = _get(run, objects, names, folder)
        for name in record.files.keys() - set(names):
            (folder / name).unlink(missing_ok=True)
            del record.files[name]
        write_record(folder, record)
    return folder


def names_there(root: Path, command: str) -> list[str]:
    """Return the names of the runs of a command that are in object storage.

    Args:
        root: The local copy of a folder of runs. The result is empty if it is not a local copy.
        command: The command.

    Raises:
        StorageError: The storage cannot be reached.
    """
    address = address_of(root)
    if address is None:
        return []
    return bucket.folders_in(f"{address}/{command}")


def is_run_there(address: str) -> bool:
    """Return whether a run is at an address, perhaps one that keeps only its best checkpoint."""
    run = str(parse_address(address))
    return any(bucket.head(f"{run}/{name}", is_start=True) for name in (_LAST, _BEST))


def _e_tags_in(folder: str) -> dict[str, str | None]:
    """Return the ETags of the objects in a folder and its subfolders, by name."""
    return {name: item.e_tag for name, item in bucket.objects_in(folder).items()}


def _get(
    address: str, objects: Mapping[str, str | None], names: Iterable[str], folder: Path
) -> Record:
    """Download objects of a run that are not cached, and return the record, which is also written.

    Args:
        address: The run.
        objects: The ETags of its objects, by name.
        names: The objects to download.
        folder: The folder for their files.
    """
    record = read_record(folder)
    # last.ckpt last, as in an upload: a killed download leaves no new last.ckpt without the files that it needs
    for name in sorted(names, key=lambda name: name == _LAST):
        path = folder / name
        e_tag = objects[name]
        is_known = name in record.files and record.files[name].e_tag == e_tag
        if is_known and e_tag is not None and record.has_same(name, path):
            continue
        path.parent.mkdir(parents=True, exist_ok=True)
        with replacing(path) as temporary:
            bucket.download(f"{address}/{name}", e_tag, temporary)
        record.add(name, path.stat(), e_tag)
        write_record(folder, record)
    return record


def _is_name(name: str) -> bool:
    """Return whether a name of an object is used for a file: it stays in the folder, and is not hidden."""
    parts = PurePosixPath(name).parts
    return bool(parts) and not any(part.startswith((".", "/")) or "\\" in part for part in parts)
