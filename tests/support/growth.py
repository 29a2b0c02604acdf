"""The memory and file handles of a fit after each epoch: `python growth.py OUT DATA 1 EPOCHS WORKERS [leak]`.

With `leak` each epoch keeps a file open and some memory, as a control.
"""

import json
import os
import re
import sys
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from colours import QUICKEST

from finetune.cli import run
from finetune.training.classifier import Classifier

LEAKED_BYTES = 2**22  # in each epoch

rows: list[dict[str, int]] = []
leaked: list[Any] = []


def processes() -> list[Path]:
    """Return the folders in /proc of this process and its workers."""
    own = Path("/proc/self")
    children = (own / f"task/{os.getpid()}/children").read_text().split()
    return [own, *(Path("/proc", child) for child in children)]


def sample() -> dict[str, int]:
    """Return the bytes that only these processes have, and the number of their handles and of the processes."""
    of_all = processes()
    statuses = [(one / "status").read_text() for one in of_all]
    kilobytes = [int(value) for text in statuses for value in re.findall(r"RssAnon:\s*(\d+)", text)]
    return {
        "bytes": 1024 * sum(kilobytes),
        "handles": sum(len(os.listdir(one / "fd")) for one in of_all),
        "processes": len(of_all),
    }


def watch(is_leaking: bool) -> None:
    """Add a row for each epoch of the fits that follow."""

    original = Classifier.on_train_epoch_end

    def on_train_epoch_end(model: Classifier) -> None:
        original(model)
        if is_leaking:
            leaked.append((open(__file__), os.urandom(LEAKED_BYTES)))  # noqa: SIM115 the leak
        rows.append(sample())

    patch.object(Classifier, "on_train_epoch_end", on_train_epoch_end).start()


if __name__ == "__main__":
    out = sys.argv[1]
    data = sys.argv[2]
    epochs = sys.argv[4]
    workers = sys.argv[5]
    torch.set_num_threads(1)
    watch(is_leaking=sys.argv[6:] == ["leak"])
    os.chdir(out)
    run(["fit", data, *QUICKEST, "--trainer.max_epochs", epochs, "--workers", workers])
    Path("rows.json").write_text(json.dumps(rows))
