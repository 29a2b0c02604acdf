"""Addresses of runs on the command line: check them, and replace them by local copies or downloads."""

from pathlib import Path

from finetune.data.addresses import (
    check_address,
    check_is_writable,
    is_in_bucket,
)
from finetune.runs.local_copies import local_copy
from finetune.system.messages import WrongUsage

# Commands that read a checkpoint from object storage.
_READERS = ("predict", "validate", "test", "serve")


def check_run_address(command: str, full: str, address: str) -> None:
    """Check the address of a run in the flag of a command.

    Args:
        command: The command.
        full: The full name of the flag.
        address: Its value.

    Raises:
        WrongUsage: The command takes no address there, or the address is invalid.
    """
    check_is_writable(address, f"--{full}")
    is_checkpoint = full == "ckpt_path" and command in _READERS
    is_written = command == "fit" and full in ("trainer.default_root_dir", "resume")
    if is_checkpoint or is_written:
        check_address(address)
        return
    hint = "only fit writes there: use" if full == "trainer.default_root_dir" else "it must be"
    raise WrongUsage(f"{address} is in object storage; {hint} a local path", full)


def local_run(address: str) -> str:
    """Return the local copy of a run that a fit continues, after a download if the objects are newer."""
    # imported here, since most commands need no object storage
    from finetune.runs.run_download import fetch_run

    run = local_copy(address)
    fetch_run(run)
    return str(run)


def is_run_address(path: str) -> bool:
    """Return whether a path is the address of a run."""
    if not is_in_bucket(path):
        return False
    from finetune.runs.run_download import is_run_there

    check_address(path)
    return is_run_there(path)


def local_checkpoint(command: str, address: str) -> str:
    """Return the path of a downloaded checkpoint.

    Args:
        command: The command that reads it.
        address: Its address, or that of its run.

    Raises:
        WrongUsage: The command reads no checkpoint from object storage.
        NotFound: There is no checkpoint.
    """
    from finetune.runs.run_download import fetch_checkpoint

    check_run_address(command, "ckpt_path", address)
    return str(fetch_checkpoint(address))


def local_results(run: str) -> Path:
    """Return the folder of a run whose report is written: its downloaded files, if it is in object storage."""
    if not is_in_bucket(run):
        return Path(run)
    from finetune.runs.run_download import fetch_results

    check_address(run)
    return fetch_results(run)
