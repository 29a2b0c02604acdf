"""The memory of a fit does not grow with its epochs."""

from pathlib import Path

import pytest
from colours import QUICKEST
from processes import run_script

pytestmark = pytest.mark.slow

_ALLOWED = 2**19  # bytes over ten epochs: 60 kB seen
_LEAK = 2**18  # bytes an epoch, the size of a few images: the control

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
        if len(seen) >= 15:
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
run(["fit", *sys.argv[2:], "--trainer.max_epochs", "25"])
print("growth", seen[14] - seen[4], seen[24] - seen[14])
"""


def test_the_memory_of_a_fit_does_not_grow_with_its_epochs(colours: Path, tmp_path: Path) -> None:
    (tmp_path / "fit.py").write_text(_FIT)
    options = ["--data.root", colours, *QUICKEST, "--test_after_fit", "false"]
    done = run_script(tmp_path / "fit.py", _LEAK, *options, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    _, growth, growth_with_leak = done.stdout.splitlines()[-1].split()
    assert int(growth) < _ALLOWED
    # the control: a leak from the sixteenth epoch on would be seen
    assert int(growth_with_leak) > 4 * _ALLOWED
