"""The memory of a fit does not grow with its epochs."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from colours import QUICKEST

pytestmark = pytest.mark.slow

_ALLOWED = 2**19  # bytes over the ten epochs after the first five: 60 kB seen
_LEAK = 2**18  # bytes an epoch, the size of a few pictures: the control

# In a process of its own, whose allocator holds nothing of other tests. Freed memory is returned to the system before
# each reading, because the allocator keeps a megabyte or two for reuse. Only anonymous memory counts, in RAM or swapped
# out: under memory pressure the kernel drops pages of mapped files, 13 MB of libraries in one run.
_FIT = """
import ctypes
import gc
import re
import sys
from pathlib import Path
import pytorch_lightning as pl
from finetune.cli import run
from finetune.commands.lightning_cli import FinetuneCLI
from finetune.runs import deferred_checkpoints

# A slow disk lets checkpoints wait in memory: 12 MB, which one reading would have and the other not.
deferred_checkpoints.QUICK = float("inf")

kept, seen, leak = [], [], int(sys.argv[1])  # a fit makes sys.argv its own

class Resident(pl.Callback):
    def on_train_epoch_end(self, trainer, pl_module):
        kept.append(b"x" * leak)
        gc.collect()
        ctypes.CDLL("libc.so.6").malloc_trim(0)
        status = Path("/proc/self/status").read_text()
        parts = re.findall(r"^(?:RssAnon|VmSwap):\\s*(\\d+) kB", status, re.MULTILINE)
        assert len(parts) == 2, status
        seen.append(1024 * sum(map(int, parts)))

real = FinetuneCLI.instantiate_trainer

def with_resident(self, **kwargs):
    trainer = real(self, **kwargs)
    trainer.callbacks.append(Resident())
    return trainer

FinetuneCLI.instantiate_trainer = with_resident
run(["fit", *sys.argv[2:], "--trainer.max_epochs", "15"])
print("growth", seen[-1] - seen[4])
"""


def growth(leak: int, colours: Path, folder: Path) -> int:
    """Return how much a fit that leaks so many bytes in each epoch has grown."""
    done = subprocess.run(
        [sys.executable, "-c", _FIT, str(leak), "--data.root", str(colours), *QUICKEST],
        cwd=folder,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        text=True,
        check=True,
        timeout=120,
    )
    return int(done.stdout.split()[-1])


def test_the_memory_of_a_fit_does_not_grow_with_its_epochs(colours, tmp_path):
    assert growth(0, colours, tmp_path) < _ALLOWED
    assert growth(_LEAK, colours, tmp_path) > 4 * _ALLOWED  # and so it would be seen
