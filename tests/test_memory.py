"""The memory of a fit does not grow with its epochs."""

import os
import subprocess
import sys
from pathlib import Path

from conftest import QUICK

_ALLOWED = 2**23  # bytes over the ten epochs after the first four, in which the control leaks ten times as many

# In a process of its own, whose allocator holds nothing of other tests, and takes large pieces from the system.
_FIT = """
import sys
from pathlib import Path
import pytorch_lightning as pl
from finetune.cli import run
from finetune.lightning_cli import FinetuneCLI

kept, seen, leak = [], [], int(sys.argv[1])  # a fit makes sys.argv its own

class Resident(pl.Callback):
    def on_train_epoch_end(self, trainer, pl_module):
        kept.append(b"x" * leak)
        seen.append(4096 * int(Path("/proc/self/statm").read_text().split()[1]))

real = FinetuneCLI.instantiate_trainer

def with_resident(self, **kwargs):
    trainer = real(self, **kwargs)
    trainer.callbacks.append(Resident())
    return trainer

FinetuneCLI.instantiate_trainer = with_resident
run(["fit", *sys.argv[2:], "--trainer.max_epochs", "14"])
print("growth", seen[-1] - seen[3])
"""


def growth(leak: int, colours: Path, folder: Path) -> int:
    """Return how much a fit that leaks so many bytes in each epoch has grown."""
    done = subprocess.run(
        [sys.executable, "-c", _FIT, str(leak), "--data.root", str(colours), *QUICK],
        cwd=folder,
        env={**os.environ, "OMP_NUM_THREADS": "1", "MALLOC_MMAP_THRESHOLD_": "65536"},
        stdout=subprocess.PIPE,
        text=True,
        check=True,
        timeout=120,
    )
    return int(done.stdout.split()[-1])


def test_the_memory_of_a_fit_does_not_grow_with_its_epochs(colours, tmp_path):
    assert growth(0, colours, tmp_path) < _ALLOWED
    assert growth(8 * 2**20, colours, tmp_path) > 5 * _ALLOWED  # and so it would be seen
