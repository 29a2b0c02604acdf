"""`python suspended_rank.py RANK STEP ARGUMENTS…`: `finetune ARGUMENTS`, in which a rank suspends itself before a step.

Ranks wait four seconds for one another.
"""

import os
import signal
import sys
from datetime import timedelta
from typing import Any
from unittest.mock import patch

from forked import become_finetune

from finetune.distributed import waits
from finetune.training.classifier import Classifier

RANK, STEP = int(sys.argv[1]), int(sys.argv[2])
_training_step = Classifier.training_step


def training_step(self: Classifier, batch: dict[str, Any], batch_idx: int) -> Any:
    if (self.trainer.global_rank, self.trainer.global_step) == (RANK, STEP):
        os.kill(os.getpid(), signal.SIGSTOP)
    return _training_step(self, batch, batch_idx)


patch.object(Classifier, "training_step", training_step).start()
patch.object(waits, "LONGEST_WAIT", timedelta(seconds=4)).start()
become_finetune(sys.argv[3:])
