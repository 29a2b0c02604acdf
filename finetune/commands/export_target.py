"""Where the files of an export are written: first to a temporary folder, and to their place once they are verified."""

import errno
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

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


def put_in_place(target: Path, files: dict[Path, Path]) -> None:
    """Write the files of an export atomically, so that all are of one export even if others run in parallel.

    Args:
        target: The file or folder of the export.
        files: Each place, and the file that is copied to it. The last one is missing until the end: no program can load
            a part, and none reads the description of another file.
    """
    with one_at_a_time(target), ExitStack() as replaced:
        for path in files:
            path.parent.mkdir(parents=True, exist_ok=True)
            for leftover in unfinished(path):  # of a process that was killed
                leftover.unlink(missing_ok=True)
        for path, source in reversed(files.items()):  # the first one is replaced first
            temporary = replaced.enter_context(replacing(path))
            try:
                shutil.copyfile(source, temporary)
            except OSError as error:  # it names the source
                raise OSError(error.errno, error.strerror, str(path)) from error
        [*_, last] = files
        last.resolve().unlink(missing_ok=True)
