"""Where the files of an export are written: first to a temporary folder, and to their place once they are verified."""

import errno
import json
import shutil
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from finetune.system.files import one_at_a_time, replacing, unfinished


@contextmanager
def workplace() -> Iterator[Path]:
    """Yield a temporary folder for files that are not verified yet. If the process is killed, the system clears it.

    Raises:
        OSError: The disk is full.
    """
    with tempfile.TemporaryDirectory(prefix="finetune_export_") as folder:
        try:
            yield Path(folder)
        except OSError as error:
            if error.errno == errno.ENOSPC and not error.filename:
                place = (
                    f"{tempfile.gettempdir()}, the folder for temporary files (TMPDIR sets another)"
                )
                raise OSError(error.errno, error.strerror, place) from error
            raise


def write_description(path: Path, facts: Mapping[str, Any]) -> None:
    """Write the description of an export as JSON."""
    path.write_text(json.dumps(facts, indent=2) + "\n", "utf-8")


def put_file_in_place(
    file: Path, facts: Mapping[str, Any], target: Path, description_path: Path
) -> None:
    """Write a file and its description atomically, so that both are of one export even if others run in parallel."""
    with one_at_a_time(target), ExitStack() as replaced:
        for path in (target, description_path):
            _remove_leftovers(path)
        description = replaced.enter_context(replacing(description_path))
        _copy(file, replaced.enter_context(replacing(target)), target)
        write_description(description, facts)
        # Until the end there is no description, rather than that of another file.
        description_path.resolve().unlink(missing_ok=True)


def put_folder_in_place(folder: Path, target: Path, names: Sequence[str]) -> None:
    """Copy the files of an export to its folder. The last one is missing until the end: nothing can load a part."""
    with one_at_a_time(target):
        target.mkdir(parents=True, exist_ok=True)
        (target / names[-1]).unlink(missing_ok=True)
        for name in names:
            path = target / name
            path.parent.mkdir(parents=True, exist_ok=True)
            _remove_leftovers(path)
            with replacing(path) as content:
                _copy(folder / name, content, path)


def _remove_leftovers(path: Path) -> None:
    """Remove the temporary files of processes that were killed while they wrote this file."""
    for leftover in unfinished(path):
        leftover.unlink(missing_ok=True)


def _copy(source: Path, temporary: Path, target: Path) -> None:
    """Copy a file to the temporary file that becomes `target`, which an error names."""
    try:
        shutil.copyfile(source, temporary)
    except OSError as error:  # it names the source
        raise OSError(error.errno, error.strerror, str(target)) from error
